"""The machine and its store against a small model: crashes, clock jumps and a bad network between any two steps."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tiers import examples, seeds
from uprotocol.status import UStatusError
from usubscription.state import (
    LINK_IGNORES,
    LINK_TRANSITIONS,
    Answered,
    Command,
    Expire,
    Key,
    LinkEvent,
    Lost,
    Notified,
    Orphaned,
    RemoteLink,
    Status,
    Subscribe,
    SubscriptionRecord,
    TimedOut,
    Unsubscribe,
    retry_delay_ms,
    step,
)
from usubscription.store.database import Database, Outcome, Register, Reset, Sent

OWN = "own"
LOCAL_TOPICS: list[Key] = [(OWN, 1, 1, 0x8000)]
REMOTE_TOPICS: list[Key] = [
    ("far", 1, 1, 0x8000 + number) for number in range(2)
]  # few, so that events concern the same topics
SUBSCRIBERS: list[Key] = [(OWN, 0x10 + number, 1, 0) for number in range(2)]
WATCHER: Key = (OWN, 0x99, 1, 0)
REMOTE_TOPIC = st.sampled_from([*REMOTE_TOPICS[:1] * 3, *REMOTE_TOPICS])
TOPIC, SUBSCRIBER, MAJOR = (
    REMOTE_TOPIC | st.sampled_from(LOCAL_TOPICS),
    st.sampled_from(SUBSCRIBERS),
    st.sampled_from([3, 4]),
)
LIFETIME = st.none() | st.none() | st.integers(-5, 50)
START_MS = 1_900_000_000_000


class DictRecords(dict[Key, SubscriptionRecord]):
    def has_others(self, subscriber: Key) -> bool:
        return any(key != subscriber for key in self)


class Fault(Exception):
    """Raised in place of a crash."""


class Poison:
    """Not an event: it aborts the transaction."""

    @property
    def topic(self) -> Key:
        raise Fault


class Subscriptions(RuleBasedStateMachine):
    """`model`: what clients expect; `remote_has`: the state of the remote service; `view`: the notifications to a
    registered client."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="usubscription-"))
        self.now = START_MS
        self.model: dict[tuple[Key, Key], int | None] = {}
        self.view: dict[tuple[Key, Key], Status] = {}
        self.remote_has: set[Key] = set()
        self.late: list[tuple[Key, int, Status]] = []  # answers in flight
        self.notified_up_to = 0
        self.restart()
        self.apply(Register(WATCHER, 4, None))

    def restart(self) -> None:
        self.db = Database(self.directory / "store.db", OWN)
        self.db.open()
        self.reader = self.db.reader()
        self.sent = 0

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.reader.close()
            self.db.close()
            shutil.rmtree(self.directory)

    def apply(self, *events: Any) -> list[Any]:
        outcomes = self.db.apply(events, self.now)
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)
        return outcomes

    # -- clients
    # ------------------------------------------------------------------------------------------------------------------

    @rule(
        topic=TOPIC,
        subscriber=SUBSCRIBER,
        major=MAJOR,
        lifetime=st.none() | st.none() | st.integers(-5, 50),
        period=st.none() | st.integers(0, 3),
    )
    def subscribe(self, topic: Key, subscriber: Key, major: int, lifetime: int | None, period: int | None) -> None:
        asked = None if lifetime is None else self.now + lifetime
        (outcome,) = self.apply(Subscribe(topic, subscriber, major, asked, period))
        if asked is not None and asked < self.now:
            self.model.pop((topic, subscriber), None)
            assert outcome.answer is Status.UNSUBSCRIBED
        else:
            self.model[topic, subscriber] = asked
            assert outcome.answer is Status.SUBSCRIBED or (
                topic[0] != OWN and outcome.answer is Status.SUBSCRIBE_PENDING
            )

    @rule(topic=TOPIC, subscriber=SUBSCRIBER, major=MAJOR)
    def unsubscribe(self, topic: Key, subscriber: Key, major: int) -> None:
        (outcome,) = self.apply(Unsubscribe(topic, subscriber, major))
        assert outcome.answer is Status.UNSUBSCRIBED
        self.model.pop((topic, subscriber), None)

    @rule()
    def expire(self) -> None:
        due, _ = self.reader.expired(self.now, 100)
        self.apply(*(Expire(topic, subscriber) for topic, subscriber in due))
        self.model = {key: expires for key, expires in self.model.items() if expires is None or expires >= self.now}

    @rule()
    def reset(self) -> None:
        self.apply(Reset(), Register(WATCHER, 4, None))
        self.model.clear()

    # -- the world
    # ----------------------------------------------------------------------------------------------------------------

    @rule(step_ms=st.integers(-1000, 1000))
    def clock(self, step_ms: int) -> None:
        self.now += step_ms

    @rule()
    def crash(self) -> None:
        """Everything that is only in memory is lost."""
        self.reader.close()
        self.db.close()
        self.late.clear()  # nobody waits for them
        self.restart()

    @rule(topic=TOPIC, subscriber=SUBSCRIBER)
    def crash_in_a_transaction(self, topic: Key, subscriber: Key) -> None:
        before = self.stored()
        with pytest.raises(Fault):
            self.db.apply([Subscribe(topic, subscriber, 4), Unsubscribe(topic, SUBSCRIBERS[0], 4), Poison()], self.now)  # type: ignore[list-item]
        assert self.stored() == before

    @rule(number=st.integers(1, 5), crash=st.booleans())
    def tell(self, number: int, crash: bool) -> None:
        """Reads and sends changes, and stores that they were sent; a crash may come before that."""
        for stored in self.reader.outbox(self.sent, number):
            self.hear(stored)
            self.sent = stored.number
        if not crash:
            self.apply(Sent(self.sent))

    def hear(self, stored: Any) -> None:
        assert (WATCHER, 4) in stored.recipients
        if stored.number <= self.notified_up_to:
            return  # a duplicate, after a crash
        assert stored.number > self.notified_up_to
        self.notified_up_to = stored.number
        change = stored.change
        if change.topic[3] == 0:
            return  # the end of a registration
        if change.status is Status.UNSUBSCRIBED:
            self.view.pop((change.topic, change.subscriber), None)
        else:
            self.view[change.topic, change.subscriber] = change.status

    @rule(
        index=st.integers(0, 5),
        fate=st.sampled_from(["answered", "answer late", "answer lost", "request lost"]),
        answer=st.sampled_from([Status.SUBSCRIBED, Status.SUBSCRIBED, Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED]),
    )
    def send_command(self, index: int, fate: str, answer: Status) -> None:
        due = [(topic, link) for topic, link in self.reader.links() if link.command is not None]
        if due:
            topic, link = due[index % len(due)]
            self.command(topic, link, fate, answer)

    @rule()
    def all_is_well_for_a_moment(self) -> None:
        for topic, link in self.reader.links():
            if link.command is not None:
                self.command(topic, link, "answered", Status.SUBSCRIBED)

    def command(self, topic: Key, link: RemoteLink, fate: str, answer: Status) -> None:
        if fate == "request lost":
            self.apply(TimedOut(topic, link.generation))
            return
        if link.command is Command.UNSUBSCRIBE:
            answer = Status.UNSUBSCRIBED
        if answer is Status.UNSUBSCRIBED:
            self.remote_has.discard(topic)
        else:
            self.remote_has.add(topic)
        if fate == "answered":
            self.answered(topic, link.generation, answer)
        else:
            if fate == "answer late":
                self.late.append((topic, link.generation, answer))
            self.apply(TimedOut(topic, link.generation))

    def answered(self, topic: Key, generation: int, answer: Status) -> None:
        counts = any(at == topic and link.generation == generation and link.command for at, link in self.reader.links())
        self.apply(Answered(topic, generation, answer))
        if counts and answer is Status.UNSUBSCRIBED:
            self.forget(topic)

    @rule(index=st.integers(0, 9))
    def late_answer(self, index: int) -> None:
        if self.late:
            self.answered(*self.late.pop(index % len(self.late)))

    @rule(
        topic=REMOTE_TOPIC, status=st.sampled_from([Status.SUBSCRIBED, Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED])
    )
    def remote_notifies(self, topic: Key, status: Status) -> None:
        link = dict(self.reader.links()).get(topic)
        self.apply(Notified(topic, status))
        if link is not None and link.command is None and status is Status.UNSUBSCRIBED:
            self.remote_has.discard(topic)
            self.forget(topic)

    @rule()
    def remote_loses_its_store(self) -> None:
        self.remote_has.clear()

    @rule(topic=REMOTE_TOPIC)
    def remote_invents_a_subscription(self, topic: Key) -> None:
        self.remote_has.add(topic)

    @rule()
    def audit(self) -> None:
        links = dict(self.reader.links())
        for topic, link in links.items():
            if link.command is None and topic not in self.remote_has:
                self.apply(Lost(topic))
        for topic in sorted(self.remote_has - set(links)):
            self.apply(Orphaned(topic, 4))

    def forget(self, topic: Key) -> None:
        self.model = {key: expires for key, expires in self.model.items() if key[0] != topic}

    # -- what must hold
    # -----------------------------------------------------------------------------------------------------------------

    def stored(self) -> Any:
        rows = [row for _, row in self.reader.each(None, None, -(10**15))]
        return rows, self.reader.links(), self.reader.outbox(0, 10_000), self.reader.registrations()

    @invariant()
    def records_are_what_clients_expect(self) -> None:
        rows = [row for _, row in self.reader.each(None, None, -(10**15))]
        assert {(row.topic, row.subscriber): row.expires_ms for row in rows} == self.model
        links = dict(self.reader.links())
        for row in rows:
            assert row.status is (links[row.topic].state if row.topic[0] != OWN else Status.SUBSCRIBED)
        for topic, link in links.items():
            assert topic[0] != OWN
            has_records = any(row.topic == topic for row in rows)
            assert has_records == (link.state in (Status.SUBSCRIBED, Status.SUBSCRIBE_PENDING))
            assert link.state is not Status.UNSUBSCRIBED
            assert (link.command is Command.UNSUBSCRIBE) == (link.state is Status.UNSUBSCRIBE_PENDING)

    @invariant()
    def everything_is_notified_in_the_end(self) -> None:
        view = dict(self.view)
        for stored in self.reader.outbox(0, 10_000):
            if stored.number > self.notified_up_to and stored.change.topic[3]:
                key = (stored.change.topic, stored.change.subscriber)
                if stored.change.status is Status.UNSUBSCRIBED:
                    view.pop(key, None)
                else:
                    view[key] = stored.change.status
        rows = [row for _, row in self.reader.each(None, None, -(10**15))]
        assert view == {(row.topic, row.subscriber): row.status for row in rows}

    def settle(self) -> None:
        """With a working network both sides agree, and nothing is left to send."""
        self.late.clear()
        self.expire()
        for _ in range(4):
            self.audit()
            for topic, link in self.reader.links():
                if link.command is not None:
                    self.command(topic, link, "answered", Status.SUBSCRIBED)
                elif link.state is Status.SUBSCRIBE_PENDING:
                    self.apply(Notified(topic, Status.SUBSCRIBED))
        links = dict(self.reader.links())
        assert set(links) == self.remote_has == {topic for topic, _ in self.model if topic[0] != OWN}
        assert all(link.state is Status.SUBSCRIBED and link.command is None for link in links.values())
        self.tell(10_000, crash=False)
        assert self.reader.outbox(0, 1) == []
        for _, row in list(self.reader.each(None, None, self.now)):
            self.unsubscribe(row.topic, row.subscriber, 4)
        self.tell(10_000, crash=False)
        for topic, link in self.reader.links():
            self.command(topic, link, "answered", Status.UNSUBSCRIBED)
        (uris_left,) = self.reader._db.execute("SELECT count(*) FROM uri").fetchone()
        assert uris_left == 1, "only the registered client's"


