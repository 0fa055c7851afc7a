"""Zenoh: uProtocol on key expressions, one publication a message.

transport.py  the UTransport: send_batch -> sender.py -> session; subscriber callbacks -> arrivals -> listeners
sender.py     the thread that puts, and the flush behind what was put
mapping.py    UMessage <-> key and attachment, pure
stalls.py     which peer holds up what is sent
config.py     settings -> a session that is linked
"""

from typing import Final

from transports.plugin import TransportPlugin
from transports.zenoh.config import ZenohConfig
from transports.zenoh.transport import ZenohTransport

PLUGIN: Final = TransportPlugin("zenoh", ZenohConfig, ZenohTransport, ZenohTransport.capabilities)

__all__ = ["PLUGIN", "ZenohConfig", "ZenohTransport"]
