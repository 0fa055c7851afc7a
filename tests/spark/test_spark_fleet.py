"""A query over many histories, real and simulated ones, on a local network: what a round costs, and that no history
holds up the others, whatever it does."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

import pytest

from campaigns.bench.spark_fleet import LocalFleet, measure
from history.service.service import HistoryService
from spark_ingest import offsets
from spark_ingest.client import HistorySession, range_poll
from spark_ingest.offsets import LogLoss, Offset
from spark_ingest.planner import Planner
from tests.tiers import full
from transports import plugin
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

ROUND_S_MAX = 5.0  # a round that waits for a history that is away lasts 10 s
KIB_MAX = 100


@pytest.mark.parametrize(
    ("real", "simulated", "idle_s"),
    [(5, 45, 0.5), pytest.param(50, 1_000, 30.0, marks=[full, pytest.mark.timeout(180)])],
)
async def test_what_a_fleet_costs(real: int, simulated: int, idle_s: float) -> None:
    """A tenth of it is away."""
    found = await measure(real, simulated, idle_s)
    rounds = {name: found[f"{name}_s"] for name in ("first", "idle", "news", "all_news", "restart")}
    assert all(took_s < ROUND_S_MAX for took_s in rounds.values()), rounds
    assert found["idle_ranges"] == 0
    assert found["news_ranges"] == found["restart_ranges"] == -(-0.9 * found["histories"] // 10)
    assert found["kib_per_history_later"] < KIB_MAX
    assert found["standing_polls_cpu_percent"] < 10


async def records_between(
    session: HistorySession, start: Offset, end: Offset, simulated: Container[str] = ()
) -> dict[str, list[int]]:
    """Returns by authority the numbers that are the payloads of a batch; of simulated histories those of the seqs."""
    found = dict[str, list[int]]()
    for one in offsets.ranges(start, end, session.options.coverage_topics) if end != start else ():
        numbers = found.setdefault(one.authority, [])
        if one.authority in simulated:
            numbers += range(one.after + 1, one.until + 1)
            continue
        after, topics = one.after, [uris.parse(topic) for topic in one.topics]
        while after < one.until:
            asked = range_poll(topics, one, after, dict(one.known))
            answer = await session.call(one.authority, lambda client, asked=asked: client.poll(asked))  # type: ignore[misc]
            messages = [UMessage.FromString(data) for batch in answer.batches for data in batch.message]
            numbers += [int(message.payload) for message in messages]
            after = next(position.seq for position in answer.next if position.incarnation.hex() == one.incarnation)
    return found


class Query:
    """A query and its checkpoint over a LocalFleet. `read`: by authority, how often each record was read."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.fleet, self.losses = fleet, list[tuple[str, LogLoss]]()
        self.read: dict[str, Counter[int]] = {}
        self.text = ""
        self.longest_s = 0.0  # of a round
        self.planner = Planner(fleet.session, lambda loss, authority: self.losses.append((authority, loss)))

    async def round(self, idle_s: float = 0.05) -> bool:
        """Plan, read and commit one batch, with the checkpoint as JSON. Returns whether there was one."""
        if not self.text:
            self.text = json.dumps((await self.planner.begin("query1")).json())
        began = time.monotonic()
        start = Offset.of(json.loads(self.text))
        end = await self.planner.latest(start, self.fleet.options.max_records_per_batch, idle_s)
        if end != start:
            self.text = json.dumps(end.json())
            await self._read(start, Offset.of(json.loads(self.text)))
            await self.planner.commit(end)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return end != start

    async def _read(self, start: Offset, end: Offset) -> None:
        for authority, numbers in (await records_between(self.fleet.session, start, end, self.fleet.simulated)).items():
            self.read.setdefault(authority, Counter()).update(numbers)

    async def until(self, condition: Any, limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                await self.round()

    def wake(self) -> None:
        """Ask those that were away at once, instead of after a pause."""
        for member in self.planner.fleet.members.values():
            member.wake.set()

    def has_all(self, *authorities: str) -> bool:
        return all(len(self.read.get(one, ())) == self.fleet.numbers.get(one, 0) for one in authorities)

    def away(self) -> Mapping[str, Any]:
        return {name: lag["away"] for name, lag in self.planner.fleet.lag().items() if "away" in lag}

    def assert_once(self, *authorities: str) -> None:
        for one in authorities:
            assert self.read[one] == Counter(range(1, self.fleet.numbers[one] + 1)), one


def refused() -> UStatusError:
    return UStatusError(UCode.PERMISSION_DENIED, "you may read nothing here")


async def test_a_history_that_is_slow_hangs_or_refuses_holds_up_nobody() -> None:
    async with LocalFleet("slow", 3, 17, poll_timeout_ms=3_500, max_records_per_batch=2_000) as fleet:
        slow, hanging, refusing, flooding, *others = fleet.simulated
        everybody = [*fleet.real, *fleet.simulated]
        for name in everybody:
            await fleet.append(name, 10)
        fleet.histories.delays_s[slow] = 3.0
        fleet.histories.away.add(hanging)
        fleet.histories.refused[refusing] = refused()
        query = Query(fleet)
        fleet.announce(query.planner, everybody)
        await query.until(lambda: query.has_all(*others, *fleet.real))
        began = time.monotonic()
        while time.monotonic() - began < 4:
            for name in (*others[:3], *fleet.real):
                await fleet.append(name, 2)
            await fleet.append(flooding, 4_000)
            await query.round()
            await asyncio.sleep(0.05)
        for _ in range(5):
            await query.round()
        assert query.has_all(*others, *fleet.real)
        assert not query.has_all(flooding)
        await query.until(lambda: query.has_all(slow, flooding, *others, *fleet.real))
        assert query.longest_s < 1.5
        away = query.away()
        assert away.keys() == {hanging, refusing}
        assert "gave no answer" in away[hanging]["reason"]
        assert refused().message in away[refusing]["reason"]
        assert all(one["seconds"] > 0.2 for one in away.values())
        fleet.histories.away.clear()
        fleet.histories.refused.clear()
        fleet.histories.delays_s.clear()
        query.wake()
        await query.until(lambda: query.has_all(*everybody))
        query.assert_once(*everybody)
        assert not query.losses
        assert not query.away()
        assert len(fleet.histories.cursors) == len(fleet.simulated)
        await query.planner.fleet.close()


async def test_a_history_that_hangs_does_not_delay_a_commit() -> None:
    """It hangs after the plan and before the cursor is moved."""
    async with LocalFleet("hangs", 0, 3) as fleet:
        query = Query(fleet)
        for name in fleet.simulated:
            await fleet.append(name, 10)
        fleet.announce(query.planner, fleet.simulated)
        await query.until(lambda: query.has_all(*fleet.simulated))
        for name in fleet.simulated:
            await fleet.append(name, 10)
        await asyncio.sleep(0.1)
        start = Offset.of(json.loads(query.text))
        end = await query.planner.latest(start, None, 1.0)
        fleet.histories.away.add(fleet.simulated[0])
        for _ in range(3):
            began = time.monotonic()
            await query.planner.commit(end)
            assert time.monotonic() - began < 1.0
        assert fleet.histories.cursors == dict(zip(fleet.simulated, (10, 20, 20), strict=True))
        await query.planner.fleet.close()


async def test_a_history_that_restarts_loses_and_repeats_nothing() -> None:
    async with LocalFleet("restarts", 2, 2, poll_timeout_ms=500) as fleet:
        everybody = [*fleet.real, *fleet.simulated]
        restarting = fleet.real[0]
        query = Query(fleet)
        fleet.announce(query.planner, everybody)
        for _ in range(3):
            await query.round()
            await fleet.services[restarting].stop()
            for name in everybody:
                await fleet.append(name, 10)
            await query.until(lambda: query.has_all(*fleet.real[1:], *fleet.simulated))
            service = HistoryService(fleet.transport, LocalUriProvider(restarting, 4, 1), [fleet.logs[restarting]])
            fleet.services[restarting] = service
            await service.start()
            query.wake()
            await query.until(lambda: query.has_all(*everybody))
        query.assert_once(*everybody)
        assert not query.losses
        await query.planner.fleet.close()
        await fleet.services[restarting].stop()


async def test_a_log_that_was_replaced_is_one_loss_and_its_records_are_read() -> None:
    async with LocalFleet("replaced", 0, 3) as fleet:
        replaced, *others = fleet.simulated
        query = Query(fleet)
        fleet.announce(query.planner, fleet.simulated)
        for name in fleet.simulated:
            await fleet.append(name, 10)
        await query.until(lambda: query.has_all(*fleet.simulated))
        fleet.histories.replace(replaced)
        for name in fleet.simulated:
            await fleet.append(name, 5)
        await query.until(lambda: query.has_all(*others) and query.read[replaced][5] == 2)
        ((authority, loss),) = query.losses
        assert (authority, loss.before) == (replaced, 0)
        query.assert_once(*others)
        await query.planner.fleet.close()


async def test_idle_members_keep_their_cursors() -> None:
    """For three lease times: every poll renews the lease, as far apart as a third of it."""
    async with LocalFleet("leases", 2, 20) as fleet:
        fleet.histories.lease_ms = 1_000
        query = Query(fleet)
        everybody = [*fleet.real, *fleet.simulated]
        for name in everybody:
            await fleet.append(name, 3)
        fleet.announce(query.planner, everybody)
        await query.until(lambda: query.has_all(*everybody))
        await query.round()
        last = dict.fromkeys(fleet.simulated, time.monotonic())
        longest = dict.fromkeys(fleet.simulated, 0.0)
        until = time.monotonic() + 3 * fleet.histories.lease_ms / 1_000
        while time.monotonic() < until:
            await asyncio.sleep(0.02)
            for name, held_s in fleet.histories.held_s.items():
                if held_s > last[name]:
                    last[name] = held_s
                longest[name] = max(longest[name], time.monotonic() - last[name])
        assert max(longest.values()) < 0.7 * fleet.histories.lease_ms / 1_000
        assert set(fleet.histories.cursors.values()) == {3}
        await query.planner.fleet.close()


async def test_announcements_to_us_are_heard() -> None:
    async with LocalFleet("heard", 0, 3) as fleet:
        query = Query(fleet)
        for name in fleet.simulated:
            await fleet.append(name, 10)
        query.planner.fleet.open("query1", 0)
        await asyncio.sleep(0.1)
        for name in (*fleet.simulated[:2], "stranger.depot8"):
            await fleet.announce_to("//spark1/4/1/0", name)
        await asyncio.sleep(0.1)
        assert list(query.planner.fleet.members) == fleet.simulated[:2]
        await query.planner.fleet.close()


async def test_a_network_that_is_away_is_tried_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0

    def away(*_: object) -> None:
        nonlocal attempts
        attempts += 1
        raise UStatusError(UCode.UNAVAILABLE, "the broker is away")

    async with LocalFleet("away", 0, 300, start_timeout=1.2) as fleet:
        create = plugin.create
        monkeypatch.setattr("spark_ingest.client.plugin.create", away)
        for name in fleet.simulated:
            await fleet.append(name, 1)
        query = Query(fleet)
        fleet.announce(query.planner, fleet.simulated)
        with pytest.raises(UStatusError, match="the broker is away"):
            await query.round()
        assert 2 <= attempts <= 4
        monkeypatch.setattr("spark_ingest.client.plugin.create", create)
        await query.until(lambda: query.has_all(*fleet.simulated))
        query.assert_once(*fleet.simulated)
        await query.planner.fleet.close()
