"""DDS: uProtocol on one topic, where partitions carry the addresses (docs/dds-mapping.md).

transport.py  the UTransport         writers.py    the thread that writes, one writer for each (source, sink)
link.py       a domain participant   readers.py    filters -> readers, the thread that takes
config.py     its settings           roll_call.py  who is there, and who has seen our readers
mapping.py    UMessage <-> sample and partitions, pure
acknowledgements.py  have all readers acknowledged what a writer has written? pure
probe.py      what can be found out before a streamer runs
"""

from typing import Final

from transports.dds.config import DdsConfig
from transports.dds.transport import DdsTransport
from transports.plugin import TransportPlugin

PLUGIN: Final = TransportPlugin("dds", DdsConfig, DdsTransport, DdsTransport.capabilities)

__all__ = ["PLUGIN", "DdsConfig", "DdsTransport"]
