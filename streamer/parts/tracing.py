"""Spans of traced messages, as a part."""

from __future__ import annotations

import contextlib
from typing import Any

from streamer.assembly import Assembly, Attached
from streamer.config import Config, EndpointSection
from streamer.operating.tracing import Tracing, check_tracing
from streamer.part import Part, Parts
from streamer.reporting import Reporter
from uprotocol.status import UStatusError


class TracingPart(Part):
    name = "tracing"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.tracing = Tracing(assembly.config.authority, assembly.endpoints, assembly.dead_letters)

    @classmethod
    def require(cls, config: Config) -> None:
        check_tracing(config.tracing)

    async def start(self) -> None:
        self.tracing.change(self.assembly.config.tracing)

    async def close(self) -> None:
        await self.tracing.close()

    def reporters(self) -> tuple[Reporter]:
        return (self.tracing,)

    def endpoint_added(self, attached: Attached, section: EndpointSection) -> None:
        attached.endpoint.spans = self.tracing.spans

    def change(self, old: Config, new: Config, checked: Any) -> None:
        if old.tracing != new.tracing:
            with contextlib.suppress(UStatusError):  # a file has gone since the check: as before
                self.tracing.change(new.tracing)
