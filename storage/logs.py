"""The log of a process, set up here for every command: text or JSON on standard error, one line of a kind and minute.

structlog, logging of foreign libraries, what nobody caught -> Repeats -> level, time, escaped, no values -> text | JSON
            first of its kind, or another reason: at once (that costs the most) |
                                                                       '-> held: counted, and told with the last of
                                                                           them when the minute is over, or at exit

A kind: the event's text and the fields that say whom it is about. A condition and its end (CONDITIONS) are one kind,
whose reason is another each time: no end is held back. `repeated=N`: N times since the line before.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TextIO

import structlog

from storage.log_output import LogOutput

Format = Literal["text", "json"]
Event = MutableMapping[str, Any]

PERIOD_S: Final = 60.0
KINDS_MAX: Final = 1_000  # told apart; what is beyond them counts as one kind. Some 150 texts are ours
KINDS_PER_TEXT_MAX: Final = 20  # ... of one text, whose fields a stranger may make up; a gateway has fewer endpoints
WHOM: Final = (
    "endpoint",
    "peer",
    "log",
    "authority",
    "broker",
    "part",
    "thread",
    "worker",
    "path",
    "note",
    "destination",
    "logger",
    "service",
    "culprit",
    "topic_filter",
)
REASON: Final = ("reason", "error", "why", "what", "detail", "kind", "code", "state", "now")
"""Fields that say why, or how it is now: a line in which one is another than in the last line of its kind is written.
Numbers in them make no other reason."""
REASON_CHARACTERS_MAX: Final = 500  # of a field, that are compared
CHANGES_MAX: Final = 30  # such lines of one kind within a minute: a stranger may make up reasons, or come and go
CONDITIONS: Final = (
    ("connected", "connection lost", "the connection to the broker is lost", "no connection to the broker yet"),
    ("the log can't be written; messages are refused until it can", "the log takes messages again"),
    ("the log can't be read for a peer; trying again", "the log can be read for a peer again"),
    ("dead letters are not stored", "dead letters are stored again"),
    (
        "publishes are pushed again",
        "publishes are still pushed",
        "publishes are not pushed any more, but followed",
    ),
    (
        "a DDS receiver does not take what is sent to it; other topics go on",
        "a DDS receiver takes what is sent to it again, or has ended",
    ),
)
"""Texts of a condition and of its end: each ends the other."""
_CONDITION_OF: Final = {text: texts for texts in CONDITIONS for text in texts}
VALUE_CHARACTERS_MAX: Final = 2_000
TRACE_CHARACTERS_MAX: Final = 8_000
FRAMES_MAX: Final = 30
_SECRET: Final = re.compile(r"password|passwd|secret|credential|private_key|headers", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

log = structlog.get_logger()


def configure(level: str = "warning", format: Format = "text", file: TextIO | None = None) -> None:
    """Log what is as bad as `level` or worse to `file`, by default standard error. May be called again.

    Standard error is written by a thread of its own: a reader that stands still or is gone, and a full disk, harm the
    log alone.
    """
    target: Any = file if file is not None else _standard_error()
    is_terminal = (file if file is not None else sys.stderr).isatty()
    rest: list[Any] = [structlog.processors.add_log_level]
    if format == "json":
        rest += [_utc, harmless, _json]
    else:
        plain = structlog.dev.plain_traceback
        text = structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain)
        rest += [structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False), harmless, text]

    def emit(method: str, event: Any) -> None:
        for process in rest:
            event = process(None, method, event)
        structlog.PrintLogger(target).msg(event)

    repeats = Repeats(emit)
    structlog.configure(
        processors=[repeats, *rest],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=file is None,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Foreign()], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda told: _uncaught(told.exc_type, told.exc_value, told.exc_traceback, told.thread)
    sys.unraisablehook = lambda told: log.error("an exception that could not be raised", exc_info=told.exc_value)
    atexit.register(repeats.close)


@functools.cache
def _output(descriptor: int) -> LogOutput:
    output = LogOutput(descriptor)
    atexit.register(output.close)  # before that of `Repeats` is registered, so that it runs after it
    return output


def _standard_error() -> LogOutput | TextIO:
    try:
        return _output(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # it is no file, but what a test or a notebook has put there
        return sys.stderr


# What is written


def harmless(_: Any, __: str, event: Event) -> Event:
    """No control characters, no secrets, no local variables, nothing of any length."""
    if error := _error(event.pop("exc_info", None)):
        event["exception"] = trace(error)
    event.pop("stack_info", None)
    for key, value in event.items():
        if is_secret(key):
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = escaped(value) if key != "exception" else value
        elif not isinstance(value, int | None) and not (isinstance(value, float) and math.isfinite(value)):
            shown = repr(value)
            is_list = isinstance(value, list | tuple) and all(isinstance(one, str | int) for one in value)
            event[key] = value if is_list and len(shown) <= VALUE_CHARACTERS_MAX else escaped(shown)
    return event


def escaped(text: str, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    """One line: what can't be printed (line ends, terminal sequences, marks that turn writing) as Python writes it."""
    if len(text) > characters_max:
        text = f"{text[:characters_max]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def is_secret(name: str) -> bool:
    """True if a field or setting of this name must not be shown; a file that holds a secret may be."""
    return _SECRET.search(name) is not None and not name.endswith("file")


def trace(error: BaseException) -> str:
    """Where it was raised, without the values of variables: they hold payloads and passwords."""
    text = "".join(traceback.format_exception(error, limit=-FRAMES_MAX)).rstrip("\n")[-TRACE_CHARACTERS_MAX:]
    # indented, so that no message within looks like a line of the log
    return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))


def _error(given: Any) -> BaseException | None:
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        return given[1] if isinstance(given[1], BaseException) else None
    return sys.exc_info()[1] if given else None


