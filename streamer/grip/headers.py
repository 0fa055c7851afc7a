"""Reads what backends say in the Grip headers of their answers, and writes what the edge says in its requests.

Grip-Hold: stream                                 hold the client's request open: as a stream, or for one response
Grip-Channel: fruit; prev-id=3                    ... with the items of these channels after these ids
Grip-Link: </fruit/?after=3>; rel=next; timeout=120   where missed items can be had; asked after so long without one
Grip-Timeout: 55                                  a held response ends after so long
Grip-Keep-Alive: \\n; format=cstring; timeout=20   written into an idle stream
Grip-Status: 202 Accepted                         status for the client in place of that of the answer

Grip headers, parameters and links that are not known are ignored.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from streamer.grip.items import CHANNEL_BYTES_MAX, ID_BYTES_MAX, NO_TEXT
from uprotocol.status import invalid

CHANNELS_PER_HOLD_MAX: Final = 64
URL_BYTES_MAX: Final = 4_096
KEEP_ALIVE_BYTES_MAX: Final = 4_096
KEEP_ALIVE_TIMEOUT_S: Final = 55.0  # where the header names none
TIMEOUT_S_MAX: Final = 31_536_000  # a year

_ESCAPE: Final = re.compile(rb"\\(x[0-9A-Fa-f]{2}|.|$)", re.DOTALL)
_ESCAPED: Final = {b"r": b"\r", b"n": b"\n", b"\\": b"\\"}
_VALUE_END: Final = re.compile(r'[,;"<]')
_TO_QUOTE: Final = re.compile(r'[;,"\\]|^\s|\s$')


class HeldChannel(NamedTuple):
    """A channel of a hold. `prev_id`: of the item after which the hold begins; None: the backend keeps no order."""

    name: str
    prev_id: str | None


class NextLink(NamedTuple):
    """Where missed items can be had. `url` may be relative. `timeout_s`: silence after which it is asked."""

    url: str
    timeout_s: float | None


class KeepAlive(NamedTuple):
    """What is written every `timeout_s` seconds; `is_idle`: only after so long without anything else."""

    content: bytes
    timeout_s: float
    is_idle: bool


class _Part(NamedTuple):
    value: str
    parameters: dict[str, str]  # by name in lower case; the first of a name counts


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the Grip headers of an answer say."""

    hold: Literal["stream", "response"] | None
    channels: tuple[HeldChannel, ...]  # names differ
    link: NextLink | None
    timeout_s: float | None
    keep_alive: KeepAlive | None
    status: int | None
    reason: str = ""  # of the status; "": the usual one

    @classmethod
    def of(cls, headers: Iterable[tuple[str, str]]) -> Instruction:
        """Reads all headers of an answer. Raises INVALID_ARGUMENT, which names the header."""
        grip: dict[str, list[str]] = {}
        for name, value in headers:
            if name.lower().startswith("grip-"):
                grip.setdefault(name.lower(), []).append(value.strip())
        status, reason = _status(grip)
        return cls(_hold(grip), _channels(grip), _link(grip), _timeout(grip), _keep_alive(grip), status, reason)


def grip_last(last_ids: Mapping[str, str]) -> list[str]:
    """Returns the value of one `Grip-Last` header for each channel, with the id of the last item that is known."""
    return [f"{name}; last-id={_quoted(id)}" for name, id in last_ids.items()]


def _quoted(id: str) -> str:
    if not _TO_QUOTE.search(id):
        return id
    escaped = re.sub(r'(["\\])', r"\\\1", id)
    return f'"{escaped}"'


def _hold(grip: Mapping[str, list[str]]) -> Literal["stream", "response"] | None:
    match grip.get("grip-hold", [""])[0]:
        case "stream":
            return "stream"
        case "response":
            return "response"
        case "" if "grip-hold" not in grip:
            return None
        case other:
            raise invalid(f"Grip-Hold: expected stream or response, got {other[:80]!r}")


def _channels(grip: Mapping[str, list[str]]) -> tuple[HeldChannel, ...]:
    channels: dict[str, HeldChannel] = {}
    for part in _parts("Grip-Channel", grip):
        name, prev_id = part.value, part.parameters.get("prev-id") or None
        for text, bytes_max in ((name, CHANNEL_BYTES_MAX), (prev_id or "", ID_BYTES_MAX)):
            if NO_TEXT.search(text) or len(text.encode()) > bytes_max:
                raise invalid(f"Grip-Channel: expected UTF-8, {bytes_max} bytes at most, got {ascii(text)[:80]}")
        if not name:
            raise invalid("Grip-Channel: expected the name of a channel, got none")
        channels[name] = HeldChannel(name, prev_id)
        if len(channels) > CHANNELS_PER_HOLD_MAX:
            raise invalid(f"Grip-Channel: expected {CHANNELS_PER_HOLD_MAX} channels at most, got more")
    return tuple(channels.values())


