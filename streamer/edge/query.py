"""The parameters of GET /stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from streamer.edge.events import EVENT_FORMATS
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.uri_pb2 import UUri

QUERY_TOPICS_MAX: Final = 64  # of one request
PAGE_RECORDS_MAX: Final = 10_000  # of `mode=poll`
PAGE_RECORDS: Final = 500
QUERY_WAIT_MS_MAX: Final = 60_000
_KNOWN: Final = ("topic", "since", "format", "mode", "max", "wait", "epochs")


@dataclass(frozen=True)
class Query:
    topics: tuple[UUri, ...]
    since: str = ""
    format: str = "json"
    mode: Literal["stream", "poll"] = "stream"
    records_max: int = PAGE_RECORDS
    wait_ms: int = 0
    is_atomic: bool = False

    @classmethod
    def of(cls, given: Sequence[tuple[str, str]], last_event_id: str | None = None) -> Query:
        """`given`: names and values. Raises INVALID_ARGUMENT."""
        values: dict[str, list[str]] = {}
        for name, value in given:
            if name not in _KNOWN:
                raise invalid(f"unknown parameter {name[:80]!r}; known: {', '.join(_KNOWN)}")
            values.setdefault(name, []).append(value)
        topics = values.pop("topic", [])
        if not topics or len(topics) > QUERY_TOPICS_MAX:
            raise invalid(f"expected topic=up://AUTHORITY/ENTITY/VERSION/RESOURCE, 1 to {QUERY_TOPICS_MAX} times")
        if twice := [name for name, several in values.items() if len(several) > 1]:
            raise invalid(f"expected {twice[0]} once, got it {len(values[twice[0]])} times")
        one = {name: value for name, (value,) in values.items()}
        mode = _choice(one, "mode", ("stream", "poll"))
        if mode == "stream" and (only := [name for name in ("max", "wait") if name in one]):
            raise invalid(f"{only[0]} is for mode=poll")
        is_atomic = _choice(one, "epochs", ("none", "atomic")) == "atomic"
        if is_atomic and (mode == "poll" or one.get("format", "json") != "json"):
            raise invalid("epochs=atomic is for streams of JSON: leave out mode and format")
        return cls(
            tuple(uris.parse(topic) for topic in topics),
            last_event_id or one.get("since", ""),
            _choice(one, "format", tuple(EVENT_FORMATS)),
            "poll" if mode == "poll" else "stream",
            _number(one, "max", 1, PAGE_RECORDS_MAX, PAGE_RECORDS),
            _number(one, "wait", 0, QUERY_WAIT_MS_MAX, 0),
            is_atomic,
        )


def _choice(given: dict[str, str], name: str, known: Sequence[str]) -> str:
    value = given.get(name, known[0])
    if value not in known:
        raise invalid(f"expected {name} to be one of {', '.join(known)}, got {value[:80]!r}")
    return value


def _number(given: dict[str, str], name: str, least: int, most: int, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise invalid(f"expected {name} to be a number from {least} to {most}, got {text[:80]!r}")
    return int(text)
