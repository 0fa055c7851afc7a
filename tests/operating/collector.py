"""A tiny OpenTelemetry collector: OTLP over HTTP with protobuf."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
WAIT_S = 30


def attributes_of(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found}


class Collector:
    """`spans` have come, in their order; `headers` of the last request. `status` is the answer."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.status, self.rejected = 200, 0
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                collector._take(body, dict(self.headers))
                answer = otlp.ExportTraceServiceResponse()
                answer.partial_success.rejected_spans = collector.rejected
                data = answer.SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, body: bytes, headers: dict[str, str]) -> None:
        with self._changed:
            self.headers = headers
            if self.status == 200:
                for one in otlp.ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resources.append(attributes_of(one.resource.attributes))
                    self.spans += [span for scope in one.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def until(self, condition: Callable[[list[Any]], Any]) -> list[Any]:
        """Waits until the spans that have come meet the condition, and returns them. Blocks."""
        end = time.monotonic() + WAIT_S
        with self._changed:
            while not condition(self.spans):
                assert self._changed.wait(end - time.monotonic()), [span.name for span in self.spans]
            return list(self.spans)

    def named(self, *names: str) -> dict[str, Any]:
        """Waits for a span of each name, and returns the first of each."""
        spans = self.until(lambda spans: set(names) <= {span.name for span in spans})
        return {span.name: span for span in reversed(spans)}

    @contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as made:
        yield made
