"""What an HTTP client gets of a record: JSON, or the UMessage itself. Pure.

Record -> json_of: topic, id, time, seq, and the payload: a Sample, text and JSON as such, anything else in base64
       -> umessage_of: the serialised UMessage in base64
event -> the lines of server-sent events (HTML standard, section 9.2)
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any, Final, Never

from google.protobuf.any_pb2 import Any as Wrapped
from google.protobuf.message import DecodeError

from history.records.record import Record
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, Sample
from uprotocol.encoded import EncodedMessage
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

RETENTION: Final = "retention"
_REASONS: Final = {
    Gap.REASON_RETENTION: (RETENTION, "older records were deleted"),
    Gap.REASON_CORRUPTION: ("damage", "the log is damaged, or was restored from a copy"),
    Gap.REASON_INCARNATION: ("log_ended", "the log no longer exists, with everything behind this position"),
}
_JSON: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ASCII: half a surrogate pair has no UTF-8
_FORMATS: Final[dict[int, str]] = {
    value: name.removeprefix("UPAYLOAD_FORMAT_") for name, value in UPayloadFormat.items()
}


def json_of(record: Record) -> str:
    """Returns one line of JSON."""
    message = record.message if type(record.message) is EncodedMessage else EncodedMessage.of(record.message)
    head = {
        "topic": uris.format(message.stamp.attributes.source),
        "id": uuids.format(message.attributes.id),
        "time": _time(record.time_ms),
        "seq": record.seq,
    }
    if record.epoch is not None:
        head["epoch"] = {"group": record.epoch.group, "time": list(record.epoch.time)}
    try:
        return _JSON.encode(head | payload_of(message.payload, message.stamp.payload_format))
    except RecursionError:  # JSON that is nested too deeply to be written again
        return _JSON.encode(head | _in_base64(message.payload, message.stamp.payload_format))


def umessage_of(record: Record) -> str:
    data: bytes = record.message.decoded().SerializeToString()
    return base64.b64encode(data).decode()


EVENT_FORMATS: Final[dict[str, Callable[[Record], str]]] = {"json": json_of, "umessage": umessage_of}


def payload_of(payload: bytes, format: int) -> dict[str, Any]:
    """Returns the member that has the payload: `sample`, `json`, `text`, or `payload` (base64) with its `format`."""
    try:
        if format == UPayloadFormat.UPAYLOAD_FORMAT_TEXT:
            return {"text": payload.decode()}
        if format == UPayloadFormat.UPAYLOAD_FORMAT_JSON:
            return {"json": json.loads(payload.decode(), parse_constant=_refuse, parse_float=_finite)}
        if format == UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF:
            sample = Sample.FromString(payload)
        elif format == UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY:
            sample, wrapped = Sample(), Wrapped.FromString(payload)
            if not wrapped.Unpack(sample):
                sample = Sample()
        else:
            sample = Sample()
        kind = sample.WhichOneof("value")
        if kind is not None and sample.path:  # as Spark decides it: a payload does not name its type
            return {"sample": _sample(sample, kind)}
    except (ValueError, DecodeError, RecursionError, OverflowError):
        pass
    return _in_base64(payload, format)


def _in_base64(payload: bytes, format: int) -> dict[str, Any]:
    return {"payload": base64.b64encode(payload).decode(), "format": _FORMATS.get(format, str(format))}


def _sample(sample: Sample, kind: str) -> dict[str, Any]:
    value = getattr(sample, kind)
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)  # JSON has no number for it
    made = {"path": sample.path, "value": value}
    if sample.HasField("time"):
        made["time"] = sample.time.ToJsonString()
    return made


def _refuse(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _time(time_ms: int) -> str:
    try:
        return uuids.moment(time_ms)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)


def gap_of(gap: Gap) -> dict[str, Any]:
    """Returns what is reported of records that can never be read: those of `log` between `after` and `before`."""
    reason, what = _REASONS.get(gap.reason, ("unknown", "records are missing"))
    return {
        "reason": reason,
        "what": what,
        "log": gap.incarnation.hex(),
        "after": gap.after_seq,
        "before": gap.before_seq or None,
    }


def gap_text(gap: Gap) -> str:
    return _JSON.encode(gap_of(gap))


def id_line(id: str) -> bytes:
    return b"id: %b\n" % id.encode()


def event_lines(data: str, name: str = "") -> bytes:
    """Returns the lines of an event without its id; `data` has no line breaks."""
    event = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (event, data.encode())
