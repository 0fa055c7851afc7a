"""`python -m campaigns.bench.spark_fleet`: the planner of a Spark query over a fleet, without Spark.

Histories ---on one member of a local network---<--- Planner, on another one
|-- real: HistoryService, with a log in memory
'-- simulated: answer Poll alone, from two numbers; those that are away do not answer

The last line of stdout is JSON. All of it is one process, so memory and CPU include what the histories need.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self

from history.log.log import Log
from history.records.visible import EVERYTHING_VISIBLE
from history.service.service import HistoryService
from spark_ingest import offsets
from spark_ingest.client import HistorySession
from spark_ingest.offsets import Offset
from spark_ingest.options import Options
from spark_ingest.planner import Planner
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.communication.rpc_server import Responses
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    Announcement,
    LogPlan,
    PollRequest,
    PollResponse,
    Position,
    Witness,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UListener
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage

REAL: Final = 50
SIMULATED: Final = 1_000
AWAY_SHARE: Final = 0.1
NEWS_SHARE: Final = 0.1
IDLE_S: Final = 30.0
FAMILY: Final = "depot7"
LEASE_MS: Final = 60_000


class SimulatedHistories(UListener):
    """Answers Poll for each of `authorities`: one log with `seqs[authority]` records, one each second, all visible."""

    def __init__(self, transport: LocalTransport, authorities: Iterable[str], lease_ms: int = LEASE_MS) -> None:
        self._responses = Responses(transport, waiting_max=100_000, bytes_max=1 << 30, share=1)
        self.seqs = dict.fromkeys(authorities, 0)
        self.incarnations = {name: number.to_bytes(16, "big") for number, name in enumerate(self.seqs, 1)}
        self.cursors: dict[str, int] = {}
        self.held_s: dict[str, float] = {}  # when a poll last renewed the lease, monotonic
        self.away: set[str] = set()
        self.refused: dict[str, UStatusError] = {}
        self.delays_s: dict[str, float] = {}
        self.lease_ms, self.polls, self.renewals = lease_ms, 0, 0
        self._waiting: dict[str, list[tuple[asyncio.TimerHandle, UMessage, PollRequest]]] = {}

    def append(self, authority: str, records: int) -> None:
        self.seqs[authority] += records
        for timer, message, asked in self._waiting.pop(authority, ()):
            timer.cancel()
            self._answer(message, asked, 0)

    def replace(self, authority: str) -> None:
        """Another log, empty."""
        self.incarnations[authority] = (int.from_bytes(self.incarnations[authority], "big") + (1 << 64)).to_bytes(
            16, "big"
        )
        self.seqs[authority] = 0
        self.append(authority, 0)

    def on_receive(self, message: UMessage) -> None:
        name = message.attributes.sink.authority_name
        if name not in self.seqs or name in self.away:
            return
        self.polls += 1
        asked = UPayload.of(message).unpack(PollRequest)
        delay_s = self.delays_s.get(name, 0)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._answer, message, asked, asked.wait_ms)
        else:
            self._answer(message, asked, asked.wait_ms)

    def _answer(self, message: UMessage, asked: PollRequest, wait_ms: int) -> None:
        name = message.attributes.sink.authority_name
        if name in self.refused:
            self._responses.refuse(message.attributes, self.refused[name])
            return
        incarnation, newest = self.incarnations[name], self.seqs[name]
        begin = next((one.seq for one in asked.positions if one.incarnation == incarnation), 0)
        if not asked.positions and asked.latest:
            begin = newest
        end = min([newest, *(one.seq for one in asked.until if one.incarnation == incarnation)])
        end = min(end, begin + asked.max_records)
        if end <= begin and wait_ms:
            timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._time_out, message, asked)
            self._waiting.setdefault(name, []).append((timer, message, asked))
            return
        answer = PollResponse(lease_ms=self.lease_ms if asked.consumer else 0)
        answer.begin.append(_position(incarnation, begin))
        answer.next.append(_position(incarnation, max(begin, end)))
        answer.visible.CopyFrom(EVERYTHING_VISIBLE.message)
        if asked.plan_records and end > begin:
            plan = LogPlan(incarnation=incarnation, newest_match_seq=newest)
            for first in range(begin, end, asked.plan_records):
                last = min(first + asked.plan_records, end)
                plan.cuts.add(position=_position(incarnation, last), records=last - first, first_time_ms=first * 1_000)
            answer.plan.append(plan)
        self.renewals += not asked.plan_records
        for one in asked.acked:
            if one.incarnation == incarnation:
                self.cursors[name], self.held_s[name] = one.seq, time.monotonic()
        self._responses.respond(message.attributes, answer)

    def _time_out(self, message: UMessage, asked: PollRequest) -> None:
        name = message.attributes.sink.authority_name
        self._waiting[name] = [one for one in self._waiting.get(name, ()) if one[1] is not message]
        if name not in self.away:
            self._answer(message, asked, 0)


def _position(incarnation: bytes, seq: int) -> Position:
    return Position(incarnation=incarnation, seq=seq, witnesses=[Witness(seq=seq, digest=b"%08d" % seq)] if seq else [])


class LocalFleet:
    """Real and simulated histories on one member of a local network, `network`, and a session to them."""

    def __init__(self, network: str, real: int, simulated: int, **options: Any) -> None:
        self.real = [f"van{number}.{FAMILY}" for number in range(real)]
        self.simulated = [f"car{number}.{FAMILY}" for number in range(simulated)]
        self.network = LocalNetwork.named(network)
        self.options = Options.model_validate(
            {
                "transport": "local",
                "transport_config": {"network": network},
                "local_authority": "spark1",
                "authorities": (f"*.{FAMILY}",),
                "max_records_per_batch": 1_000_000,
            }
            | options
        )
        self.session = HistorySession(self.options)
        self.logs: dict[str, Log] = {}
        self.services: dict[str, HistoryService] = {}
        self.numbers: dict[str, int] = {}  # of records, by authority
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        local = LocalUriProvider("fleet", ids.ENTITY, ids.VERSION)
        self.transport = await self._opened.enter_async_context(LocalTransport.on(self.network, local))
        self.histories = SimulatedHistories(self.transport, self.simulated)
        await self.transport.register_listener(
            uris.pattern(resource=0),
            self.histories,
            ids.at(uris.WILDCARD_AUTHORITY, ids.POLL),
        )
        for name in self.real:
            self.logs[name] = await self._opened.enter_async_context(await Log.open(None, name="volatile"))
            local = LocalUriProvider(name, ids.ENTITY, ids.VERSION)
            service = self.services[name] = HistoryService(self.transport, local, [self.logs[name]])
            await service.start()
            self._opened.push_async_callback(service.stop)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.shut()
        await self._opened.aclose()

    async def append(self, authority: str, records: int) -> None:
        """Append records, whose payload is their number in this history, from 1."""
        begin = self.numbers.get(authority, 0)
        self.numbers[authority] = begin + records
        if authority not in self.logs:
            self.histories.append(authority, records)
            return
        topic, log = uris.uri(authority, 1, 1, 0x8001), self.logs[authority]
        made = [UMessageBuilder.publish(topic) for _ in range(records)]
        payloads = [
            UPayload(b"%d" % number, UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
            for number in range(begin + 1, begin + records + 1)
        ]
        messages = [one.build_from_upayload(payload) for one, payload in zip(made, payloads, strict=True)]
        await log.append([log.stream_id(topic)] * records, messages)

    def announce(self, planner: Planner, authorities: Iterable[str]) -> None:
        for authority in authorities:
            planner.fleet.join(authority)

    async def announce_to(self, service: str, authority: str) -> None:
        """As a streamer does that names `service` in `followed_by`."""
        notification = UMessageBuilder.notification(ids.at(authority, ids.ANNOUNCEMENTS), uris.parse(service))
        await self.transport.send(notification.build_from_upayload(UPayload.pack(Announcement())))


def planned(start: Offset, end: Offset) -> Iterator[tuple[str, int, int]]:
    """Yields the ranges of a batch: authority, after, until."""
    for one in offsets.ranges(start, end, ()):
        yield one.authority, one.after, one.until


class Clock:
    """Wall and CPU seconds of what it encloses."""

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = (
            now - then for now, then in zip((time.perf_counter(), time.process_time()), self._began, strict=True)
        )


def resident_kib() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4


async def measure(real: int, simulated: int, idle_s: float) -> Mapping[str, float]:
    """Returns the figures of a fleet of which AWAY_SHARE do not answer."""
    figures: dict[str, float] = {"histories": real + simulated}
    async with LocalFleet("bench", real, simulated) as fleet:
        everybody = [*fleet.real, *fleet.simulated]
        fleet.histories.away = set(fleet.simulated[: round(AWAY_SHARE * len(everybody))])
        present = [one for one in everybody if one not in fleet.histories.away]
        for name in present:
            await fleet.append(name, 10)
        planner = Planner(fleet.session, _raise)
        before_kib = resident_kib()
        fleet.announce(planner, everybody)
        with Clock() as clock:
            offset = Offset.of((await planner.begin("query1")).json())
        figures["begin_s"] = clock.wall_s
        members = planner.fleet.members.values()
        await _until(lambda: sum(one.answered_ms > 0 for one in members) == len(present))
        figures["kib_per_history"] = (resident_kib() - before_kib) / len(everybody)
        offset = await _rounds(planner, offset, "first", figures, len(present))
        await _until(lambda: all(one.asking is not None for one in members if one.answered_ms))
        offset = await _round(planner, offset, "idle", figures)
        news = present[:: round(1 / NEWS_SHARE)]
        for name in news:
            await fleet.append(name, 10)
        await asyncio.sleep(0.5)
        offset = await _rounds(planner, offset, "news", figures, len(news))
        for name in present:
            await fleet.append(name, 10)
        await asyncio.sleep(1.0)
        offset = await _rounds(planner, offset, "all_news", figures, len(present))
        await planner.commit(offset)
        with Clock() as clock:
            text = json.dumps(offset.json())
        figures["checkpoint_kib"], figures["checkpoint_s"] = len(text) / 1024, clock.wall_s
        polls = fleet.histories.polls
        with Clock() as clock:
            await asyncio.sleep(idle_s)
        figures["standing_polls_cpu_percent"] = 100 * clock.cpu_s / idle_s
        figures["standing_polls_per_s"] = (fleet.histories.polls - polls) / idle_s
        rounds, polls = 0, fleet.histories.polls
        with Clock() as clock:
            until = time.monotonic() + idle_s
            while time.monotonic() < until:
                given = json.loads(text)  # as the source is called
                begin = Offset.of(given)
                assert await planner.latest(begin, 1_000_000, 0.5) == begin, "nothing was appended"
                rounds += 1
        figures["idle_rounds_cpu_percent"], figures["idle_rounds_per_s"] = 100 * clock.cpu_s / idle_s, rounds / idle_s
        figures["kib_per_history_later"] = (resident_kib() - before_kib) / len(everybody)
        await planner.fleet.close()
        await fleet.session.shut()
        for name in news:
            await fleet.append(name, 10)
        planner = Planner(fleet.session, _raise)
        await _rounds(planner, Offset.of(json.loads(text)), "restart", figures, len(news))
        with Clock() as clock:
            await planner.fleet.close()
        figures["close_s"] = clock.wall_s
    return {name: round(value, 3) for name, value in figures.items()}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.05)


async def _rounds(planner: Planner, start: Offset, name: str, figures: dict[str, float], ranges: int) -> Offset:
    """Rounds until they have that many ranges in all: on a busy computer some histories answer after the first one. The
    seconds are those of the longest round."""
    longest_s, cpu_s, total = 0.0, 0.0, 0.0
    async with asyncio.timeout(60):
        while total < ranges:
            start = await _round(planner, start, name, figures)
            longest_s = max(longest_s, figures[f"{name}_s"])
            cpu_s += figures[f"{name}_cpu_s"]
            total += figures[f"{name}_ranges"]
    figures |= {f"{name}_s": longest_s, f"{name}_cpu_s": cpu_s, f"{name}_ranges": total}
    return start


async def _round(planner: Planner, start: Offset, name: str, figures: dict[str, float]) -> Offset:
    with Clock() as clock:
        begin = Offset.of(json.loads(json.dumps(start.json())))
        end = await planner.latest(begin, 1_000_000, 0.0)
        end = Offset.of(json.loads(json.dumps(end.json())))
    figures[f"{name}_s"], figures[f"{name}_cpu_s"] = clock.wall_s, clock.cpu_s
    figures[f"{name}_ranges"] = len(list(planned(begin, end))) if end != begin else 0
    return end


def _raise(loss: object, authority: str) -> None:
    raise AssertionError(f"{authority}: {loss}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=int, default=REAL)
    parser.add_argument("--simulated", type=int, default=SIMULATED)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    given = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(measure(given.real, given.simulated, given.idle_s)), indent=1))


if __name__ == "__main__":
    main()
