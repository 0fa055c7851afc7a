"""Handing over: whether publishes are pushed to the gateway behind an endpoint, or it follows our history instead.

HandOver take -> is it named in `followed_by`? -> pumps: stop sending publishes -> the seq up to which they were pushed
acked         -> cursor `followed:ENDPOINT`: retention keeps later records   (survives a restart)
                 cursor `follower:ENDPOINT:SERVICE`: who follows there; 1 once it has acknowledged something
HandOver end, or `followed_by` removed -> pumps: push again what comes after the named position, or the cursor

There is no lease: a follower that is away for a month finds all records that retention by size has kept.
Notifications, requests and responses are pushed as before. An announcement shows a follower that we are running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from history.log.log import Log
from history.records.witness import seqs_of
from streamer.egress.pump import Pump
from streamer.egress.rows import HOLDER, parsed, row, units_of
from streamer.reporting import Condition, Reporter, Sample
from streamer.walk.endpoint import Endpoint
from streamer.walk.paused import Paused
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Announcement, HandOver, HeldTopic, Position
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

# between announcements to a follower that has not taken over, and to one that has, in case it was restarted
ANNOUNCE_S: Final = 5.0
ANNOUNCE_TAKEN_S: Final = 60.0
WARNING: Final = 0.9  # share of the longest allowed silence; beyond it readiness reports it
HELD_TOPICS_MAX: Final = 4_096  # in one answer, some 200 KiB
SAVE_MS: Final = 600_000  # between saves of how long a follower has been silent

log = structlog.get_logger()


class HandOvers(Reporter):
    """Owns the cursors `followed:ENDPOINT` and `follower:ENDPOINT:SERVICE`.

    Its state, by endpoint: its pumps, its follower and why that was refused, whether its publishes are followed
    (`followed`), and for how long its follower has been silent, now and on disk.
    """

    def __init__(
        self,
        followed_by: Mapping[str, UUri],
        endpoints: Iterable[Endpoint],
        pumps: Sequence[Pump],
        logs: Sequence[Log],
        paused: Paused,
        announce: Callable[[UUri, Announcement], Awaitable[None]],
        absent_ms_max: int,
        on_unknown: Callable[[UUri, str, Sequence[bytes]], None] = lambda follower, endpoint, incarnations: None,
    ) -> None:
        """`on_unknown(follower, endpoint, incarnations)` is called if a follower confirms records of logs that are
        not here.

        `followed_by`: the service of the follower behind an endpoint, by the endpoint's name. `announce(to, it)`
        sends an announcement, and raises UStatusError. Retention by age waits for a follower until it has been silent
        for `absent_ms_max` in all."""
        self._followed_by: dict[str, UUri] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._pumps: dict[str, list[Pump]] = {}
        self._logs, self._paused, self._announce = logs, paused, announce
        self._on_unknown = on_unknown
        paused.check = self._check_pause
        self._turn = asyncio.Lock()
        self.refusals: dict[str, str] = {}  # why the last request for an endpoint was refused
        self.followed = set[str]()  # endpoints to which no publishes are pushed
        self.absent_ms_max = absent_ms_max
        self._silent_ms: dict[str, float] = {}  # how long these followers have been silent, and ...
        self._saved_ms: dict[str, float] = {}  # ... how much of that is on disk
        self._without_others = set[tuple[Log, str]]()  # logs and services without rows of former names
        for endpoint in endpoints:
            of_it = [pump for pump in pumps if pump.peer is endpoint]
            self.add_endpoint(endpoint, of_it, followed_by.get(endpoint.name))

    def add_endpoint(self, endpoint: Endpoint, pumps: list[Pump], followed_by: UUri | None) -> None:
        """Add an endpoint. `load_endpoint` then continues from the cursors of an earlier run."""
        self._without_others.clear()
        self._endpoints[endpoint.name], self._pumps[endpoint.name] = endpoint, pumps
        if followed_by is not None:
            self._followed_by[endpoint.name] = followed_by

    def remove_endpoint(self, name: str) -> None:
        """Remove an endpoint. Its cursors stay in the logs for an endpoint of the same name."""
        self.followed.discard(name)
        self._without_others.clear()
        for by_name in (self._endpoints, self._pumps, self._followed_by, self.refusals):
            by_name.pop(name, None)
        for times in (self._silent_ms, self._saved_ms):
            times.pop(name, None)

    def __repr__(self) -> str:
        return f"HandOvers({self._followed_by.keys() - self.followed} push, {self.followed} are followed)"

    def backlog(self) -> Iterator[tuple[str, Log, int]]:
        """Yields endpoint, log, and the number of records that the follower has not acknowledged."""
        for name in self.followed:
            for source in self._logs:
                if (seq := source.cursors.seq(row("followed", name))) is not None:
                    yield name, source, source.newest_seq - seq

    def samples(self) -> Iterator[Sample]:
        for name, source, records in self.backlog():
            yield "follower_backlog", (name, "durable" if source.durable else "volatile"), records

    def load(self) -> None:
        """Continue as before the restart, after the pumps' `begin`. Push again to an endpoint that no longer names a
        follower."""
        for name in self._pumps:
            self.load_endpoint(name)

    def load_endpoint(self, name: str) -> None:
        """Do the same for one endpoint."""
        pumps = self._pumps[name]
        held = [cursor for pump in pumps if (cursor := pump.log.cursors.get(row("followed", name))) is not None]
        if not held:
            return
        if name in self._followed_by:
            self.followed.add(name)
            self._silent_ms[name] = self._saved_ms[name] = held[0].absent_ms
        else:
            log.warning("an endpoint names no follower any more: publishes are pushed again", endpoint=name)
        for pump in pumps:
            seq = pump.log.cursors.seq(row("followed", name))
            if name in self._followed_by:
                pump.waits.continue_followed()
                if seq is None:  # the log is in memory
                    self._hold(name, pump.log, pump.cursor)
            elif seq is not None:
                pump.waits.take_back(seq, 0)
                pump.waits.confirm()
                pump.log.cursors.drop(row("followed", name))
                self._forget_follower(name, pump.log)

    def _hold(self, name: str, source: Log, seq: int) -> None:
        silent_ms = self._silent_ms.get(name, 0)
        holds = silent_ms < self.absent_ms_max
        source.cursors.set(row("followed", name), seq, holds=holds, absent_ms=int(silent_ms))

    def _heard(self, name: str) -> None:
        if self._silent_ms.pop(name, 0) >= SAVE_MS:
            self._save(name)

    def _passed(self, ms: float) -> None:
        for name in self.followed:
            self._silent_ms[name] = self._silent_ms.get(name, 0) + ms
            if self._silent_ms[name] - self._saved_ms.get(name, 0) >= SAVE_MS:
                self._save(name)

    def _save(self, name: str) -> None:
        self._saved_ms[name] = self._silent_ms.get(name, 0)
        for pump in self._pumps[name]:
            if (seq := pump.log.cursors.seq(row("followed", name))) is not None:
                self._hold(name, pump.log, seq)

    def _check_pause(self, peer: Endpoint) -> None:
        if peer.name in self.followed:
            what = f"{uris.format(self._followed_by[peer.name])} follows, so nothing is pushed there that could be held"
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}: pause there, or have it stop following")

    def conditions(self) -> Iterator[Condition]:
        for name in self.followed:
            if pauses := self._paused.toward(self._endpoints[name]):
                what = f"the pause of {pauses[0].topic} holds no publish back, for they are followed"
                yield Condition(f"{what}; resume it", name)
            if self._silent_ms.get(name, 0) >= self.absent_ms_max * WARNING:
                hours = self._silent_ms[name] / 3_600_000
                what = f"{uris.format(self._followed_by[name])} has not followed for {hours:.0f} hours"
                yield Condition(f"{what}; retention by age will soon delete what it has not had", name)

    # -- requests of the follower

    async def asked(self, caller: UUri, asked: HandOver) -> list[Position]:
        """Answer a HandOver. Raises PERMISSION_DENIED, INVALID_ARGUMENT, UNAVAILABLE (try again)."""
        which, positions = asked.WhichOneof("do"), seqs_of(asked.positions)
        async with self._turn:
            if which == "end" and asked.end and (names := self._names_of(caller)):
                return await self._end(names, positions)
            name = self._endpoint_of(caller)
            if which == "take" and asked.take:
                return await self._take_confirmed(name, positions, takes_held=asked.takes_held)
        raise invalid("a hand-over takes or ends")

    def _endpoint_of(self, caller: UUri) -> str:
        for name, service in self._followed_by.items():
            if _is_same(service, caller):
                return name
        what = "no endpoint here names it as followed_by: publishes are pushed as before"
        raise UStatusError(UCode.PERMISSION_DENIED, f"{uris.format(caller)} takes nothing over: {what}")

    def _names_of(self, caller: UUri) -> set[str]:
        """Returns the endpoints that name the caller, and those behind which it has taken over: they may have another
        name now, or name another follower."""
        named = {name for name, service in self._followed_by.items() if _is_same(service, caller)}
        whose = uris.format(uris.uri(caller.authority_name, caller.ue_id, caller.ue_version_major, 0))
        return named.union(*(_rows_of(source, whose) for source in self._logs))

    async def _take_confirmed(self, name: str, read: Mapping[bytes, int], *, takes_held: bool) -> list[Position]:
        try:
            positions = await self._take(name, read, takes_held=takes_held)
        except UStatusError as error:
            if self.refusals.get(name) != error.message:
                log.warning("publishes are still pushed", endpoint=name, why=error.message, _kind="pushing")
            self.refusals[name] = error.message
            raise
        self.refusals.pop(name, None)
        return positions

    async def _take(self, name: str, read: Mapping[bytes, int], *, takes_held: bool) -> list[Position]:
        """`read`: the positions from which the follower reads on, by log."""
        if name not in self.followed and (pauses := self._paused.toward(self._endpoints[name])):
            what = f"{pauses[0].topic} is paused toward {pauses[0].peer!r}: nothing can be handed over before that ends"
            raise UStatusError(UCode.UNAVAILABLE, what)
        if not takes_held and any(pump.waits.has_publishes for pump in self._pumps[name]):
            what = f"topics wait for endpoint {name!r}, and this follower does not read what is held (takes_held)"
            raise UStatusError(UCode.UNAVAILABLE, f"{what}: nothing can be handed over before they have left")
        for pump in self._pumps[name]:
            first, read_to = pump.waits.positions().first_of_all, read.get(pump.log.incarnation, 0)
            if not pump.waits.plans.is_followed and first < read_to:
                what = f"publishes wait for endpoint {name!r} from before the position of this follower"
                raise UStatusError(UCode.UNAVAILABLE, f"{what}: nothing can be handed over before they have left")
        for pump in self._pumps[name]:
            if not pump.waits.plans.is_followed:
                self._hold(name, pump.log, await pump.between_batches(pump.waits.hand_over))
            row = self._follower_row(name)
            if pump.log.cursors.seq(row) is None:
                self._forget_follower(name, pump.log)
                pump.log.cursors.set(row, 0)
        if name not in self.followed:
            self.followed.add(name)
            log.info("publishes are not pushed any more, but followed", endpoint=name, _kind="pushing")
        return [self._position(name, pump) for pump in self._pumps[name]]

    def _position(self, name: str, pump: Pump) -> Position:
        seq = pump.log.cursors.seq(row("followed", name))
        assert seq is not None, "it was set when it was handed over"
        whose = uris.format(self._followed_by[name])
        return Position(
            incarnation=pump.log.incarnation,
            seq=seq,
            in_memory=not pump.log.durable,
            held=_held_topics(pump, self._acknowledged_before(whose, pump.log)),
            acknowledged=any(_rows_of(pump.log, whose).values()),
        )

    def _acknowledged_before(self, whose: str, source: Log) -> int | None:
        """Returns the seq up to which the follower has acknowledged what waits for it under former names of its
        endpoint; None: it has no former name."""
        former = _rows_of(source, whose).keys() - self._endpoints.keys()
        seqs = [seq for name in former if (seq := source.cursors.seq(row("followed", name))) is not None]
        return min(seqs, default=None)

    def _follower_row(self, name: str) -> str:
        return row("follower", name, uris.format(self._followed_by[name]))

    def _forget_follower(self, name: str, source: Log) -> None:
        for service in units_of(source.cursors.seqs(), "follower", name):
            source.cursors.drop(row("follower", name, service))

    async def _end(self, names: Iterable[str], positions: Mapping[bytes, int]) -> list[Position]:
        """End it for all these endpoints, also those that are not configured: the follower asks only once, and one that
        comes back would push nothing."""
        ended: list[Position] = []
        for name in sorted(names):
            if name in self._endpoints:
                ended += await self._push_again(name, positions)
            else:
                self._end_unconfigured(name, positions)
        for source in self._logs:  # otherwise a restart could undo the end, and the follower would not repeat it
            await source.saved()
        return ended

    def _end_unconfigured(self, name: str, positions: Mapping[bytes, int]) -> None:
        """What the follower has not had waits for an endpoint of that name, as if nobody had followed there."""
        for source in self._logs:
            rows, had = source.cursors.all(), positions.get(source.incarnation, 0)
            if (followed := rows.get(row("followed", name))) is not None:
                read = [row("followed", name), *(row("owed", name, stream) for stream in units_of(rows, "owed", name))]
                own = rows.get(row("egress", name), followed)
                seq = min([own.seq, *(max(rows[cursor].seq, had) for cursor in read)])
                source.cursors.set(row("egress", name), seq, holds=own.holds, absent_ms=own.absent_ms, holder=HOLDER)
                for cursor in read:
                    source.cursors.drop(cursor)
            self._forget_follower(name, source)

    async def _push_again(self, name: str, positions: Mapping[bytes, int]) -> list[Position]:
        ended: list[Position] = []
        for pump in self._pumps[name]:
            seq = pump.log.cursors.seq(row("followed", name))
            if seq is None:
                continue
            had = positions.get(pump.log.incarnation, 0)
            seq = min(max(seq, had), pump.log.newest_seq)
            await pump.between_batches(partial(pump.waits.take_back, seq, had))
            pump.log.cursors.drop(row("followed", name))
            self._forget_follower(name, pump.log)
            ended.append(Position(incarnation=pump.log.incarnation, seq=seq))
        if name in self.followed:
            self.followed.discard(name)
            log.info("publishes are pushed again", endpoint=name, _kind="pushing")
        return ended

    def acknowledged(self, caller: UUri, positions: Mapping[bytes, int]) -> None:
        """Note that the caller has stored all records up to here. Ignored if it follows for no endpoint."""
        self._look_for_others(caller, positions)
        for name in self.followed:
            if not _is_same(self._followed_by[name], caller):
                continue
            self._heard(name)
            for pump in self._pumps[name]:
                source = pump.log
                seq, known = positions.get(source.incarnation, 0), source.cursors.seq(row("followed", name))
                if known is None or not known <= seq <= source.newest_seq:
                    continue
                if known < seq:
                    self._hold(name, source, seq)
                pump.waits.acknowledged()
                source.cursors.set(self._follower_row(name), 1)
                self._move_others(uris.format(self._followed_by[name]), source, seq)

    def _move_others(self, whose: str, source: Log, seq: int) -> None:
        """What counts is the follower, not the name of the endpoint: it also has what waits under another name, which
        is not configured any more."""
        if (source, whose) in self._without_others:
            return
        others = _rows_of(source, whose).keys() - self._endpoints.keys()
        if not others:
            self._without_others.add((source, whose))
        for name in others:
            cursor = source.cursors.get(row("followed", name))
            if cursor is not None and cursor.seq < seq:
                source.cursors.set(row("followed", name), seq, holds=cursor.holds, absent_ms=cursor.absent_ms)

    def _look_for_others(self, caller: UUri, positions: Mapping[bytes, int]) -> None:
        ours = {incarnation for one in self._logs for incarnation in (one.incarnation, *one.predecessors)}
        others = [incarnation for incarnation, seq in positions.items() if seq and incarnation not in ours]
        for name, service in self._followed_by.items() if others else ():
            if _is_same(service, caller):
                self._on_unknown(service, name, others)

    # -- announcements

    async def run(self) -> None:
        """Announce ourselves to each follower, until cancelled."""
        announced: dict[str, float] = {}
        time = asyncio.get_running_loop().time
        while True:
            for name, service in list(self._followed_by.items()):
                endpoint, every = self._endpoints.get(name), ANNOUNCE_TAKEN_S if name in self.followed else ANNOUNCE_S
                if endpoint is None or not endpoint.connected:
                    continue
                if time() - announced.get(name, -every) >= every:
                    announced[name] = time()
                    await self._send_announcement(service)
            for name in announced.keys() - self._followed_by.keys():
                del announced[name]
            before = time()
            await asyncio.sleep(ANNOUNCE_S)
            self._passed((time() - before) * 1_000)

    async def _send_announcement(self, service: UUri) -> None:
        try:
            await self._announce(service, Announcement(incarnations=[one.incarnation for one in self._logs]))
        except UStatusError as error:
            log.debug("an announcement could not be sent", to=uris.format(service), error=str(error))


def _is_same(service: UUri, caller: UUri) -> bool:
    return uris.key(service)[:3] == uris.key(caller)[:3]


def _rows_of(source: Log, whose: str) -> dict[str, int]:
    """Returns whether the service `whose` has acknowledged something, by the endpoint behind which it follows."""
    followers = ((parsed(name), seq) for name, seq in source.cursors.seqs().items() if name.startswith("follower:"))
    return {named.endpoint: seq for named, seq in followers if named is not None and named.unit == whose}


def _held_topics(pump: Pump, before: int | None) -> list[HeldTopic]:
    """Returns the topics that the follower must read from before its position; of too many, a pattern of all. `before`:
    the seq after which it must read all topics; None: none."""
    known = [
        (pump.log.stream(stream).source, after)
        for stream, after in pump.waits.owed.items()
        if pump.log.knows_stream(stream)
    ]
    if before is not None:
        known.append((uris.ANY, before))
    if before is not None or len(known) > HELD_TOPICS_MAX:
        known = [(uris.ANY, min(after for _, after in known))]
    return [HeldTopic(topic=topic, after_seq=after) for topic, after in known]
