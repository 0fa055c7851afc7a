"""Commands against a model: after any commands, losses, duplicates, delays and evictions, a poll returns what the model
says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from campaigns.simulation.loop import VirtualLoop
from history.log.log import Log
from history.reading.client import HistoryClient
from history.service import followers as followers_module
from tests.history.world import SERVICE, HistoryWorld, publishes
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    CommandRequest,
    CommandResponse,
    PollRequest,
    PollResponse,
)
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

TOPICS: Final = [uris.uri("vcu.vin", entity, 1, 0x8000 + place) for entity in (0x10, 0x11) for place in range(3)]
PATTERNS: Final = [*TOPICS, uris.uri("vcu.vin", 0x10, 1, 0xFFFF), uris.pattern("vcu.vin")]
LEASE_MS: Final = 10_000
OVER_S: Final = LEASE_MS / 1_000 + 2 * followers_module.LEASES_CHECK_S
# what is done to each of some patterns: its sample period, or None: not followed any more
CHANGES: Final = st.lists(
    st.tuples(st.integers(0, len(PATTERNS) - 1), st.sampled_from([0, 0, 1, 7, 50, None])), max_size=8
)


class Given(NamedTuple):
    seq: int
    prev_seq: int


class CommandMachine(RuleBasedStateMachine):
    """`records`: (topic, time_ms) of each, by seq - 1. `followed`: periods by place in PATTERNS, as the follower means
    them. `number`: of the last command that the service has done, 0: it does not know the follower."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(0)
        self.now_ms = 1_800_000_000_000
        self.records: list[tuple[int, int]] = []
        self.followed: dict[int, int] = {}
        self.names = 0
        self.number = 0
        self.done: list[
            tuple[CommandRequest, CommandResponse]
        ] = []  # commands of this follower, known to the service or not

    def run(self, awaitable: Coroutine[Any, Any, Any]) -> Any:
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(awaitable)

    def refused(self, code: UCode.ValueType, asked: CommandRequest | PollRequest) -> None:
        """The command changes nothing; the invariant checks it."""
        calls = self.client
        with pytest.raises(UStatusError) as error:
            self.run(calls.command(asked) if isinstance(asked, CommandRequest) else calls.poll(asked))
        assert error.value.code == code

    @initialize()
    def begin(self) -> None:
        self.run(self._begin())

    async def _begin(self) -> None:
        self.world = HistoryWorld()
        await self.world.open(await Log.open(None, name="model", now_ms=lambda: self.now_ms))
        self.client = HistoryClient(self.world.rpc, SERVICE, timeout_ms=60_000)
        self._create_client()

    def _create_client(self) -> None:
        self.names += 1
        self.number = 0
        self.done.clear()

    @property
    def name(self) -> bytes:
        return self.names.to_bytes(16, "big")

    def command(self, changes: list[tuple[int, int | None]], number: int) -> CommandRequest:
        asked = CommandRequest(follower=self.name, number=number, lease_ms=LEASE_MS)
        for place, period_ms in changes:
            change = asked.changes.add()
            if period_ms is None:
                change.unfollow.CopyFrom(PATTERNS[place])
            else:
                change.follow.topic.CopyFrom(PATTERNS[place])
                change.follow.sample_period_ms = period_ms
        return asked

    def tell(self, asked: CommandRequest) -> None:
        answer = self.run(self.client.command(asked))
        assert answer.lease_ms == LEASE_MS
        assert not answer.denied
        self.number = asked.number
        self.done.append((asked, answer))

    # -- what happens

    @rule(topics=st.lists(st.integers(0, len(TOPICS) - 1), min_size=1, max_size=10))
    def append(self, topics: list[int]) -> None:
        self.run(self.world.append_all(self.world.logs[0], publishes([TOPICS[one] for one in topics], b"x")))
        self.records += [(topic, self.now_ms) for topic in topics]

    @rule(ms=st.integers(1, 60))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(changes=CHANGES)
    def change(self, changes: list[tuple[int, int | None]]) -> None:
        """In order: the last one of a pattern wins."""
        self.tell(self.command(changes, self.number + 1))
        for place, period_ms in changes:
            if period_ms is None:
                self.followed.pop(place, None)
            else:
                self.followed[place] = period_ms

    @precondition(lambda self: self.number)
    @rule(changes=CHANGES)
    def repeat(self, changes: list[tuple[int, int | None]]) -> None:
        """Its answer was lost; the duplicate is not applied, whatever it contains."""
        assert self.run(self.client.command(self.command(changes, self.number))) == self.done[-1][1]

    @precondition(lambda self: len(self.done) > 1)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        """A duplicate of an earlier command."""
        asked, _ = data.draw(st.sampled_from(self.done[:-1]))
        self.refused(UCode.NOT_FOUND, asked)

    @rule(changes=CHANGES, ahead=st.integers(2, 3))
    def early(self, changes: list[tuple[int, int | None]], ahead: int) -> None:
        """The command before it was lost on its way."""
        self.refused(UCode.NOT_FOUND, self.command(changes, self.number + ahead))

    @rule(changes=CHANGES)
    def mistaken(self, changes: list[tuple[int, int | None]]) -> None:
        """No part of it is applied, and its number stays free."""
        asked = self.command(changes, self.number + 1)
        asked.changes.add().follow.topic.CopyFrom(UUri(authority_name="vcu.vin", ue_id=1, resource_id=1))
        self.refused(UCode.INVALID_ARGUMENT, asked)

    @rule()
    def restart(self) -> None:
        self.run(self.world.service.stop())
        self.run(self.world.serve())
        self.repeat_commands()

    @rule()
    def lease_runs_out(self) -> None:
        self.run(asyncio.sleep(OVER_S))
        self.repeat_commands()

    @rule(times=st.integers(1, 5))
    def polls_keep_the_lease(self, times: int) -> None:
        for _ in range(times if self.number else 0):
            self.run(asyncio.sleep(LEASE_MS / 1_000 * 0.8))
            self.run(self.client.poll(self.poll()))

    def repeat_commands(self) -> None:
        assert not len(self.world.service.followers)
        self.refused(UCode.NOT_FOUND, self.poll())
        if self.number:
            self.refused(UCode.NOT_FOUND, self.command([], self.number + 1))
        if len(self.done) > 1:
            # a duplicate of the first command arrives only now: it creates the follower again, and we do not poll it
            self.run(self.client.command(self.done[0][0]))
            self.refused(UCode.NOT_FOUND, self.poll())
            self.run(asyncio.sleep(OVER_S))
            assert not len(self.world.service.followers)
        self._create_client()
        self.tell(self.command(list(self.followed.items()), 1))

    # -- what the service gives

    def poll(self, after: int = 0, **more: Any) -> PollRequest:
        asked = PollRequest(follower=self.name, number=self.number, **more)
        if after:
            asked.positions.add(incarnation=self.world.logs[0].incarnation, seq=after)
        return asked

    def period_ms(self, topic: int) -> int | None:
        """None: it is not followed. Who wants all of something gets it."""
        periods = [period for place, period in self.followed.items() if uris.matches(PATTERNS[place], TOPICS[topic])]
        return min(periods, default=None)

    def expected(self, after: int, to: int) -> list[Given]:
        """Of the records (after, to], for a thinned topic only the first of each period in the log."""
        given: list[Given] = []
        newest: dict[int, tuple[int, int]] = {}  # of each topic, whether it is given or not: seq and time
        last: dict[int, int] = {}  # that is given
        for seq, (topic, time_ms) in enumerate(self.records, 1):
            period = self.period_ms(topic)
            prev_seq, prev_ms = newest.get(topic, (0, None))
            newest[topic] = seq, time_ms
            if period is None or not after < seq <= to:
                continue
            if not period:
                given.append(Given(seq, prev_seq))
            elif prev_ms is None or prev_ms // period != time_ms // period:
                given.append(Given(seq, last.get(topic, 0)))
                last[topic] = seq
        return given

    @staticmethod
    def given(answer: PollResponse) -> list[Given]:
        assert not answer.gaps
        return [Given(*one) for batch in answer.batches for one in zip(batch.seq, batch.prev_seq, strict=True)]

    @rule(data=st.data(), max_records=st.integers(1, 6))
    def read_on(self, data: st.DataObject, max_records: int) -> None:
        """Polls from any position: each answer is what the model says for its range."""
        after = data.draw(st.integers(0, len(self.records)))
        for _ in range(len(self.records) + 1) if self.number else ():
            answer = self.run(self.client.poll(self.poll(after, max_records=max_records)))
            (place,) = answer.next
            assert self.given(answer) == self.expected(after, place.seq)
            assert place.seq > after or not answer.more
            after = place.seq
            if not answer.more:
                break
        assert not self.number or after == len(self.records)

    @invariant()
    def agrees(self) -> None:
        if not self.number:
            return
        assert self.world.service.followers.topic_count == len(self.followed)
        answer = self.run(self.client.poll(self.poll()))
        assert self.given(answer) == self.expected(0, len(self.records))
        assert [one.seq for one in answer.next] == [len(self.records)]

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.run(self.world.close())
        finally:
            asyncio.set_event_loop(None)
            self.loop.finish([])


class TestCommands(CommandMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=examples(60),
        stateful_step_count=40,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # what fails is short enough, and shrinking takes minutes
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
