"""The state machine of subscriptions, for versions 3 and 4. Pure.

Subscribe, Unsubscribe, expiry --> record (subscriber, topic) --want, unwant--> link (remote topic) --> Command to the
                                     ^   status that clients see                  |                     remote service
                                     +------------- LINK_... to every record -----+<-- its answer, its notifications,
                                                                                       a timeout

`step` takes the stored state of one topic and an event, and returns what to store and which changes to send. A record
is the subscription of one subscriber, a link is the subscription of this service at the topic's own service, and has a
table of transitions. A record of an own topic is SUBSCRIBED, one of a remote topic follows its link. Only links are
ever UNSUBSCRIBE_PENDING: a client's Unsubscribe takes effect at once, whatever the remote service answers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from uprotocol.core.usubscription.wire import Change as Change
from uprotocol.core.usubscription.wire import Row as Row
from uprotocol.core.usubscription.wire import Status as Status
from uprotocol.core.usubscription.wire import Subscribe as Subscribe
from uprotocol.core.usubscription.wire import Unsubscribe as Unsubscribe
from uprotocol.uri import Key as Key

# before the first repetition of a remote command: about the time of a restart of the peer
RETRY_FIRST_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000  # between repetitions: a vehicle that is back should not wait longer than a minute

U, SP, S, UP = Status.UNSUBSCRIBED, Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED, Status.UNSUBSCRIBE_PENDING


class Command(enum.IntEnum):
    """The command of a link that the remote service has not answered; the numbers are the method ids of both
    versions."""

    SUBSCRIBE = 1
    UNSUBSCRIBE = 2


class SubscriptionRecord(NamedTuple):
    """The subscription of one subscriber to one topic; never UNSUBSCRIBED."""

    status: Status
    major: int  # of the last request; notifications have the same version
    expires_ms: int | None = None  # Unix milliseconds; None: never
    sample_period_ms: int | None = None
    details: bytes = b""  # SubscribeAttributes.details of version 3, passed through
    bare: bool = False  # the topic in its request had no authority, and has none in its notifications


class RemoteLink(NamedTuple):
    """The subscription of this service to one remote topic; a stored link is never UNSUBSCRIBED."""

    state: Status = U
    major: int = 4
    command: Command | None = None  # not answered yet
    generation: int = 0  # of the command; answers to older ones are ignored
    attempt: int = 0  # timeouts of this command so far
    sample_period_ms: int | None = None  # of the last command


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfTopic:
    topic: Key


@dataclass(frozen=True)
class Expire(_OfTopic):
    """Check whether this record has expired."""

    subscriber: Key


@dataclass(frozen=True)
class Answered(_OfTopic):
    """The remote service answered the command of this generation; a refusal is UNSUBSCRIBED (A-45)."""

    generation: int
    status: Status


@dataclass(frozen=True)
class TimedOut(_OfTopic):
    """No answer in time, or an error that the remote service can't be reached."""

    generation: int


@dataclass(frozen=True)
class Notified(_OfTopic):
    """The remote service notified us of a change of our subscription."""

    status: Status


class Lost(_OfTopic):
    """The remote service no longer has a subscription that it had confirmed."""


@dataclass(frozen=True)
class Orphaned(_OfTopic):
    """The remote service has a subscription of ours that we don't have."""

    major: int


class Ended(_OfTopic):
    """The topic's own service has ended the link by a Reset; it needs no command."""


class Moved(_OfTopic):
    """The topic now belongs to this service, or no longer does: the authorities of the service have changed."""


TopicEvent = Subscribe | Unsubscribe | Expire | Answered | TimedOut | Notified | Lost | Orphaned | Ended | Moved


class TopicRecords(Protocol):
    """The records of one topic. They are looked up individually, since a topic may have a million."""

    def get(self, subscriber: Key, /) -> SubscriptionRecord | None: ...
    def has_others(self, subscriber: Key, /) -> bool: ...
    def items(self) -> Iterable[tuple[Key, SubscriptionRecord]]: ...


@dataclass(slots=True)
class StepResult:
    """The result of an event: to be stored in one transaction; the changes are sent afterwards."""

    link: RemoteLink
    records: dict[Key, SubscriptionRecord | None] = field(default_factory=dict)  # None: deleted
    changes: list[Change] = field(default_factory=list)
    answer: Status = U


# -- the table of links ------------------------------------------------------------------------------------------------


class LinkEvent(enum.Enum):
    WANT = enum.auto()  # a client subscribes
    WANT_MORE = enum.auto()  # a client wants a smaller sample period than that of the link
    UNWANT = enum.auto()  # the last client unsubscribed
    ANSWER_SUBSCRIBED = enum.auto()
    ANSWER_PENDING = enum.auto()
    ANSWER_UNSUBSCRIBED = enum.auto()
    TIMEOUT = enum.auto()
    NOTIFIED_SUBSCRIBED = enum.auto()
    NOTIFIED_PENDING = enum.auto()
    NOTIFIED_UNSUBSCRIBED = enum.auto()
    LOST = enum.auto()
    ORPHANED = enum.auto()


