"""MQTT 5: uProtocol over a broker, in-vehicle and off-vehicle.

transport.py -> window.py     send, answered by PUBACK      mapping.py  UMessage <-> PUBLISH, pure
             -> receiving.py  PUBLISH -> listeners          wire.py     PUBLISH, PUBACK <-> bytes, with templates
             -> session.py    filters that the broker has   packets.py  the rare packets <-> bytes, pure
             -> losses.py     messages that the broker has lost
             -> link.py       keeps a connection up -> connection.py  TCP, TLS, packets -> broker
                                                       websocket.py   the same over WebSocket
probe.py   what can be found out at a broker before a streamer runs
config.py  settings    reasons.py  reason codes -> UCode
"""

from typing import Final

from transports.mqtt5.config import Mqtt5Config, TlsConfig, WebSocketConfig
from transports.mqtt5.transport import Mqtt5Transport
from transports.plugin import TransportPlugin
from uprotocol.transport import Capability

CAPABILITIES: Final = (
    Capability.PUSH
    | Capability.ACK
    | Capability.PERSISTENT_SESSION
    | Capability.WILDCARD_SOURCE
    | Capability.PUBLISH_WITHOUT_SINK
    | Capability.ABSENCE
)
"""In-vehicle and with a session, as by default; an instance has fewer if its settings say so."""

PLUGIN: Final = TransportPlugin("mqtt5", Mqtt5Config, Mqtt5Transport, CAPABILITIES)

__all__ = ["PLUGIN", "Mqtt5Config", "Mqtt5Transport", "TlsConfig", "WebSocketConfig"]
