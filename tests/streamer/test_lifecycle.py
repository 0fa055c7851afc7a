"""How parts start and stop: in which order, and each of them within limits."""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

import pytest

import streamer.part as parts_module
from streamer.app import Streamer
from streamer.assembly import Assembly
from streamer.part import Part, Parts
from streamer.parts.order import ORDER
from streamer.reporting import Condition, Sample
from tests.streamer.conftest import MakeWorld

KINDS = [kind for kind, _ in ORDER]


async def test_a_service_that_does_not_stop_keeps_no_other_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "SERVICES_CLOSE_S", 0.02)
    ended: list[str] = []

    def kind(label: str, *, hangs: bool = False) -> type[Part]:
        class Ending(Part):
            name = label

            async def stop(self) -> None:
                if hangs:
                    await asyncio.Event().wait()
                ended.append(f"{label} stops")

            async def disconnect(self) -> None:
                ended.append(f"{label} disconnects")

            async def close(self) -> None:
                ended.append(f"{label} closes")

        return Ending

    kinds = [kind("first"), kind("second", hangs=True), kind("third", hangs=True), kind("last")]
    await Parts(cast("Assembly", None), kinds).stop()
    assert ended == [
        "last stops",
        "first stops",
        *(f"{name} disconnects" for name in ("first", "second", "third", "last")),
        *(f"{name} closes" for name in ("first", "second", "third", "last")),
    ]


async def test_a_service_that_does_not_stop_in_time_leaves_no_task(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "SERVICES_CLOSE_S", 0.02)
    others = asyncio.all_tasks()
    world = await make_world({"vehicle": "", "cloud": ""})
    assert world.assembly.usubscription is not None
    for server in world.assembly.usubscription._servers.values():
        monkeypatch.setattr(server, "close", asyncio.Event().wait)  # as if it waited for a request that never ends
    await world.stop()
    left = asyncio.all_tasks() - others
    if left:  # those that were cancelled need a turn of the loop
        await asyncio.wait(left, timeout=1)
    assert [task for task in left if not task.done()] == []


def before(first: str, then: str) -> bool:
    names = [kind.name for kind in KINDS]
    return names.index(first) < names.index(then)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("pauses", "pumps"),  # loads
        ("pumps", "hand-overs"),
        ("hand-overs", "claims"),
        ("follows", "claims"),
        ("recovery", "claims"),
        ("subscriptions", "endpoints"),  # starts
        ("endpoints", "history"),  # stops in reverse: services end while networks are open
        ("endpoints", "losses"),
        ("history", "HTTP edge"),
        ("usubscription", "learn the interest"),
        ("learn the interest", "follows"),
        ("follows", "networks that listen"),
        ("status", "admin port"),
        ("reload", "admin port"),
    ],
)
def test_parts_stand_before_those_that_need_them(first: str, then: str) -> None:
    assert before(first, then)


def test_each_part_has_a_name_and_a_reason_for_its_place() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.name and len(reason) > 10 for kind, reason in ORDER)


async def test_parts_load_then_start_in_order_and_end_in_stages(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    for kind in KINDS:
        for hook in ("load", "start", "stop", "disconnect", "close"):
            _note(monkeypatch, kind, hook, calls)
    world = await make_world()
    await world.stop()
    names = [kind.name for kind in KINDS]
    assert calls == [
        *(("load", name) for name in names),
        *(("start", name) for name in names),
        *(("stop", name) for name in reversed(names)),
        *(("disconnect", name) for name in names),
        *(("close", name) for name in names),
    ]


def _note(monkeypatch: pytest.MonkeyPatch, kind: type[Part], hook: str, calls: list[tuple[str, str]]) -> None:
    real = getattr(kind, hook)

    async def noting(self: Part) -> None:
        calls.append((hook, self.name))
        await real(self)

    monkeypatch.setattr(kind, hook, noting)


# A new part: a class, and a line in ORDER


class CountingPart(Part):
    name = "counting"
    runs: ClassVar[int] = 0

    async def run(self) -> None:
        CountingPart.runs += 1

    def conditions(self) -> list[Condition]:
        return [Condition(f"it has run {self.runs} times")]

    def samples(self) -> list[Sample]:
        return [("gaps", (), self.runs)]


async def test_a_new_part_is_a_class_and_a_line(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.app.ORDER", (*ORDER, (CountingPart, "it needs nothing")))
    monkeypatch.setattr(CountingPart, "runs", 0)
    world = await make_world()
    await world.until(lambda: world.streamer.parts.of(CountingPart).runs == 1)
    assert isinstance(world.streamer, Streamer)
    assert "it has run 1 times" in world.streamer.parts.problems()
    assert ("gaps", (), 1) in list(world.streamer.parts.samples())