class Send(enum.Enum):
    """The effect of a transition on the link's command."""

    NOTHING = enum.auto()
    SUBSCRIBE = enum.auto()
    UNSUBSCRIBE = enum.auto()
    REPEAT = enum.auto()
    DONE = enum.auto()  # remove it


class LinkRule(NamedTuple):
    state: Status
    send: Send = Send.NOTHING
    records_follow: bool = False  # the records of the topic get this state, too


L = LinkEvent
LINK_TRANSITIONS: Final[Mapping[tuple[Status, LinkEvent], LinkRule]] = {
    (U, L.WANT): LinkRule(SP, Send.SUBSCRIBE),
    (U, L.ORPHANED): LinkRule(UP, Send.UNSUBSCRIBE),
    (SP, L.UNWANT): LinkRule(UP, Send.UNSUBSCRIBE),
    (SP, L.WANT_MORE): LinkRule(SP, Send.SUBSCRIBE),
    (SP, L.ANSWER_SUBSCRIBED): LinkRule(S, Send.DONE, True),
    (SP, L.ANSWER_PENDING): LinkRule(SP, Send.DONE),  # it has to ask another service: a notification follows
    (SP, L.ANSWER_UNSUBSCRIBED): LinkRule(U, Send.DONE, True),
    (SP, L.TIMEOUT): LinkRule(SP, Send.REPEAT),
    (SP, L.NOTIFIED_SUBSCRIBED): LinkRule(S, Send.DONE, True),
    (SP, L.NOTIFIED_UNSUBSCRIBED): LinkRule(U, Send.DONE, True),
    (SP, L.LOST): LinkRule(SP, Send.SUBSCRIBE),
    (S, L.UNWANT): LinkRule(UP, Send.UNSUBSCRIBE),
    (S, L.WANT_MORE): LinkRule(S, Send.SUBSCRIBE),  # messages continue meanwhile, so no record becomes pending
    (S, L.ANSWER_SUBSCRIBED): LinkRule(S, Send.DONE),
    (S, L.ANSWER_PENDING): LinkRule(SP, Send.DONE, True),
    (S, L.ANSWER_UNSUBSCRIBED): LinkRule(U, Send.DONE, True),
    (S, L.TIMEOUT): LinkRule(S, Send.REPEAT),
    (S, L.NOTIFIED_PENDING): LinkRule(SP, Send.DONE, True),
    (S, L.NOTIFIED_UNSUBSCRIBED): LinkRule(U, Send.DONE, True),
    (S, L.LOST): LinkRule(SP, Send.SUBSCRIBE, True),
    (UP, L.WANT): LinkRule(SP, Send.SUBSCRIBE),
    (UP, L.ANSWER_SUBSCRIBED): LinkRule(U, Send.DONE),  # any answer ends it
    (UP, L.ANSWER_PENDING): LinkRule(U, Send.DONE),
    (UP, L.ANSWER_UNSUBSCRIBED): LinkRule(U, Send.DONE),
    (UP, L.TIMEOUT): LinkRule(UP, Send.REPEAT),
}
LINK_IGNORES: Final = frozenset(
    {
        *((U, event) for event in LinkEvent if event not in (L.WANT, L.ORPHANED)),  # there is no link
        *((state, L.WANT) for state in (SP, S)),
        *((state, L.ORPHANED) for state in (SP, S, UP)),
        *((UP, event) for event in (L.WANT_MORE, L.UNWANT, L.LOST)),
        *((UP, event) for event in (L.NOTIFIED_SUBSCRIBED, L.NOTIFIED_PENDING, L.NOTIFIED_UNSUBSCRIBED)),
        (SP, L.NOTIFIED_PENDING),
        (S, L.NOTIFIED_SUBSCRIBED),
    }
)
"""These pairs change nothing. Together with LINK_TRANSITIONS they are all pairs (test_us_stateful)."""

_ANSWERS: Final = {S: L.ANSWER_SUBSCRIBED, SP: L.ANSWER_PENDING, U: L.ANSWER_UNSUBSCRIBED, UP: L.ANSWER_UNSUBSCRIBED}
_NOTIFICATIONS: Final = {
    S: L.NOTIFIED_SUBSCRIBED,
    SP: L.NOTIFIED_PENDING,
    U: L.NOTIFIED_UNSUBSCRIBED,
    UP: L.NOTIFIED_UNSUBSCRIBED,
}


# -- the machine -------------------------------------------------------------------------------------------------------


