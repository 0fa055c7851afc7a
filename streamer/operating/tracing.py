"""Sends the spans of messages (streamer/spans.py) to an OpenTelemetry collector: OTLP over HTTP.

MessageSpans -> queue (bounded; beyond: lost, counted) -> thread: protobuf -> POST otlp/v1/traces
                                                          '-> not taken: lost, counted; a note in /readyz

Only the package opentelemetry-proto is needed (the extra `otel`), imported when [tracing] has a collector.
Source: OpenTelemetry Protocol 1.9, OTLP/HTTP with binary protobuf.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import ssl
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from streamer.config.sections import TracingSection
from streamer.reporting import build
from streamer.spans import TraceSpan, Value
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

QUEUE_SPANS_MAX: Final = 8_192  # some 10 MiB
BATCH_SPANS_MAX: Final = 512
SPANS_GATHER_S: Final = 1.0  # how long a span waits for others
COLLECTOR_TIMEOUT_S: Final = 5.0  # of a collector's answer
COLLECTOR_PAUSE_S: Final = 5.0  # after a batch that was not taken
TRACING_CLOSE_S_MAX: Final = 1.0  # the end of a streamer waits this long for its last spans
COLLECTOR_ANSWER_BYTES_MAX: Final = 64 << 10
HEADERS_BYTES_MAX: Final = 64 << 10
PACKAGE: Final = "opentelemetry-proto"

log = structlog.get_logger()


def check_tracing(section: TracingSection) -> None:
    """Raises FAILED_PRECONDITION if the package that [tracing] needs is missing, or one of its files can't be used."""
    if section.otlp is None:
        return
    found = None
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("opentelemetry.proto.collector.trace.v1")
    if found is None:
        why = f"[tracing] needs {PACKAGE}: try pip install {PACKAGE} (the extra 'otel')"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)
    try:
        headers_of(section.headers_file)
        _context_of(section)
    except (OSError, UStatusError) as error:  # ssl.SSLError is an OSError
        raise UStatusError(UCode.FAILED_PRECONDITION, f"[tracing]: {error}") from None


def headers_of(file: Path | None) -> dict[str, str]:
    """Returns the headers in a file: `NAME: VALUE` in each line. Raises OSError, INVALID_ARGUMENT."""
    if file is None:
        return {}
    with file.open(encoding="utf-8") as opened:
        lines = opened.read(HEADERS_BYTES_MAX).splitlines()
    headers = {}
    for number, line in enumerate(lines, 1):
        name, colon, value = line.partition(":")
        if line.strip() and not (colon and name.strip() and value.strip().isprintable() and line.isascii()):
            raise invalid(f"{file}:{number}: expected NAME: VALUE, such as Authorization: Bearer TOKEN")
        if line.strip():
            headers[name.strip()] = value.strip()
    return headers


def _context_of(section: TracingSection) -> ssl.SSLContext | None:
    if section.otlp is None or urlsplit(section.otlp).scheme != "https":
        return None
    return ssl.create_default_context(cafile=None if section.ca_file is None else str(section.ca_file))


class SpanExporter:
    """Sends spans from a thread. `put` never waits."""

    def __init__(self, section: TracingSection, authority: str) -> None:
        """Raises UStatusError, as `check_tracing`."""
        check_tracing(section)
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        assert section.otlp is not None
        self._messages, self._section = trace_service_pb2, section
        self._parts = urlsplit(section.otlp)
        self.url = f"{section.otlp.rstrip('/')}/v1/traces"
        self._resource: dict[str, Value] = {
            "service.name": section.service_name,
            "service.instance.id": authority,
            "service.version": build()[0],
        }
        self._queue: deque[TraceSpan] = deque()
        self._wake, self._ending = threading.Event(), threading.Event()
        # each is counted by one thread alone
        self._refused, self._lost, self.exported = 0, 0, 0
        self.trouble = ""  # why the last batch was not taken
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        return self._refused + self._lost

    def put(self, span: TraceSpan) -> None:
        if len(self._queue) >= QUEUE_SPANS_MAX:
            self._refused += 1
            return
        self._queue.append(span)
        if len(self._queue) == BATCH_SPANS_MAX:
            self._wake.set()

    def end(self) -> None:
        """Let the thread send what is in the queue, and end."""
        self._ending.set()
        self._wake.set()

    def wait(self) -> None:
        """Wait for the end of the thread, TRACING_CLOSE_S_MAX at most; the spans that are left are lost."""
        self._thread.join(TRACING_CLOSE_S_MAX)

    # On the thread

    def _run(self) -> None:
        while True:
            if not self._queue and self._ending.is_set():
                return
            self._wake.wait(SPANS_GATHER_S)
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH_SPANS_MAX, len(self._queue)))]
                if self._send(batch):
                    continue
                if self._ending.wait(COLLECTOR_PAUSE_S):
                    return

    def _send(self, batch: list[TraceSpan]) -> bool:
        try:
            rejected = self._post(self._encoded(batch))
        except Exception as error:  # the thread must go on, whatever answers there
            self._lost += len(batch)
            if not self.trouble:
                log.warning("a collector does not take spans; they are lost", url=self.url, error=str(error))
            self.trouble = str(error) or repr(error)
            return False
        self._lost += rejected
        self.exported += len(batch) - rejected
        if self.trouble:
            log.info("a collector takes spans again", url=self.url)
        self.trouble = ""
        return True

    def _post(self, body: bytes) -> int:
        """Returns how many spans the collector has rejected. Raises OSError, HTTPException, UStatusError."""
        parts, section = self._parts, self._section
        headers = {**headers_of(section.headers_file), "Content-Type": "application/x-protobuf"}
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = _context_of(section)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=COLLECTOR_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=COLLECTOR_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", f"{parts.path.rstrip('/')}/v1/traces", body, headers)
            answer = connection.getresponse()
            data = answer.read(COLLECTOR_ANSWER_BYTES_MAX)
        if answer.status != 200:
            raise UStatusError(UCode.UNAVAILABLE, f"HTTP status {answer.status} {answer.reason}")
        said = self._messages.ExportTraceServiceResponse.FromString(data)
        return min(int(said.partial_success.rejected_spans), BATCH_SPANS_MAX)

    def _encoded(self, batch: Iterable[TraceSpan]) -> bytes:
        request = self._messages.ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        _put(resource.resource.attributes, self._resource)
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "up-streamer", build()[0]
        for one in batch:
            span = scope.spans.add(
                name=one.name,
                kind=one.kind,
                trace_id=one.trace_id,
                span_id=os.urandom(8),
                parent_span_id=one.parent_id,
                start_time_unix_nano=one.begin_ns,
                end_time_unix_nano=one.end_ns,
            )
            _put(span.attributes, one.attributes)
            for time_ns, name, attributes in one.events:
                _put(span.events.add(time_unix_nano=time_ns, name=name).attributes, attributes)
            if one.error:
                span.status.code, span.status.message = span.status.STATUS_CODE_ERROR, one.error
        data: bytes = request.SerializeToString()
        return data


def _put(attributes: Any, values: dict[str, Value]) -> None:
    for key, value in values.items():
        added = attributes.add(key=key)
        if isinstance(value, int):
            added.value.int_value = value
        else:
            added.value.string_value = value
