"""Spans of traced messages, as a part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from streamer.assembly import Assembly, Attached
from streamer.config import Config, EndpointSection, TracingSection
from streamer.operating.tracing import SpanExporter, check_tracing
from streamer.part import Part, Parts
from streamer.reporting import Sample
from streamer.spans import MessageSpans
from uprotocol.status import UStatusError


class TracingPart(Part):
    """Gives the endpoints and the dead letters `spans` while there is a collector."""

    name = "tracing"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._exporter: SpanExporter | None = None
        self._before = 0, 0  # exported and lost by earlier exporters
        self._spans: MessageSpans | None = None

    @classmethod
    def require(cls, config: Config) -> None:
        check_tracing(config.tracing)

    async def start(self) -> None:
        self._trace(self.assembly.config.tracing)

    def _trace(self, section: TracingSection) -> None:
        """Begins, ends, or sends elsewhere. Raises UStatusError, as `check_tracing`."""
        made = None if section.otlp is None else SpanExporter(section, self.assembly.config.authority)
        old, self._exporter = self._exporter, made
        if old is not None:
            self._before = self._before[0] + old.exported, self._before[1] + old.lost
            old.end()
        self._spans = None if made is None else MessageSpans(made.put, section.share)
        self.assembly.dead_letters.spans = self._spans
        for endpoint in self.assembly.endpoints:
            endpoint.spans = self._spans

    async def close(self) -> None:
        exporter = self._exporter
        if exporter is not None:
            exporter.end()
            await asyncio.to_thread(exporter.wait)

    def notes(self) -> Iterator[str]:
        exporter = self._exporter
        if exporter is not None and exporter.trouble:
            yield f"spans are lost, {exporter.lost} so far: {exporter.url} does not take them: {exporter.trouble}"

    def samples(self) -> Iterator[Sample]:
        exported, lost = self._before
        if self._exporter is not None:
            exported, lost = exported + self._exporter.exported, lost + self._exporter.lost
        yield "spans", ("exported",), exported
        yield "spans", ("lost",), lost

    def endpoint_added(self, attached: Attached, section: EndpointSection) -> None:
        attached.endpoint.spans = self._spans

    def change(self, old: Config, new: Config, checked: Any) -> None:
        if old.tracing != new.tracing:
            with contextlib.suppress(UStatusError):  # a file has gone since the check: as before
                self._trace(new.tracing)