def step(
    event: TopicEvent, records: TopicRecords, link: RemoteLink, *, remote: bool, now_ms: int, generation: int
) -> StepResult:
    """Apply `event` to its topic. `generation`: for a new command, a number that was never used before."""
    machine = _Machine(event.topic, records, StepResult(link), remote, now_ms, generation)
    match event:
        case Subscribe():
            machine.subscribe(event)
        case Unsubscribe():
            # in version 4 the answer is enough (C-16)
            machine.remove(event.subscriber, notify_subscriber=event.major == 3)
        case Expire():
            known = records.get(event.subscriber)
            if known is not None and is_past(known.expires_ms, now_ms):
                machine.remove(event.subscriber)
        case Answered() | TimedOut() if link.command is not None and event.generation == link.generation:
            machine.move(_ANSWERS[event.status] if isinstance(event, Answered) else L.TIMEOUT)
        # while a command is not answered, its answer decides: this may be older than the command
        case Notified() | Lost() if link.command is None:
            machine.move(_NOTIFICATIONS[event.status] if isinstance(event, Notified) else L.LOST)
        case Moved():
            machine.change_service()
        case Ended():
            machine.step.link = RemoteLink()
            machine.update_all(U)
        case Orphaned() if link.state is U:
            machine.step.link = link._replace(major=event.major)
            machine.move(L.ORPHANED)
    return machine.step


def is_past(expires_ms: int | None, now_ms: int) -> bool:
    """False in the millisecond of the expiry itself: the subscription is still valid then."""
    return expires_ms is not None and expires_ms < now_ms


def retry_delay_ms(attempt: int, random: float) -> int:
    """The wait before try `attempt` + 1 (1, 2, ...) of a remote command; `random` of [0, 1) spreads it over the upper
    half."""
    delay = min(RETRY_FIRST_MS << min(attempt - 1, 16), RETRY_MAX_MS)
    return int(delay * (0.5 + random / 2))


@dataclass(slots=True)
class _Machine:
    topic: Key
    records: TopicRecords
    step: StepResult
    remote: bool
    now_ms: int
    generation: int

    def subscribe(self, event: Subscribe) -> None:
        known = self.records.get(event.subscriber)
        # the last request counts in every version: docs/adr/usubscription.md
        expires_ms = event.expires_ms
        if is_past(expires_ms, self.now_ms):
            self.remove(event.subscriber)
            return
        status = S
        if self.remote:
            self._want(event)
            status = S if self.step.link.state is S else SP
        record = SubscriptionRecord(
            status, event.major, expires_ms, event.sample_period_ms or None, event.details, event.bare
        )
        self.step.answer = status
        if record != known:
            self.step.records[event.subscriber] = record
        visible = (status, expires_ms, record.sample_period_ms)
        if known is None or (known.status, known.expires_ms, known.sample_period_ms) != visible:
            self._add_change(event.subscriber, record, status_changed=known is None or known.status is not status)

    def _want(self, event: Subscribe) -> None:
        """Subscribe at the remote service if there is no link, or if this client wants a smaller sample period; the
        latter makes no record pending (C-32)."""
        period = event.sample_period_ms or None
        link = self.step.link
        if link.state in (U, UP):
            self.step.link = link._replace(major=event.major, sample_period_ms=period)
            self.move(L.WANT)
        elif link.sample_period_ms is not None and (period is None or period < link.sample_period_ms):
            self.step.link = link._replace(sample_period_ms=period)
            self.move(L.WANT_MORE)

    def remove(self, subscriber: Key, *, notify_subscriber: bool = True) -> None:
        known = self.records.get(subscriber)
        if known is None:
            return
        self.step.records[subscriber] = None
        self._add_change(subscriber, known._replace(status=U), notify_subscriber=notify_subscriber)
        if self.remote and not self.records.has_others(subscriber):
            self.move(L.UNWANT)

    def change_service(self) -> None:
        """If the topic is ours now, pending records are confirmed; if not, the topic's own service has to be asked."""
        link = self.step.link
        if not self.remote:
            if link.state is SP:
                self.step.link = link._replace(command=None)
                self.move(L.NOTIFIED_SUBSCRIBED)
            self.step.link = RemoteLink()
        elif link.state is U and any(True for _ in self.records.items()):
            self.step.link = link._replace(state=S)
            self.move(L.LOST)

    def move(self, event: LinkEvent) -> None:
        link = self.step.link
        rule = LINK_TRANSITIONS.get((link.state, event))
        if rule is None:
            assert (link.state, event) in LINK_IGNORES, f"no rule for {event} in {link.state!r}"
            return
        link = link._replace(state=rule.state)
        match rule.send:
            case Send.SUBSCRIBE | Send.UNSUBSCRIBE:
                link = link._replace(command=Command[rule.send.name], generation=self.generation, attempt=0)
            case Send.REPEAT:
                link = link._replace(attempt=link.attempt + 1)
            case Send.DONE:
                link = link._replace(command=None, attempt=0)
        self.step.link = link
        if rule.records_follow:
            self.update_all(rule.state)

    def update_all(self, status: Status) -> None:
        """Apply a change of the link to every record."""
        for subscriber, record in self.records.items():
            if status is not record.status:
                changed = record._replace(status=status)
                self.step.records[subscriber] = None if status is U else changed
                self._add_change(subscriber, changed)

    def _add_change(
        self,
        subscriber: Key,
        record: SubscriptionRecord,
        *,
        notify_subscriber: bool = True,
        status_changed: bool = True,
    ) -> None:
        notify = notify_subscriber and (status_changed or record.major >= 4)
        change = Change(self.topic, subscriber, record.status, record.major, *record[2:], notify, status_changed)
        self.step.changes.append(change)
