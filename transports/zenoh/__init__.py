"""Zenoh: uProtocol on key expressions, one publication for each message.

transport.py  the UTransport: send_batch -> sender.py -> session; subscriber callbacks -> arrivals -> listeners
sender.py     the thread that puts, and the flush behind what was put
mapping.py    UMessage <-> key and attachment, pure
stalls.py     which peer blocks sending
config.py     settings -> a linked session
covers.py          Filters of a session -> the Zenoh subscriptions that bring their messages
presence.py        Whether anybody listens to a publish, as far as Zenoh knows
receiver.py        Receives over Zenoh: the subscriptions of one session, and the filters that their messages match
threads.py         Keeps the interpreter's state of threads that Python did not start and that call it often
"""

from typing import Final

from transports.plugin import TransportPlugin
from transports.zenoh.config import ZenohConfig
from transports.zenoh.transport import ZenohTransport

PLUGIN: Final = TransportPlugin("zenoh", ZenohConfig, ZenohTransport, ZenohTransport.capabilities)

__all__ = ["PLUGIN", "ZenohConfig", "ZenohTransport"]
