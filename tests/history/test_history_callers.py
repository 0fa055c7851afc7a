"""Several callers: owners of consumer names, the order of reads, and the share of one caller in each resource."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from history.log.log import Log
from history.reading.subscriber import HistoryClient
from history.service import consumers
from history.service.consumers import Consumers, Owner
from tests.history.world import SERVICE, HistoryWorld, publishes
from uprotocol import uri as uris
from uprotocol.communication import CallOptions
from uprotocol.communication.shares import Full, Turns
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, DescribeRequest, PollRequest, Position, Witness
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.uri("vcu", 0x10, 1, 0x8000)
SPARK, OTHER = uris.uri("cloud", 0x1_0020, 1), uris.uri("cloud", 0x21, 1)
HOUR_MS = 3_600_000


class Clock:
    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.ms


def code_of(call: object) -> UCode.ValueType:
    with pytest.raises(UStatusError) as caught:
        call()  # type: ignore[operator]
    return caught.value.code


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.001)


# Names of consumers


async def opened(path: Path, clock: Clock) -> Log:
    return await Log.open(path / "l.db", name="durable", now_ms=clock)


async def test_a_name_is_its_owners_over_restarts_and_instances_of_a_uentity_are_one(tmp_path: Path) -> None:
    clock, owner = Clock(), Owner.of(SPARK)
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.hold("job", owner, log, 0, 1)
    clock.ms += HOUR_MS  # the lease is long over, the name is not free
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.load()
        assert code_of(lambda: named.require("job", Owner.of(OTHER))) == UCode.PERMISSION_DENIED
        assert code_of(lambda: named.hold("job", Owner("edge", 0x20), log, 0, 1)) == UCode.PERMISSION_DENIED
        named.hold("job", Owner.of(uris.uri("cloud", 0x7_0020, 1)), log, 0, 1)
        assert log.cursors.keep_after() >= 0
        assert named.release("job") == owner
        assert code_of(lambda: named.release("job")) == UCode.NOT_FOUND
        named.hold("job", Owner.of(OTHER), log, 0, 1)
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.load()
        assert code_of(lambda: named.require("job", owner)) == UCode.PERMISSION_DENIED


async def test_a_cursor_of_before_there_were_owners_is_the_first_callers(tmp_path: Path) -> None:
    clock = Clock()
    async with await opened(tmp_path, clock) as log:
        log.cursors.set("consumer:old", 0, lease_ms=60_000)
        named = Consumers([log], clock)
        named.load()
        named.hold("old", Owner.of(OTHER), log, 0, 60_000)
        assert code_of(lambda: named.require("old", Owner.of(SPARK))) == UCode.PERMISSION_DENIED


async def test_an_owner_holds_no_retention_and_is_forgotten_when_the_name_is_long_unused(tmp_path: Path) -> None:
    clock = Clock()
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.hold("job", Owner.of(SPARK), log, 0, 1_000)
        clock.ms += 1_001
        assert log.cursors.keep_after() > 1 << 60
        clock.ms += consumers.BOUND_MS + consumers.TOUCH_MS
        named.hold("job", Owner.of(OTHER), log, 0, 1_000)
        assert list(consumers.owners(log.cursors.all()).values()) == [Owner.of(OTHER)]


async def test_one_authority_has_its_share_of_names_whatever_uentities_it_makes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "CONSUMERS_MAX", 16)
    clock = Clock()
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        for number in range(4):
            named.hold(f"bad{number}", Owner("evil", number), log, 0, 7 * 24 * HOUR_MS if number else 1)
        clock.ms += 2
        named.hold("bad4", Owner("evil", 4), log, 0, 7 * 24 * HOUR_MS)  # instead of the one whose lease is over
        assert "bad0" not in consumers.owners(log.cursors.all())
        assert code_of(lambda: named.hold("bad5", Owner("evil", 5), log, 0, 1)) == UCode.RESOURCE_EXHAUSTED
        named.hold("good", Owner.of(SPARK), log, 0, 1)
        assert len(named) == 5


async def test_a_cursor_stays_within_what_there_is(tmp_path: Path) -> None:
    clock = Clock()
    async with await opened(tmp_path, clock) as log:
        await log.append([log.stream_id(TOPIC)] * 3, [UMessageBuilder.publish(TOPIC).build() for _ in range(3)])
        named = Consumers([log], clock)
        for acked, kept in ((1 << 63, 3), (0, 0), ((1 << 64) - 1, 3), (2, 2)):
            named.hold("job", Owner.of(SPARK), log, acked, 1_000)
            assert log.cursors.seq("consumer:job") == kept


@pytest.mark.parametrize("name", ["x" * 201, "a\nb", "\x1b[2J"])
async def test_a_name_that_cannot_be_printed_is_none(tmp_path: Path, name: str) -> None:
    async with await opened(tmp_path, Clock()) as log:
        assert code_of(lambda: Consumers([log], Clock()).require(name, Owner.of(SPARK))) == UCode.INVALID_ARGUMENT


# Holders of a name


def aborted(call: Callable[[], object]) -> str:
    with pytest.raises(UStatusError) as caught:
        call()
    assert caught.value.code == UCode.ABORTED
    return caught.value.message


async def test_while_its_lease_lives_a_name_is_of_one_holder(tmp_path: Path) -> None:
    clock, owner = Clock(), Owner.of(SPARK)
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.hold("job", owner, log, 0, 60_000, "a")
        clock.ms += 18_000
        what = "the consumer 'job' is in use by 'a' (//cloud/20) until its lease ends in 42 s: "
        what += "a second reader needs a name of its own"
        assert aborted(lambda: named.require("job", owner, "b")) == what
        assert aborted(lambda: named.hold("job", owner, log, 0, 1, "b")) == what
        assert code_of(lambda: named.require("job", Owner.of(OTHER), "a")) == UCode.PERMISSION_DENIED
        named.hold("job", owner, log, 0, 60_000, "a")  # the same one, at once
        clock.ms += 60_000
        named.hold("job", owner, log, 0, 60_000)  # anybody; it does not lengthen what another one has taken
        named.hold("job", owner, log, 0, 60_000, "b")
        assert "in use by 'b'" in aborted(lambda: named.require("job", owner, "a"))
        named.require("job", owner)
        named.hold("job", owner, log, 0, 1, "b")  # it leaves
        named.hold("job", owner, log, 0, 60_000, "a")
        assert [consumers.owner_of(row) for row in log.cursors.all() if row.startswith("owner:")] == [
            consumers.Owned("job", owner, "a")
        ]
        named.release("job")
        named.hold("job", Owner.of(OTHER), log, 0, 60_000, "b")


async def test_a_holder_is_known_after_a_restart_and_holds_no_retention(tmp_path: Path) -> None:
    clock, owner = Clock(), Owner.of(SPARK)
    async with await opened(tmp_path, clock) as log:
        Consumers([log], clock).hold("a/job", owner, log, 0, 60_000, "a/1\u00e4")
        assert log.cursors.owed_after() > 1 << 60
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.load()
        clock.ms += 30_000
        assert "'a/1\u00e4'" in aborted(lambda: named.require("a/job", owner, "b"))
        named.require("a/job", owner, "a/1\u00e4")
        clock.ms += 30_000
        named.hold("a/job", owner, log, 0, 60_000, "b")
    async with await opened(tmp_path, clock) as log:
        named = Consumers([log], clock)
        named.load()
        assert "'b'" in aborted(lambda: named.require("a/job", owner, "a/1\u00e4"))


@pytest.mark.parametrize("holder", ["x" * 65, "a\nb", "\x1b[2J"])
async def test_a_holder_that_cannot_be_printed_is_none(tmp_path: Path, holder: str) -> None:
    async with await opened(tmp_path, Clock()) as log:
        named = Consumers([log], Clock())
        assert code_of(lambda: named.require("job", Owner.of(SPARK), holder)) == UCode.INVALID_ARGUMENT
        named.require("job", Owner.of(SPARK), "x" * 64)


# Turns


class TurnsOf(Turns):
    """Holds the turns of callers until they are told to end."""

    def __init__(self, reply_bytes: int, full: Any, seats_max: int) -> None:
        super().__init__(reply_bytes, full, seats_max)
        self.begun: list[tuple[str, AbstractAsyncContextManager[None]]] = []

    async def begin(self, caller: str, seconds: float = 60) -> None:
        turn = self.turn(caller, seconds)
        await turn.__aenter__()
        self.begun.append((caller, turn))

    async def end(self, caller: str) -> None:
        found = next(one for one in self.begun if one[0] == caller)
        self.begun.remove(found)
        await found[1].__aexit__(None, None, None)


async def test_callers_read_in_turn_however_many_polls_one_has() -> None:
    order: list[str] = []
    turns = Turns(1, lambda *asked: None, seats_max=1)

    async def read(caller: str) -> None:
        async with turns.turn(caller, 60):
            order.append(caller)
            await asyncio.sleep(0)

    await asyncio.gather(*(read("many") for _ in range(50)), *(read("one") for _ in range(3)), read("other"))
    assert order.count("many") == 50
    assert max(place for place, caller in enumerate(order) if caller != "many") <= 8
    assert "seated=0, waiting=0" in repr(turns)


async def test_one_caller_leaves_seats_to_others() -> None:
    turns = TurnsOf(1, lambda *asked: None, seats_max=8)
    for _ in range(2):
        await turns.begin("many")
    third = asyncio.ensure_future(turns.begin("many"))
    for number in range(6):
        await turns.begin(f"other{number}")
    assert not third.done()
    await turns.end("other0")
    await asyncio.sleep(0)
    assert not third.done()
    await turns.end("many")
    await third


async def test_a_caller_without_capacity_waits_and_is_refused_at_its_deadline() -> None:
    room = {"slow": 0, "quick": 100}
    full = Full(0, is_of_bytes=True, is_of_one=True)
    turns = TurnsOf(10, lambda caller, size, promised, _: full if promised + size > room[caller] else None, seats_max=8)
    with pytest.raises(UStatusError) as caught:
        await turns.begin("slow", 0.01)
    assert caught.value.code == UCode.RESOURCE_EXHAUSTED
    slow = asyncio.ensure_future(turns.begin("slow"))
    await turns.begin("quick")
    assert not slow.done()
    room["slow"] = 10
    turns.look()
    await slow
    again = asyncio.ensure_future(turns.begin("slow"))
    await asyncio.sleep(0)
    await turns.end("slow")
    turns.look()
    assert "seated=1, waiting=1" in repr(turns), "the first answer is not on its way yet"
    await again


async def test_a_poll_that_is_cancelled_takes_nobodys_turn() -> None:
    turns = TurnsOf(1, lambda *asked: None, seats_max=1)
    await turns.begin("a")
    waiting = [asyncio.ensure_future(turns.begin(caller)) for caller in "bcb"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await turns.end("a")
    waiting[1].cancel()  # it has a seat already and has not been notified yet
    await asyncio.sleep(0)
    await asyncio.wait_for(waiting[2], 10)
    await turns.end("b")
    assert "seated=0, waiting=0" in repr(turns)


async def test_a_timeout_of_the_work_is_not_that_of_the_wait() -> None:
    turns = Turns(1, lambda *asked: None, seats_max=1)
    with pytest.raises(TimeoutError):
        async with turns.turn("a", 60):
            raise TimeoutError
    assert "seated=0, waiting=0" in repr(turns)


# The service


class World(HistoryWorld):
    """One log with small limits."""

    async def append(self, count: int, size: int = 1) -> None:
        await self.append_all(self.logs[0], publishes([TOPIC] * count, b"x" * size))


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("history.service.service.POLLS_WAITING_MAX", 8)
    made = World()
    log = await Log.open(tmp_path / "l.db", name="durable")
    await made.open(log, replies_bytes_max=4 << 20, drain_ms_max=100)
    yield made
    await made.close()


async def test_another_uentity_can_neither_move_nor_shorten_a_consumers_cursor(world: World) -> None:
    await world.append(5)
    mine, theirs = (
        HistoryClient(await world.caller("cloud"), SERVICE),
        HistoryClient(await world.caller("cloud", 0x21), SERVICE),
    )
    at = [Position(incarnation=world.logs[0].incarnation, seq=2)]
    await mine.poll(PollRequest(consumer="job", acked=at, lease_ms=600_000))
    before = world.logs[0].cursors.get("consumer:job")
    with pytest.raises(UStatusError) as caught:
        await theirs.poll(
            PollRequest(consumer="job", acked=[Position(incarnation=world.logs[0].incarnation, seq=5)], lease_ms=1)
        )
    assert caught.value.code == UCode.PERMISSION_DENIED
    assert "cloud" not in caught.value.message  # whose it is, is not told
    assert world.logs[0].cursors.get("consumer:job") == before
    assert world.service.counts["denied"] == 1
    await theirs.poll(PollRequest(consumer="other"))


async def test_a_poll_of_another_holder_is_aborted_until_the_lease_ends_or_the_holder_leaves(world: World) -> None:
    await world.append(5)
    client = HistoryClient(await world.caller("cloud"), SERVICE)
    log = world.logs[0]
    await client.poll(PollRequest(consumer="job", holder="a", lease_ms=600_000))
    before = log.cursors.get("consumer:job")
    push = CommandRequest(follower=b"x" * 16, number=1)
    push.push.sink.CopyFrom(uris.uri("cloud", 0x20, 1))
    push.push.poll.CopyFrom(PollRequest(consumer="job", holder="b"))
    for call in (
        client.poll(PollRequest(consumer="job", holder="b", acked=[Position(incarnation=log.incarnation, seq=5)])),
        client.command(push),
    ):
        with pytest.raises(
            UStatusError, match=r"'job' is in use by 'a' \(//cloud/20\) until its lease ends in"
        ) as caught:
            await call
        assert caught.value.code == UCode.ABORTED
    assert log.cursors.get("consumer:job") == before
    await client.poll(PollRequest(consumer="job"))
    await client.poll(PollRequest(consumer="job", holder="a", lease_ms=1, latest=True, wait_ms=20))
    await client.poll(PollRequest(consumer="job", holder="b"))
    with pytest.raises(UStatusError, match="in use by 'b'"):
        await client.poll(PollRequest(consumer="job", holder="a"))


async def test_the_polls_of_one_authority_leave_room_for_those_of_others(world: World) -> None:
    many, one = [HistoryClient(await world.caller(name), SERVICE) for name in ("many", "one")]
    asked = PollRequest(latest=True, wait_ms=20_000)
    waiting = [asyncio.ensure_future(many.poll(asked)) for _ in range(3)]
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(UStatusError, match="2 polls of authority 'many' wait already"):
        done.pop().result()
    honest = asyncio.ensure_future(one.poll(asked))
    await until(lambda: len(world.service._waiting) == 3)
    await world.append(1)
    assert [len(answer.batches) for answer in await asyncio.gather(honest, *rest)] == [1, 1, 1]


async def test_answers_that_a_network_does_not_take_cost_their_caller_its_share_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many polls of 768 KiB each: nothing is read beyond the free capacity."""
    await world.append(1_000, 1_024)
    stuck, send_batch = asyncio.Event(), world.transport.send_batch
    sent: list[list[UMessage]] = []

    async def slow(messages: list[UMessage]) -> object:
        sent.append(messages)
        await stuck.wait()
        return await send_batch(messages)

    monkeypatch.setattr(world.transport, "send_batch", slow)
    many, one = await world.caller("many"), await world.caller("one")
    options = CallOptions(timeout_ms=60_000)
    payload = UPayload.pack(PollRequest())
    method = uris.uri("gateway", 4, 1, 2)
    calls = [asyncio.ensure_future(many.invoke_method(method, payload, options)) for _ in range(40)]
    responses = world.service._server.responses
    await until(lambda: sent)
    honest = asyncio.ensure_future(one.invoke_method(method, UPayload.pack(PollRequest(max_records=1)), options))
    await until(
        lambda: responses.shares.pieces_of("one")
    )  # read and ready although the other caller's answers are stuck
    assert responses.shares.bytes <= 2 << 20
    assert world.service.counts["records"] < 3_000
    stuck.set()
    assert (await honest).data
    assert all(answer.data for answer in await asyncio.gather(*calls))
    assert responses.shares.bytes == 0
    assert not responses.dropped


