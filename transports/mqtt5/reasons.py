"""Reason codes of MQTT 5 (section 2.4) and errors of sockets -> UCode: the one place where they are translated."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from paho.mqtt.reasoncodes import ReasonCode

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

FAILURE_MIN: Final = 0x80
# in PUBACK: taken, and thrown away; a session whose client is away does match. A broker need not say it
NO_MATCHING_SUBSCRIBERS: Final = 0x10

_CODES: Final[dict[int, UCode.ValueType]] = {  # what is missing is UNAVAILABLE: it may be tried again
    0x81: UCode.INTERNAL,  # malformed packet
    0x82: UCode.INTERNAL,  # protocol error
    0x84: UCode.UNIMPLEMENTED,  # unsupported protocol version
    0x85: UCode.INVALID_ARGUMENT,  # client identifier not valid
    0x86: UCode.UNAUTHENTICATED,  # bad user name or password
    0x87: UCode.PERMISSION_DENIED,  # not authorized
    0x8A: UCode.PERMISSION_DENIED,  # banned
    0x8C: UCode.UNAUTHENTICATED,  # bad authentication method
    0x8F: UCode.INVALID_ARGUMENT,  # topic filter invalid
    0x90: UCode.INVALID_ARGUMENT,  # topic name invalid
    0x95: UCode.INVALID_ARGUMENT,  # packet too large
    0x99: UCode.INVALID_ARGUMENT,  # payload format invalid
    0x9B: UCode.UNIMPLEMENTED,  # QoS not supported
    0x9E: UCode.UNIMPLEMENTED,  # shared subscriptions not supported
    0xA1: UCode.UNIMPLEMENTED,  # subscription identifiers not supported
    0xA2: UCode.UNIMPLEMENTED,  # wildcard subscriptions not supported
}
# Quota exceeded (0x97) is UNAVAILABLE rather than RESOURCE_EXHAUSTED, which is never tried again: a broker's quota
# frees itself.


def code_of(reason: int) -> UCode.ValueType:
    return UCode.OK if reason < FAILURE_MIN else _CODES.get(reason, UCode.UNAVAILABLE)


def named(reason: ReasonCode, properties: Mapping[str, Any]) -> str:
    """What the broker said, and perhaps why."""
    why = properties.get("ReasonString")
    return f"{reason} ({why})" if why else str(reason)


def refused(what: str, reason: ReasonCode, properties: Mapping[str, Any]) -> UStatusError:
    """The broker said no."""
    return UStatusError(code_of(reason.value), f"the broker refuses {what}: {named(reason, properties)}")


def unreachable(address: str, error: BaseException) -> UStatusError:
    """The connection failed before the broker said anything."""
    code, broker = UCode.UNAUTHENTICATED, f"the broker at {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"{broker} is not who it should be ({error.verify_message}): is ca_file right?"
    elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        why = getattr(error, "reason", None) or error
        text = f"TLS with {broker} failed ({why}): are cert_file, key_file right?"
    elif isinstance(error, ValueError):  # UnicodeError, too: a name of more than 63 characters between two dots
        code, text = UCode.INVALID_ARGUMENT, f"there can be no broker at {address} ({error}): is the host right?"
    elif not isinstance(error, OSError):
        code, text = UCode.INTERNAL, f"connecting to {broker} failed ({error!r}): this should not happen"
    else:
        why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        code, text = UCode.UNAVAILABLE, f"no connection to {broker} ({why}): is it running, and the port right?"
    return UStatusError(code, text)
