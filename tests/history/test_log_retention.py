"""What retention takes, what holds it back, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from history import passed as passed_module
from history.log import Cursor, Log, Passed
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.uri("vcu.vin", 0x10, 1, 0x8000)
AGE_MS = 60_000


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now


def message(data: bytes = b"x") -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(data, 5))


async def append(log: Log, count: int, *, batch: int = 10, size: int = 1) -> None:
    id = log.stream_id(TOPIC)
    for _ in range(0, count, batch):
        await log.append([id] * batch, [message(bytes(size)) for _ in range(batch)])


async def until(log: Log, condition: Callable[[], bool]) -> None:
    """Let retention run until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await retain(log)


async def retain(log: Log) -> None:
    """One turn of retention, to its end."""
    if log._writer is None:
        log._age_ring()
        return
    heard, done = log._writer._on_written, asyncio.Event()

    def listen(written: object) -> None:
        heard(written)  # type: ignore[arg-type]
        if getattr(written, "batch", 0) is None and log._writer is not None and log._writer._next_retention != 0.0:
            done.set()

    log._writer._on_written = listen
    log._writer._next_retention = 0.0
    log._writer.flush()
    await asyncio.wait_for(done.wait(), 30)
    log._writer._on_written = heard


@pytest.fixture(params=["durable", "volatile"])
async def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Log, Clock]:
    clock = Clock()
    path = tmp_path / "l.db" if request.param == "durable" else None
    return await Log.open(path, name=request.param, retention_ms=AGE_MS, now_ms=clock), clock


async def test_age_never_passes_a_cursor_that_holds(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        await append(log, 100)
        log.set_cursor("egress:cloud", 35, holds=True)
        clock.now += 1_000 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        await retain(log)
        assert log.floor_seq == 30  # the chunk with what it still wants stays whole
        log.drop_cursor("egress:cloud")
        await until(log, lambda: log.floor_seq >= 100)


async def test_a_cursor_that_only_was_told_of_holds_nothing(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        await append(log, 100)
        log.set_cursor("anybody", 35)
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 100)


async def test_what_a_cursor_holds_and_how_long_it_was_away_is_kept_over_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    async with await Log.open(tmp_path / "l.db", name="first", now_ms=clock) as log:
        await append(log, 10)
        log.set_cursor("egress:cloud", 5, holds=True, absent_ms=1_234)
        log.set_cursor("consumer:app", 6, lease_ms=1_000)
        log.set_cursor("plain", 7)
        rows = log.cursor_rows()
    assert rows["egress:cloud"] == Cursor(5, None, True, 1_234)
    async with await Log.open(tmp_path / "l.db", name="second", now_ms=clock) as log:
        assert log.cursor_rows() == rows
        assert log.cursors() == {"egress:cloud": 5, "consumer:app": 6, "plain": 7}
        clock.now += 1_000_000
        log.set_cursor("plain", 8)
        async with asyncio.timeout(10):
            while "consumer:app" in log.cursor_rows():  # noqa: ASYNC110 - its lease has ended, the others never do
                await asyncio.sleep(0.01)
        assert set(log.cursors()) == {"egress:cloud", "plain"}


async def test_what_age_takes_from_an_endpoint_is_handed_over(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        told: list[tuple[Passed, int]] = []
        log.on_passed(lambda passed: told.append((passed, log.floor_seq)))
        await append(log, 30)
        log.set_cursor("egress:cloud", 15)
        sent = [data for chunk in await log.read(0) for data in chunk.data]
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        seqs = [seq for passed, _ in told for chunk in passed.chunks for seq in chunk.seqs]
        assert seqs == list(range(16, 31))
        assert [data for passed, _ in told for chunk in passed.chunks for data in chunk.data] == sent[15:]
        assert (told[0][0].after, told[-1][0].before) == (15, 31)
        assert all(floor <= passed.before - 1 for passed, floor in told)  # told before the floor has risen, or as it rises


async def test_bytes_pass_even_a_cursor_that_holds_and_only_the_first_are_handed_over(
    made: tuple[Log, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed_module, "RECORDS_MAX", 25)
    log, _ = made
    async with log:
        told: list[Passed] = []
        log.on_passed(told.append)
        log.set_cursor("parked:topic", 5, holds=True)
        await retain(log)
        log._allowance.refill()
        log.retention_bytes = log._tail.bytes_max = 300_000
        if log._writer is not None:
            log._writer._store.allowance.refill()
            log._writer._next_refill = float("inf")
            log._writer._retention.bytes = 300_000
        await append(log, 200, size=10_000)
        await until(log, lambda: log.floor_seq > 100)
        seqs = [seq for passed in told for chunk in passed.chunks for seq in chunk.seqs]
        assert seqs == list(range(6, 31))
        places = [(passed.after, passed.before) for passed in told]
        assert places[0][0] == 5
        assert [before - 1 for _, before in places[:-1]] == [after for after, _ in places[1:]]
        assert places[-1][1] == log.floor_seq + 1


async def test_nobody_is_told_of_what_everybody_has_had(made: tuple[Log, Clock]) -> None:
    log, clock = made
    async with log:
        told: list[Passed] = []
        log.on_passed(told.append)
        await append(log, 30)
        log.set_cursor("egress:cloud", 30)
        log.set_cursor("consumer:slow", 3, lease_ms=10)
        clock.now += 2 * AGE_MS
        await append(log, 10)
        await until(log, lambda: log.floor_seq >= 30)
        assert told == []