def _utc(_: Any, __: str, event: Event) -> Event:
    event["timestamp"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _json(_: Any, __: str, event: Event) -> str:
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return json.dumps({**first, **event}, default=repr)


# One line of a kind and minute


@dataclass(slots=True)
class _Kind:
    until: float
    reason: Any = None  # of the last line that was written
    changes: int = 0  # lines that were written for another reason
    held: int = 0
    method: str = ""
    last: Event = field(default_factory=dict)
    held_reason: Any = None  # of `last`

    def taken(self) -> tuple[str, Event] | None:
        """What was held, with its number: to be written now. None: nothing was."""
        if not self.held:
            return None
        self.last["repeated"], self.held = self.held, 0
        return self.method, self.last


def _reason(event: Event) -> Iterator[str]:
    for name in REASON:
        if name in event:
            yield _NUMBERS.sub("#", str(event[name])[:REASON_CHARACTERS_MAX])
    if (error := _error(event.get("exc_info"))) is not None:
        yield _NUMBERS.sub("#", repr(error)[:REASON_CHARACTERS_MAX])


class Repeats:
    """A processor of structlog: lets the first line of a kind through, and those with another reason; then one a minute
    with the number of the others.

    `emit(method, event)` writes what was held, from a thread that lives while something is. Any thread may log.
    """

    def __init__(self, emit: Callable[[str, Event], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._monotonic = emit, monotonic
        self._lock = threading.RLock()  # a signal's handler, or a finaliser, may log while we are here
        self._kinds: dict[Any, _Kind] = {}
        self._texts: Counter[Any] = Counter()
        self._timer: threading.Timer | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Repeats({len(self._kinds)} kinds, {sum(kind.held for kind in self._kinds.values())} lines held)"

    def __call__(self, _: Any, method: str, event: Event) -> Event:
        text = event.pop("_kind", event.get("event"))
        if method == "debug" or self._closed:
            return event
        reason, before = (text, *_reason(event)), None
        with self._lock:
            now, whom = self._monotonic(), tuple(str(event[field]) for field in WHOM if field in event)
            key, kind = self._find(_CONDITION_OF.get(text, text), whom, now)
            if kind is None or now >= kind.until:
                if kind is None:
                    self._texts[key[0]] += 1
                elif kind.held and kind.held_reason == reason:
                    event["repeated"] = kind.held + 1
                elif kind.held:
                    before = kind.taken()
                self._kinds[key] = _Kind(now + PERIOD_S, reason)
            elif kind.reason == reason or kind.changes >= CHANGES_MAX or key[1] is None:
                kind.held_reason = reason
                self._hold(kind, method, event, now)
            else:
                before = kind.taken()
                kind.reason, kind.changes = reason, kind.changes + 1
        if before is not None:
            self._emit(*before)
        return event

    def _hold(self, kind: _Kind, method: str, event: Event, now: float) -> NoReturn:
        kind.held += 1
        if error := _error(event.pop("exc_info", None)):
            event.setdefault("error", repr(error))  # its frames were shown with the first line
        kind.method, kind.last = method, event
        self._wait(kind.until - now)
        raise structlog.DropEvent

    def _find(self, text: Any, whom: tuple[str, ...], now: float) -> tuple[tuple[Any, Any], _Kind | None]:
        key: tuple[Any, Any] = (text, whom)
        if key in self._kinds:
            return key, self._kinds[key]
        if self._texts[text] >= KINDS_PER_TEXT_MAX or len(self._kinds) >= KINDS_MAX:
            for one in [one for one, kind in self._kinds.items() if kind.until <= now and not kind.held]:
                self._forget(one)
        if self._texts[text] >= KINDS_PER_TEXT_MAX:
            key = (text, None)
        elif len(self._kinds) >= KINDS_MAX:
            key = (None, None)
        return key, self._kinds.get(key)

    def _forget(self, key: tuple[Any, Any]) -> None:
        del self._kinds[key]
        self._texts[key[0]] -= 1
        if not self._texts[key[0]]:
            del self._texts[key[0]]

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(seconds, self.flush)
            self._timer.daemon = True
            self._timer.name = "log"
            with contextlib.suppress(RuntimeError):  # the process is about to end: `close` writes it
                self._timer.start()

    def flush(self, *, everything: bool = False) -> None:
        """Write what was held of the minutes that are over."""
        with self._lock:
            self._timer, now, told = None, self._monotonic(), []
            for key, kind in list(self._kinds.items()):
                if kind.until > now and not everything:
                    continue
                if (written := kind.taken()) is not None:
                    told.append(written)
                    self._kinds[key] = _Kind(now + PERIOD_S, kind.held_reason)
                else:
                    self._forget(key)
            due = [kind.until for kind in self._kinds.values() if kind.held]
            if due and not everything:
                self._wait(min(due) - now)
        for method, event in told:
            self._emit(method, event)

    def close(self) -> None:
        """Write all that was held; what comes later is not held."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self.flush(everything=True)


# What others say


class _Foreign(logging.Handler):
    """Libraries that log in Python's own way (asyncio, paho, py4j) and its warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        # addresses and ports make no other kind
        kind = f"{record.name}: {_NUMBERS.sub('#', text.partition(chr(10))[0])[:200]}"
        level = "error" if record.levelno >= logging.ERROR else "warning"
        getattr(log, level)(text, logger=record.name, exc_info=record.exc_info, _kind=kind)


def _uncaught(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    thread: threading.Thread | None = None,
) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt | SystemExit):
        if thread is None and error is not None:
            sys.__excepthook__(kind, error, trace)
        return
    log.error("an exception that nobody caught", exc_info=error, thread=thread.name if thread is not None else "main")