def _link(grip: Mapping[str, list[str]]) -> NextLink | None:
    """Returns the last link of relation next."""
    link = None
    for part in _parts("Grip-Link", grip):
        if "next" not in part.parameters.get("rel", "").lower().split():
            continue
        url = part.value[1:-1].strip()
        if not (part.value.startswith("<") and part.value.endswith(">") and url) or NO_TEXT.search(url):
            raise invalid(f"Grip-Link: expected an address in angle brackets, got {ascii(part.value)[:80]}")
        if len(url) > URL_BYTES_MAX:
            raise invalid(f"Grip-Link: expected an address of {URL_BYTES_MAX} bytes at most, got {len(url)}")
        timeout = part.parameters.get("timeout")
        link = NextLink(url, None if timeout is None else _seconds("Grip-Link", timeout))
    return link


def _timeout(grip: Mapping[str, list[str]]) -> float | None:
    values = grip.get("grip-timeout")
    return None if values is None else _seconds("Grip-Timeout", values[0])


def _keep_alive(grip: Mapping[str, list[str]]) -> KeepAlive | None:
    """Its content ends at the first semicolon, and may have commas."""
    values = grip.get("grip-keep-alive")
    if values is None:
        return None
    text, _, rest = values[0].partition(";")
    parts = list(_split("Grip-Keep-Alive", "-;" + rest))
    parameters = parts[0].parameters if parts else {}
    raw = text.strip().encode(errors="surrogateescape")
    if not raw:
        raise invalid("Grip-Keep-Alive: expected what to write, got nothing")
    mode, format = parameters.get("mode") or "idle", parameters.get("format") or "raw"
    if mode not in ("idle", "interval"):
        raise invalid(f"Grip-Keep-Alive: expected the mode idle or interval, got {mode[:80]!r}")
    match format:
        case "raw":
            content = raw
        case "cstring":
            content = _unescaped(raw)
        case "base64":
            try:
                content = base64.b64decode(raw, validate=True)
            except binascii.Error:
                raise invalid(f"Grip-Keep-Alive: expected base64, got {ascii(text)[:80]}") from None
        case _:
            raise invalid(f"Grip-Keep-Alive: expected the format raw, cstring or base64, got {format[:80]!r}")
    if len(content) > KEEP_ALIVE_BYTES_MAX:
        raise invalid(f"Grip-Keep-Alive: expected {KEEP_ALIVE_BYTES_MAX} bytes at most, got {len(content)}")
    timeout = parameters.get("timeout")
    seconds = KEEP_ALIVE_TIMEOUT_S if timeout is None else _seconds("Grip-Keep-Alive", timeout)
    return KeepAlive(content, seconds, mode == "idle")


def _unescaped(raw: bytes) -> bytes:
    def byte(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code[:1] == b"x" and len(code) == 3:
            return bytes.fromhex(code[1:].decode())
        if code not in _ESCAPED:
            raise invalid(f"Grip-Keep-Alive: expected the escapes \\r, \\n, \\\\ and \\xHH, got {ascii(match[0])[1:]}")
        return _ESCAPED[code]

    return _ESCAPE.sub(byte, raw)


def _status(grip: Mapping[str, list[str]]) -> tuple[int | None, str]:
    values = grip.get("grip-status")
    if not values or not values[0]:
        return None, ""
    code, _, reason = values[0].partition(" ")
    if not re.fullmatch("[2-5][0-9][0-9]", code, re.ASCII) or NO_TEXT.search(reason):
        raise invalid(f"Grip-Status: expected a status from 200 to 599 and its reason, got {ascii(values[0])[:80]}")
    return int(code), reason.strip()


def _seconds(header: str, text: str) -> float:
    if not re.fullmatch("[0-9]{1,9}", text, re.ASCII) or int(text) > TIMEOUT_S_MAX:
        raise invalid(f"{header}: expected a timeout in whole seconds, {TIMEOUT_S_MAX} at most, got {ascii(text)[:80]}")
    return float(text)


# Values with parameters: VALUE; NAME=VALUE; NAME="QUOTED VALUE", VALUE ...


def _parts(header: str, grip: Mapping[str, list[str]]) -> Iterator[_Part]:
    """Returns the comma separated values of all lines of `header`."""
    for line in grip.get(header.lower(), ()):
        yield from _split(header, line)


def _split(header: str, line: str) -> Iterator[_Part]:
    for part in _cut(header, line, ","):
        if part.strip():
            value, *parameters = _cut(header, part, ";")
            named: dict[str, str] = {}
            for parameter in parameters:
                name, _, text = parameter.partition("=")
                named.setdefault(name.strip().lower(), _unquoted(text.strip()))
            yield _Part(value.strip(), named)


def _cut(header: str, text: str, separator: str) -> list[str]:
    """Returns the parts of `text` between separators that are neither in quotes nor in angle brackets."""
    parts, begin, at = [], 0, 0
    while match := _VALUE_END.search(text, at):
        at = match.end()
        if match[0] == separator:
            parts.append(text[begin : match.start()])
            begin = at
        elif match[0] == "<" and header == "Grip-Link":
            at = text.find(">", at) + 1 or at
        elif match[0] == '"':
            at = _quote_end(header, text, at)
    return [*parts, text[begin:]]


def _quote_end(header: str, text: str, at: int) -> int:
    while at < len(text):
        if text[at] == '"':
            return at + 1
        at += 2 if text[at] == "\\" else 1
    raise invalid(f"{header}: expected a closing quote, got {ascii(text)[:80]}")


def _unquoted(text: str) -> str:
    if len(text) < 2 or not text.startswith('"') or not text.endswith('"'):
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
