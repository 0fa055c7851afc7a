"""Zenoh: uProtocol on key expressions, one publication for each message.

transport.py  the UTransport: send_batch -> sender.py -> session; which peer blocks sending
receiver.py   the subscriptions of a session -> the filters that their messages match -> arrivals -> listeners
sender.py     the thread that puts, and the flush behind what was put
older.py      notices publishers with an older layout of keys
mapping.py    UMessage <-> key and attachment, pure
config.py     settings -> a linked session
presence.py   whether anybody listens to a publish or request, as far as Zenoh knows
probe.py      what can be found out before a streamer runs
threads.py    keeps the interpreter's state of threads that Python did not start and that call it often
"""

from typing import Final

from transports.plugin import TransportPlugin
from transports.zenoh.config import ZenohConfig
from transports.zenoh.transport import ZenohTransport

PLUGIN: Final = TransportPlugin("zenoh", ZenohConfig, ZenohTransport, ZenohTransport.capabilities)

__all__ = ["PLUGIN", "ZenohConfig", "ZenohTransport"]