WILD = [0, 1, 255, 256, (1 << 31) - 1, (1 << 32) - 1]
WILD64 = [*WILD, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def wild_poll(seed: int, incarnation: bytes) -> PollRequest:
    """Any request that can be encoded."""
    rng = random.Random(seed)

    def position() -> Position:
        witnesses = [
            Witness(seq=rng.choice(WILD64), digest=rng.randbytes(rng.choice([0, 8, 65])))
            for _ in range(rng.choice([0, 0, 1, 3, 41]))
        ]
        return Position(
            incarnation=rng.choice([incarnation] * 6 + [b"x" * 16, b""]), seq=rng.choice(WILD64), witnesses=witnesses
        )

    asked = PollRequest(consumer=rng.choice(["", "c", "c\x00", "\N{BELL}" * 300]))
    asked.leaves = rng.random() < 0.2
    asked.holder, asked.plan_records = rng.choice(["", "", "h", "\N{BELL}"]), rng.choice([0, 0, *WILD])
    for name in ("max_records", "max_bytes", "wait_ms", "lease_ms"):
        setattr(asked, name, rng.choice([0, 1, 20]) if name == "wait_ms" else rng.choice(WILD))
    for name in ("positions", "acked", "until"):
        getattr(asked, name).extend(position() for _ in range(rng.choice([0, 0, 1, 2, 300])))
    match rng.randrange(5):
        case 0:
            asked.earliest = rng.choice([True, False])
        case 1:
            asked.latest = rng.choice([True, False])
        case 2:
            asked.after_time.seconds = rng.choice([0, -1, -62_135_596_801, 253_402_300_800, (1 << 63) - 1, -(1 << 63)])
            asked.after_time.nanos = rng.choice([0, -1, 999_999_999, 1_000_000_000, -(1 << 31)])
        case 3:
            asked.after_message_id = rng.choice([b"", b"\xff" * 16, b"\x00" * 16, b"x" * 17])
    for _ in range(rng.choice([0, 0, 1, 2])):
        asked.topics.add(
            authority_name=rng.choice(["", "*", "vcu", "A B", "x" * 200]),
            ue_id=rng.choice(WILD),
            ue_version_major=rng.choice(WILD),
            resource_id=rng.choice([*WILD, 0x8000, 0xFFFF]),
        )
    return asked


@pytest.mark.parametrize("round", range(4))
async def test_no_request_is_a_fault_of_ours(world: World, round: int) -> None:
    await world.append(3)
    client = await world.caller("cloud")
    codes: set[int] = set()
    for seed in range(100 * round, 100 * round + 100):
        asked = wild_poll(seed, world.logs[0].incarnation)
        for method, payload in ((2, UPayload.pack(asked)), (1, UPayload.pack(DescribeRequest(topics=asked.topics)))):
            try:
                await client.invoke_method(uris.uri("gateway", 4, 1, method), payload)
            except UStatusError as error:
                codes.add(error.code)
    assert codes == {UCode.INVALID_ARGUMENT}


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(253_402_300_800, 0), (-62_135_596_801, 0), (1 << 62, 0), (0, -1), (0, 1_000_000_000)]
)
async def test_a_time_out_of_range_is_the_callers_mistake(
    world: World, seconds: int, nanos: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = PollRequest()
    asked.after_time.seconds, asked.after_time.nanos = seconds, nanos
    capsys.readouterr()
    with pytest.raises(UStatusError) as caught:
        await HistoryClient(await world.caller("cloud"), SERVICE).poll(asked)
    assert caught.value.code == UCode.INVALID_ARGUMENT
    assert "after_time" in caught.value.message
    assert capsys.readouterr() == ("", "")