TestSubscriptions = pytest.mark.slow(
    pytest.mark.spec("dsn~usubscription-state-machine~1", doc="v3")(
        pytest.mark.spec("dsn~usubscription-state-machine~1", doc="v4")(Subscriptions.TestCase)
    )
)
TestSubscriptions.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_long_random_walks(seed: int) -> None:
    """The same steps, many more than hypothesis draws; a seed repeats each run."""
    chance = random.Random(seed)
    machine = Subscriptions()
    remote, answers = (
        REMOTE_TOPICS[0],
        [Status.SUBSCRIBED, Status.SUBSCRIBED, Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED],
    )
    fates = ["answered", "answer late", "answer lost", "request lost"]

    def topic() -> Key:
        return chance.choice([remote, remote, *REMOTE_TOPICS, *LOCAL_TOPICS])

    def major() -> int:
        return chance.choice([3, 4])

    def who() -> Key:
        return chance.choice(SUBSCRIBERS)

    steps: list[tuple[int, Callable[[], None]]] = [
        (
            8,
            lambda: machine.subscribe(
                topic(), who(), major(), chance.choice([None, None, -5, 5, 50]), chance.choice([None, 0, 1, 2])
            ),
        ),
        (6, lambda: machine.unsubscribe(topic(), who(), major())),
        (10, lambda: machine.send_command(chance.randrange(6), chance.choice(fates), chance.choice(answers))),
        (4, lambda: machine.late_answer(chance.randrange(10))),
        (3, lambda: machine.remote_notifies(chance.choice(REMOTE_TOPICS), chance.choice(answers))),
        (2, machine.audit),
        (2, machine.expire),
        (2, lambda: machine.clock(chance.randint(-20, 40))),
        (2, lambda: machine.tell(chance.randint(1, 5), chance.random() < 0.5)),
        (1, machine.remote_loses_its_store),
        (1, lambda: machine.remote_invents_a_subscription(chance.choice(REMOTE_TOPICS))),
        (1, lambda: machine.crash_in_a_transaction(topic(), who())),
    ]
    weights, actions = zip(*steps, strict=True)
    try:
        for number in range(1, 1001):
            chance.choices(actions, weights)[0]()
            machine.records_are_what_clients_expect()
            machine.everything_is_notified_in_the_end()
            if number % 10 == 0:
                machine.crash()
            if number % 150 == 0:
                machine.reset()
            if number % 40 == 0:
                machine.settle()
    finally:
        machine.teardown()


