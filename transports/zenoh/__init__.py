"""Zenoh: uProtocol on key expressions, one publication a message.

transport.py  the UTransport: send_batch -> sender.py -> session        mapping.py  UMessage <-> key and attachment, pure
              subscriber callbacks -> arrivals -> listeners                config.py   settings -> a session that is linked
sender.py     the thread that puts, and the flush behind what was put
"""

from typing import Final

from transports.plugin import TransportPlugin
from transports.zenoh.config import ZenohConfig
from transports.zenoh.transport import ZenohTransport

PLUGIN: Final = TransportPlugin("zenoh", ZenohConfig, ZenohTransport, ZenohTransport.capabilities)

__all__ = ["PLUGIN", "ZenohConfig", "ZenohTransport"]
