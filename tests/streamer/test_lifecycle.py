"""How parts stop: each of them, within limits."""

from __future__ import annotations

import asyncio

import pytest

from streamer import lifecycle
from streamer.lifecycle import Part


async def test_a_service_that_does_not_stop_keeps_no_other_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SERVICES_CLOSE_S", 0.02)
    stopped: list[str] = []

    def part(name: str, stage: str = "service", *, hangs: bool = False) -> Part:
        async def stop() -> None:
            if hangs:
                await asyncio.Event().wait()
            stopped.append(name)

        return Part(name, stage=stage, stop=stop)  # type: ignore[arg-type]

    await lifecycle.stop(
        [
            part("first"),
            part("network", "network"),
            part("second", hangs=True),
            part("third", hangs=True),
            part("file", "file"),
            part("last"),
        ]
    )
    assert stopped == ["last", "first", "network", "file"]
