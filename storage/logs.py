"""The log of a process: text or JSON on standard error, at most one line of a kind per minute.

structlog, logging of libraries, uncaught exceptions -> Repeats -> level, time, escaped, no secrets -> text | JSON
                                                           |-- first of its kind, or another reason: written at once
                                                           '-- else held back: counted, and written with the last of
                                                               them when the minute is over, or at exit

A kind: the event's text and the fields that name its subject. A condition and its end have different texts and are
logged with the same `_kind="..."`: then they are one kind with different reasons, so no end is held back. `_kind` is
not written. `repeated=N`: it occurred N times since the line before.

LogOutput: write(line) -> queue (bounded) -> thread -> os.write   a reader that does not read, a full disk or a closed
                             | full                       | fails pipe delay or lose lines of the log, and nothing else
                             '-> counted                  '-> counted: the next line says how many were lost
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TextIO

import structlog

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
Event = MutableMapping[str, Any]

PERIOD_S: Final = 60.0
LINE_KINDS_MAX: Final = 1_000  # all further ones count as one kind. We have some 150 texts
KINDS_PER_TEXT_MAX: Final = 20  # ... of one text: a remote sender may invent its fields; a gateway has fewer endpoints
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
    "setting",
    "backend",
    "channel",
    "url",
)
REASON: Final = ("reason", "error", "why", "what", "detail", "kind", "code", "state", "now")
"""Fields with a reason or a state. If one of them differs from that of the last line of its kind, the line is written.
Numbers in them are not compared."""
SHAPE_CHARACTERS: Final = 200
FIELD_CHARACTERS_MAX: Final = 500  # so many of each field are compared
CHANGE_LINES_MAX: Final = 30  # such lines of one kind per minute: a remote sender may invent reasons, or reconnect
SYSLOG_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # of syslog
VALUE_CHARACTERS_MAX: Final = 2_000
TRACE_CHARACTERS_MAX: Final = 8_000
FRAMES_MAX: Final = 30
# of lines that are not written yet: some 5,000, which is more than a gateway writes in an hour
UNWRITTEN_BYTES_MAX: Final = 1 << 20
LOGS_CLOSE_S_MAX: Final = 1.0  # the end of a process waits this long until its last lines are written
WRITABLE_MS: Final = 1_000  # between checks whether a non-blocking descriptor can be written to again
_SECRET: Final = re.compile(r"password|passwd|secret|credential|private_key|headers", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

log = structlog.get_logger()


class _Logger(structlog.make_filtering_bound_logger(logging.NOTSET)):  # type: ignore[misc]
    """The class of all loggers, also of those that are in use: `set_level` changes its methods."""


def set_level(level: Level) -> None:
    """Log events of `level` and above from now on."""
    filtering = structlog.make_filtering_bound_logger(getattr(logging, level.upper()))
    for name, method in vars(filtering).items():
        if not name.startswith("__"):
            setattr(_Logger, name, method)


def configure(level: Level = "warning", format: Format = "text", file: TextIO | None = None) -> None:
    """Log events of `level` and above to `file`, by default standard error. May be called again.

    A separate thread writes to standard error: a reader that does not read or has ended, or a full disk, affects the
    log alone.
    """
    target: Any = file if file is not None else _standard_error()
    shown = file if file is not None else sys.stderr
    rest: list[Any] = [structlog.processors.add_log_level]
    if format == "json":
        rest += [_utc, harmless, _json]
    else:
        plain = structlog.dev.plain_traceback
        text = structlog.dev.ConsoleRenderer(colors=shown.isatty(), exception_formatter=plain)
        rest += [structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S", utc=False), harmless, text]
    if _is_journal(shown):
        rest.append(_with_priority)

    def emit(method: str, event: Any) -> None:
        for process in rest:
            event = process(None, method, event)
        structlog.PrintLogger(target).msg(event)

    repeats = Repeats(emit)
    set_level(level)
    structlog.configure(
        processors=[repeats, *rest],
        wrapper_class=_Logger,
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=file is None,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Foreign()], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback, args.thread)
    sys.unraisablehook = lambda args: log.error("an exception that could not be raised", exc_info=args.exc_value)
    atexit.register(repeats.close)


def _is_journal(file: TextIO) -> bool:
    """Returns True if systemd-journald reads what is written to `file` (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        found = os.fstat(file.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _with_priority(_: Any, method: str, text: str) -> str:
    """Begins each line with its level as sd-daemon(3) wants it, for `journalctl -p`."""
    prefix = f"<{SYSLOG_PRIORITIES.get(method, SYSLOG_PRIORITIES['error'])}>"
    return prefix + text.replace("\n", f"\n{prefix}")


@functools.cache
def _output(descriptor: int) -> LogOutput:
    output = LogOutput(descriptor)
    atexit.register(output.close)  # registered before `Repeats.close`, so it runs after that
    return output


def _standard_error() -> LogOutput | TextIO:
    try:
        return _output(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # a test or a notebook has replaced it
        return sys.stderr


# -- content of a line


def harmless(_: Any, __: str, event: Event) -> Event:
    """Escape control characters, hide secrets and local variables, and limit the length of each value."""
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
    """Returns one line, in which characters that can't be printed (line ends, terminal sequences, marks of writing
    direction) are escaped as in Python."""
    if len(text) > characters_max:
        text = f"{text[:characters_max]}... ({len(text)} characters)"
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def is_secret(name: str) -> bool:
    """Returns True if the value of a field or setting of this name must not be shown. The name of a file with a secret
    may be shown."""
    return _SECRET.search(name) is not None and not name.endswith("file")


def trace(error: BaseException) -> str:
    """Returns the traceback without the values of variables, which may be payloads and passwords."""
    text = "".join(traceback.format_exception(error, limit=-FRAMES_MAX)).rstrip("\n")[-TRACE_CHARACTERS_MAX:]
    # indented, so that no line of it looks like a line of the log
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


# -- one line of a kind per minute


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
        """Returns the line that was held back last, with the number of all held lines; None: no line is held."""
        if not self.held:
            return None
        self.last["repeated"], self.held = self.held, 0
        return self.method, self.last


def _shape(text: str) -> str:
    """Returns what lines of a kind have in common that differ in addresses and ports."""
    return _NUMBERS.sub("#", text.partition("\n")[0])[:SHAPE_CHARACTERS]


def _reason(event: Event) -> Iterator[str]:
    for name in REASON:
        if name in event:
            yield _NUMBERS.sub("#", str(event[name])[:FIELD_CHARACTERS_MAX])
    if (error := _error(event.get("exc_info"))) is not None:
        yield _NUMBERS.sub("#", repr(error)[:FIELD_CHARACTERS_MAX])


class Repeats:
    """A processor of structlog. It passes the first line of a kind, and lines with another reason; then one per minute
    with the number of the others.

    `emit(method, event)` writes held lines, from a thread that exists while there are some. Any thread may log.
    """

    def __init__(self, emit: Callable[[str, Event], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._monotonic = emit, monotonic
        self._lock = threading.RLock()  # a signal handler or a finaliser may log while the lock is held
        self._kinds: dict[Any, _Kind] = {}
        self._timer: threading.Timer | None = None
        self._closed = False

    def __call__(self, _: Any, method: str, event: Event) -> Event:
        text = str(event.get("event"))
        name = event.pop("_kind", text)
        if method == "debug" or self._closed:
            return event
        reason, before = (_shape(text), *_reason(event)), None
        with self._lock:
            now, whom = self._monotonic(), tuple(str(event[field]) for field in WHOM if field in event)
            key, kind = self._find(name, whom, now)
            if kind is None or now >= kind.until:
                if kind is not None and kind.held and kind.held_reason == reason:
                    event["repeated"] = kind.held + 1
                elif kind is not None:
                    before = kind.taken()
                self._kinds[key] = _Kind(now + PERIOD_S, reason)
            elif kind.reason == reason or kind.changes >= CHANGE_LINES_MAX or key[1] is None:
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
        if self._is_crowded(text) or len(self._kinds) >= LINE_KINDS_MAX:
            for one in [one for one, kind in self._kinds.items() if kind.until <= now and not kind.held]:
                del self._kinds[one]
        if self._is_crowded(text):
            key = (text, None)
        elif len(self._kinds) >= LINE_KINDS_MAX:
            key = (None, None)
        return key, self._kinds.get(key)

    def _is_crowded(self, text: Any) -> bool:
        return len([known for known, _ in self._kinds if known == text]) >= KINDS_PER_TEXT_MAX

    def _wait(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(seconds, self.flush)
            self._timer.daemon = True
            self._timer.name = "log"
            with contextlib.suppress(RuntimeError):  # the process is about to end, and `close` writes it
                self._timer.start()

    def flush(self, *, everything: bool = False) -> None:
        """Write the held lines of the minutes that are over."""
        with self._lock:
            self._timer, now, due_lines = None, self._monotonic(), []
            for key, kind in list(self._kinds.items()):
                if kind.until > now and not everything:
                    continue
                if (written := kind.taken()) is not None:
                    due_lines.append(written)
                    self._kinds[key] = _Kind(now + PERIOD_S, kind.held_reason)
                else:
                    del self._kinds[key]
            due = [kind.until for kind in self._kinds.values() if kind.held]
            if due and not everything:
                self._wait(min(due) - now)
        for method, event in due_lines:
            self._emit(method, event)

    def close(self) -> None:
        """Write all held lines. Later lines are not held."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        self.flush(everything=True)


# -- events of libraries and of the interpreter


class _Foreign(logging.Handler):
    """Passes on the events of libraries that use `logging` (asyncio, paho, py4j), and Python's warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        kind = f"{record.name}: {_shape(text)}"
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


# -- the thread that writes


class LogOutput:
    """A text file for structlog.PrintLogger. Writing does not block or raise. Any thread may write.

    The descriptor stays open. Lines are counted that could not be written: OSError, or more than UNWRITTEN_BYTES_MAX.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self.lost_lines = 0
        self._unreported_lines = 0  # lost lines that the log does not report yet
        self._is_cut = False  # the last line was written in part

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > UNWRITTEN_BYTES_MAX:
                self._count_lost(data)
                return len(text)
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """The thread writes each line as soon as it can."""

    def close(self) -> None:
        """Wait until all lines are written, at most LOGS_CLOSE_S_MAX."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LOGS_CLOSE_S_MAX)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="log output", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process is about to end, and its last lines are lost
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                lines, self._waiting, self._waiting_bytes = b"".join(self._waiting), deque(), 0
                self._is_writing, unreported = True, self._unreported_lines
            prefix = b"\n" if self._is_cut else b""
            if unreported:
                prefix += b"(%d lines of this log were lost: they could not be written)\n" % unreported
            is_reported = self._write_all(prefix) is None
            left = self._write_all(lines) if is_reported else lines
            with self._changed:
                if is_reported:
                    self._unreported_lines -= unreported
                if left is not None:
                    self._count_lost(left)

    def _write_all(self, data: bytes) -> bytes | None:
        """Returns the part that could not be written; None: everything was written."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(WRITABLE_MS)
            except OSError:
                self._is_cut = self._is_cut if len(view) == len(data) else data[-len(view) - 1] != ord("\n")
                return bytes(view)
        self._is_cut = False
        return None

    def _count_lost(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self.lost_lines += lines
        self._unreported_lines += lines
