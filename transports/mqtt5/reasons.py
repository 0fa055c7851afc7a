"""Reason codes of MQTT 5 (section 2.4) and errors of sockets -> UCode: the only place where they are translated.

A code is a plain int, and each of the 256 has a name and a UCode: brokers send codes where the specification does not
list them (mosquitto: PUBACK 0x95), and codes of later specifications.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

FAILURE_MIN: Final = 0x80
# in PUBACK: accepted and thrown away. A session whose client is away counts as a subscriber. Optional for a broker
NO_MATCHING_SUBSCRIBERS: Final = 0x10
UNSUPPORTED_VERSION: Final = 0x84
TOPIC_NAME_INVALID: Final = 0x90
IDENTIFIER_IN_USE: Final = 0x91
CODES: Final = range(256)


class Reason(NamedTuple):
    name: str
    code: UCode.ValueType


# A failure is retryable (UNAVAILABLE) if the state of the broker or of the connection causes it, since that may change.
# If the request itself causes it (its size, topic, format or sender), it is not: a retry fails again, and everything
# behind it would wait for ever.
#
# In the PUBACK of a message a failure concerns
#   its topic      0x87, 0x90: PERMISSION_DENIED. All messages with that topic get the same answer until somebody
#                  changes a rule of the broker (who may send there, which topics are valid); others go on
#   the message    0x95, 0x99: INVALID_ARGUMENT; 0x81, 0x82, 0x94, 0x9A, 0x9B: the broker finds the packet wrong.
#                  The next message with that topic may be accepted
#   one or all     0x80, 0x83, codes without a name: UNAVAILABLE; only messages behind it in its stream wait
#   the broker     OF_ALL: UNAVAILABLE; everything waits
#   us             0x86, 0x8A, 0x8C: our login; they end a connection, and no broker is known to send them in PUBACK
_REASONS: Final[dict[int, Reason]] = {
    0x80: Reason("Unspecified error", UCode.UNAVAILABLE),
    0x81: Reason("Malformed packet", UCode.INTERNAL),
    0x82: Reason("Protocol error", UCode.INTERNAL),
    # RabbitMQ in PUBACK: a queue is full
    0x83: Reason("Implementation specific error", UCode.UNAVAILABLE),
    UNSUPPORTED_VERSION: Reason("Unsupported protocol version", UCode.UNIMPLEMENTED),
    0x85: Reason("Client identifier not valid", UCode.INVALID_ARGUMENT),
    0x86: Reason("Bad user name or password", UCode.UNAUTHENTICATED),
    0x87: Reason("Not authorized", UCode.PERMISSION_DENIED),
    0x88: Reason("Server unavailable", UCode.UNAVAILABLE),
    0x89: Reason("Server busy", UCode.UNAVAILABLE),
    0x8A: Reason("Banned", UCode.PERMISSION_DENIED),
    0x8B: Reason("Server shutting down", UCode.UNAVAILABLE),
    0x8C: Reason("Bad authentication method", UCode.UNAUTHENTICATED),
    0x8D: Reason("Keep alive timeout", UCode.UNAVAILABLE),
    0x8E: Reason("Session taken over", UCode.UNAVAILABLE),
    0x8F: Reason("Topic filter invalid", UCode.INVALID_ARGUMENT),
    # by a rule of the broker, such as a number of levels: our names are valid MQTT
    TOPIC_NAME_INVALID: Reason("Topic name invalid", UCode.PERMISSION_DENIED),
    IDENTIFIER_IN_USE: Reason("Packet identifier in use", UCode.UNAVAILABLE),
    0x92: Reason("Packet identifier not found", UCode.UNAVAILABLE),
    0x93: Reason("Receive maximum exceeded", UCode.UNAVAILABLE),
    0x94: Reason("Topic alias invalid", UCode.INTERNAL),
    # mosquitto in PUBACK: more than its message_size_limit
    0x95: Reason("Packet too large", UCode.INVALID_ARGUMENT),
    0x96: Reason("Message rate too high", UCode.UNAVAILABLE),
    # not RESOURCE_EXHAUSTED, which is never retried: a broker's quota is freed with time
    0x97: Reason("Quota exceeded", UCode.UNAVAILABLE),
    0x98: Reason("Administrative action", UCode.UNAVAILABLE),
    0x99: Reason("Payload format invalid", UCode.INVALID_ARGUMENT),
    0x9A: Reason("Retain not supported", UCode.UNIMPLEMENTED),
    0x9B: Reason("QoS not supported", UCode.UNIMPLEMENTED),
    0x9C: Reason("Use another server", UCode.UNAVAILABLE),
    0x9D: Reason("Server moved", UCode.UNAVAILABLE),
    0x9E: Reason("Shared subscriptions not supported", UCode.UNIMPLEMENTED),
    0x9F: Reason("Connection rate exceeded", UCode.UNAVAILABLE),
    0xA0: Reason("Maximum connect time", UCode.UNAVAILABLE),
    0xA1: Reason("Subscription identifiers not supported", UCode.UNIMPLEMENTED),
    0xA2: Reason("Wildcard subscriptions not supported", UCode.UNIMPLEMENTED),
}
# of the whole broker, or of the connection: the next message would get the same answer
OF_ALL: Final = frozenset({0x88, 0x89, 0x8B, 0x8D, 0x8E, 0x93, 0x96, 0x97, 0x98, 0x9C, 0x9D, 0x9F, 0xA0})
# in a DISCONNECT because of a message, if one alone was in flight (AWS IoT Core). 0x87 is not among them: it may
# concern our login
OF_A_MESSAGE: Final = frozenset({TOPIC_NAME_INVALID, 0x95, 0x99, 0x9A, 0x9B})
_DISCONNECTED: Final = {0x00: "Normal disconnection", 0x04: "Disconnect with will message"}


class RefusedError(UStatusError):
    """The broker has answered with a code of failure; the connection goes on."""


def code_of(reason: int) -> UCode.ValueType:
    """The UCode of a reason code; UNAVAILABLE for a failure that no specification names, since it may pass."""
    if reason < FAILURE_MIN:
        return UCode.OK
    return _REASONS[reason].code if reason in _REASONS else UCode.UNAVAILABLE


def name_of(reason: int) -> str:
    return _REASONS[reason].name if reason in _REASONS else f"reason code {reason:#04x}"


def named(reason: int, properties: Mapping[str, Any]) -> str:
    """The reason code in words, with the reason string and the server reference, if any."""
    why, server = properties.get("ReasonString"), properties.get("ServerReference")
    details = [str(why)] if why else []
    if server:  # not followed: whoever answers here could send our password anywhere
        details.append(f"the broker names {server} instead: set host and port to it if that is right")
    return f"{name_of(reason)} ({'; '.join(details)})" if details else name_of(reason)


def ended(reason: int, properties: Mapping[str, Any]) -> str:
    """The reason of a DISCONNECT in words."""
    return _DISCONNECTED.get(reason) or named(reason, properties)


def refused(what: str, reason: int, properties: Mapping[str, Any]) -> RefusedError:
    return RefusedError(code_of(reason), f"the broker refuses {what}: {named(reason, properties)}")


def unreachable(address: str, error: BaseException) -> UStatusError:
    """The error for a connection that failed before the broker answered."""
    code, broker = UCode.UNAUTHENTICATED, f"the broker at {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {broker} is not valid ({error.verify_message}): is ca_file right?"
    elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        why = getattr(error, "reason", None) or error
        what = "is tls.alpn" if "NO_APPLICATION_PROTOCOL" in str(why) else "are cert_file, key_file"
        text = f"TLS with {broker} failed ({why}): {what} right?"
    elif isinstance(error, ValueError):  # UnicodeError, too: a name of more than 63 characters between two dots
        code, text = UCode.INVALID_ARGUMENT, f"{address} is not a possible address ({error}): is the host right?"
    elif not isinstance(error, OSError):
        code, text = UCode.INTERNAL, f"connecting to {broker} failed: unexpected error {error!r}"
    else:
        why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        code, text = UCode.UNAVAILABLE, f"no connection to {broker} ({why}): is it running, and the port right?"
    return UStatusError(code, text)
