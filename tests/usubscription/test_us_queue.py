"""The command queue of the client, of remote commands, and of destinations in trouble."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from uprotocol.core.usubscription.asking import CommandQueue


class Service:
    """Answers a command when the test says so; `left` has the started commands, in order."""

    def __init__(self, window: int = 2, **options: Any) -> None:
        self.left: list[tuple[str, int]] = []
        self.answers: dict[tuple[str, int], asyncio.Future[int | None]] = {}
        self.queue: CommandQueue[str, int] = CommandQueue(self._run, window, **options)

    async def _run(self, topic: str, command: int) -> int | None:
        self.left.append((topic, command))
        answer = self.answers[topic, command] = asyncio.get_running_loop().create_future()
        return await answer

    async def answer(self, topic: str, command: int, again_ms: int | None = None) -> None:
        self.answers[topic, command].set_result(again_ms)
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_of_a_topic_is_in_flight_and_the_last_one_wins() -> None:
    service = Service()
    for command in (1, 2):
        service.queue.put("a", command)  # the first one has not started, and never does
    await turns()
    for command in (3, 4):
        service.queue.put("a", command)
    await turns()
    assert service.left == [("a", 2)]
    assert not service.queue.is_current("a", 2)
    await service.answer("a", 2)
    assert service.left == [("a", 2), ("a", 4)]
    await service.answer("a", 4)
    assert len(service.queue) == 0
    assert not service.queue.is_busy("a")


@pytest.mark.parametrize("in_batches", [False, True])
async def test_they_leave_in_order_a_window_at_once(in_batches: bool) -> None:
    service = Service(in_batches=in_batches)
    for number, topic in enumerate("abcd"):
        service.queue.put(topic, number)
    await turns()
    assert service.left == [("a", 0), ("b", 1)]
    await service.answer("b", 1)
    assert service.left[2:] == ([] if in_batches else [("c", 2)]), "a batch waits for all before it"
    await service.answer("a", 0)
    assert service.left[2:] == [("c", 2), ("d", 3)]


async def test_what_is_to_run_again_waits_unless_it_is_hurried() -> None:
    service = Service()
    service.queue.put("a", 1)
    await turns()
    await service.answer("a", 1, again_ms=60_000)
    assert len(service.left) == 1
    service.queue.hurry()
    await turns()
    assert service.left == [("a", 1)] * 2
    await service.answer("a", 1, again_ms=60_000)
    service.queue.put("a", 2)  # a later one does not wait
    await turns()
    assert service.left[-1] == ("a", 2)


async def test_stopping_gives_back_what_had_not_left() -> None:
    idle: list[bool] = []
    service = Service(window=1, idle=lambda: idle.append(True))
    for topic in "ab":
        service.queue.put(topic, 1)
    await turns()
    service.queue.put("a", 2)
    assert sorted(await service.queue.stop()) == [1, 2]
    assert service.answers["a", 1].cancelled()
    await turns()
    assert idle
    assert service.left == [("a", 1)]


async def test_a_fault_ends_one_command_only() -> None:
    ran: list[str] = []

    async def run(topic: str, command: int) -> None:
        ran.append(topic)
        raise ValueError(topic)

    queue: CommandQueue[str, int] = CommandQueue(run, 1)
    queue.put("a", 1)
    queue.put("b", 1)
    await turns()
    await turns()
    assert ran == ["a", "b"]
    assert len(queue) == 0