# -- the tables
# -------------------------------------------------------------------------------------------------------------------


def test_every_pair_of_link_state_and_event_is_decided() -> None:
    pairs = set(itertools.product(Status, LinkEvent))
    assert set(LINK_TRANSITIONS) | LINK_IGNORES == pairs
    assert not set(LINK_TRANSITIONS) & LINK_IGNORES


def test_records_are_never_unsubscribe_pending() -> None:
    followed = [rule.state for rule in LINK_TRANSITIONS.values() if rule.records_follow]
    assert Status.UNSUBSCRIBE_PENDING not in followed
    assert len(followed) == 9


@pytest.mark.spec("dsn~usubscription-state-machine~1", doc="v3")
@pytest.mark.spec("dsn~usubscription-state-machine~1", doc="v4")
@pytest.mark.parametrize(
    ("start", "event", "end"),
    [
        (Status.UNSUBSCRIBED, Subscribe(LOCAL_TOPICS[0], SUBSCRIBERS[0], 4), Status.SUBSCRIBED),
        (Status.UNSUBSCRIBED, Subscribe(REMOTE_TOPICS[0], SUBSCRIBERS[0], 4), Status.SUBSCRIBE_PENDING),
        (Status.SUBSCRIBE_PENDING, Answered(REMOTE_TOPICS[0], 1, Status.SUBSCRIBED), Status.SUBSCRIBED),
        (Status.SUBSCRIBED, Unsubscribe(LOCAL_TOPICS[0], SUBSCRIBERS[0], 4), Status.UNSUBSCRIBED),
        (Status.SUBSCRIBED, LinkEvent.UNWANT, Status.UNSUBSCRIBE_PENDING),
        (Status.UNSUBSCRIBE_PENDING, LinkEvent.ANSWER_UNSUBSCRIBED, Status.UNSUBSCRIBED),
    ],
    ids=str,
)
def test_the_edges_that_the_specification_draws(start: Status, event: Any, end: Status) -> None:
    if isinstance(event, LinkEvent):
        assert LINK_TRANSITIONS[start, event].state is end
        return
    known = {} if start is Status.UNSUBSCRIBED else {SUBSCRIBERS[0]: SubscriptionRecord(start, 3)}
    link = RemoteLink(start, 4, Command.SUBSCRIBE, 1) if start is Status.SUBSCRIBE_PENDING else RemoteLink()
    remote = event.topic == REMOTE_TOPICS[0]
    (change,) = step(event, DictRecords(known), link, remote=remote, now_ms=0, generation=1).changes
    assert change.status is end


@given(st.integers(1, 100), st.floats(0, 0.999))
def test_retries_back_off_with_jitter_and_have_a_limit(attempt: int, jitter: float) -> None:
    delay = retry_delay_ms(attempt, jitter)
    assert min(500 * 2 ** (attempt - 1), 30_000) <= delay <= 60_000
    assert retry_delay_ms(attempt + 1, jitter) >= delay


def test_a_step_stores_nothing_by_itself() -> None:
    """Pure: the same input gives the same result, and the input is unchanged."""
    records = DictRecords(
        {
            SUBSCRIBERS[0]: SubscriptionRecord(Status.SUBSCRIBED, 4),
            SUBSCRIBERS[1]: SubscriptionRecord(Status.SUBSCRIBED, 3),
        }
    )
    link = RemoteLink(Status.SUBSCRIBED, 4)
    before = dict(records)
    event = Notified(REMOTE_TOPICS[0], Status.UNSUBSCRIBED)
    results = [step(event, records, link, remote=True, now_ms=0, generation=1) for _ in range(2)]
    assert results[0] == results[1]
    assert dict(records) == before
    assert results[0].records == {SUBSCRIBERS[0]: None, SUBSCRIBERS[1]: None}
    assert [change.subscriber for change in results[0].changes] == SUBSCRIBERS[:2]


def test_a_transaction_that_the_disk_refuses_stores_nothing_and_says_so(tmp_path: Path) -> None:
    db = Database(tmp_path / "store.db", OWN)
    db.open()
    db.apply([Subscribe(LOCAL_TOPICS[0], SUBSCRIBERS[0], 4)], 0)
    (pages,) = db._file.connect().execute("PRAGMA page_count").fetchone()
    db._file.connect().execute(f"PRAGMA max_page_count={pages}")
    many = [Subscribe((OWN, number, 1, 0x8000), SUBSCRIBERS[0], 4) for number in range(2, 2001)]
    with pytest.raises(UStatusError, match="disk is full"):
        db.apply(many, 0)
    db._file.connect().execute("PRAGMA max_page_count=1000000")
    reader = db.reader()
    assert reader.count() == 1
    assert all(isinstance(one, Outcome) for one in db.apply(many, 0))
    assert reader.count() == 2000
    reader.close()
    db.close()
