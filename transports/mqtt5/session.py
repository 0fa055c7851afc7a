"""The topic filters of our session at the broker: those that we want, and those that the broker has.

use -> asked -> granted: known                                                              release -> unsubscribed
             -> refused: a trouble of this filter; asked for again after REFUSED_MS, and on each new connection
             -> the connection is lost: asked for alone on the next one -> granted, refused, or lost again:
                a trouble; asked for again, alone, after HANG_UP_MS

Some brokers end the connection over a SUBSCRIBE (RabbitMQ: one that a rule forbids; others: one too many). With several
unanswered, it is unknown over which. So all filters without answer are asked for one by one, and the endpoint works
without the one over which the connection is lost again.

A session outlives its process: filters of an earlier process that nobody wants are unsubscribed (`leave_stale`).

If several of our filters match a message, it comes once or once for each of them: the broker chooses (MQTT 5 section
3.3.4). Brokers fill subscription identifiers differently, so we ask for none and look at the messages (Copies): on a
topic that two filters match, the first message with a source and id is taken, and later ones on the same connection are
copies. On another connection it may be the first one, sent again because it was not acknowledged.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import structlog

from transports.mqtt5.link import Link
from transports.mqtt5.reasons import RefusedError
from uprotocol.cache import Cache
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

SUBSCRIBES_MAX: Final = 256  # unanswered at once: some brokers hang up on more
# until a refused filter is asked for again: first and longest wait, doubled each time
REFUSED_MS: Final = (10_000, 300_000)
# the same for a filter over which the connection was lost, since it may be lost again
HANG_UP_MS: Final = (60_000, 1_800_000)
# after a filter that was asked for alone has cost the connection, until the next one is asked for alone: first and
# longest wait. A few of them cost hardly any time; with many, the connection would be lost most of the time
RECONNECT_PAUSE_MS: Final = (10, 60_000)
REFUSED_NAMED_MAX: Final = 8  # refused filters that are named; the others are counted
# topics of messages that nobody wanted; a filter of the same name is unsubscribed once for each
UNWANTED_TOPICS_MAX: Final = 4_096
# how long `release` waits for the broker's answer, which limits the unanswered UNSUBSCRIBEs
DISCONNECT_MS_MAX: Final = 500
# sources and ids of messages on topics that two filters match, some 200 bytes each. A broker with a queue for each
# subscription (ActiveMQ Artemis) may send the copy so many messages later
COPIES_MAX: Final = 32_768
# unsubscribed filters: the broker may still send what it had queued for them
LEFT_MAX: Final = 1_024
# the same, after the last filter of an earlier process was unsubscribed
LEFT_S: Final = 30.0

NO_WILDCARDS: Final = (
    "the broker has no subscriptions with wildcards (its CONNACK says Wildcard Subscription Available: 0)"
)

TopicShape = tuple[int, tuple[int, ...]]
"""Of a topic filter: its number of segments, and which of them are `+`."""
Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

_LOST: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the connection to the broker is lost: try again when it is back"
)

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class TopicSubscription:
    topic_filter: str
    # the broker's first answer; None if there was no connection to ask on
    granted: asyncio.Future[None] | None = None
    known: bool = False  # the broker has it
    is_lossy: bool = False  # it grants QoS 0
    users: int = 1  # uProtocol filters that need it; 0: its UNSUBSCRIBE is not answered yet
    refusal: UStatusError | None = None  # why the broker does not have it
    refusals: int = 0  # in a row
    hang_ups: int = 0  # connections that were lost while it had no answer, in a row
    ask_at_s: float = 0.0  # loop time; it is not asked for again before


def topic_matches(topic_filter: str, topic: str) -> bool:
    """`+` matches one segment; our mapping uses no other wildcard."""
    wanted, given = topic_filter.split("/"), topic.split("/")
    return len(wanted) == len(given) and all(one in ("+", two) for one, two in zip(wanted, given, strict=True))


def _shape(topic_filter: str) -> TopicShape:
    segments = topic_filter.split("/")
    return len(segments), tuple(index for index, segment in enumerate(segments) if segment == "+")


class Subscriptions(dict[str, TopicSubscription]):
    """By topic filter, in the order in which they were added. Matching a topic costs one look-up for each shape in use,
    however many filters there are."""

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        """`changed(topic_filter)`: it was added or removed."""
        super().__init__()
        self._changed = changed
        self._shapes: Counter[TopicShape] = Counter()

    def add(self, topic_filter: str) -> TopicSubscription:
        assert topic_filter not in self, f"{topic_filter} is subscribed to already"
        made = self[topic_filter] = TopicSubscription(topic_filter)
        self._shapes[_shape(topic_filter)] += 1
        self._changed(topic_filter)
        return made

    def remove(self, subscription: TopicSubscription) -> None:
        """May be called again."""
        if self.get(subscription.topic_filter) is subscription:
            del self[subscription.topic_filter]
            shape = _shape(subscription.topic_filter)
            self._shapes[shape] -= 1
            if not self._shapes[shape]:
                del self._shapes[shape]
            self._changed(subscription.topic_filter)

    def matches(self, topic: str) -> int:
        segments, found = topic.split("/"), 0
        for length, wildcards in self._shapes:
            if length == len(segments):
                masked = segments.copy()
                for index in wildcards:
                    masked[index] = "+"
                found += "/".join(masked) in self
        return found


class Copies(Cache[str, int]):
    """By topic, how often one message may come: 0 if no filter of ours matches it; 1; or 2, for more often.

    More often: on topics that more than one filter of ours matches or matched; on all topics while the session may have
    filters of an earlier process, which may match anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.subscriptions = Subscriptions(self._changed)
        self._left = Subscriptions(self._forget)  # unsubscribed filters
        self._taken: dict[bytes, None] = {}  # id and source, in the order in which they came
        self._of_all, self._of_all_until_s = False, 0.0

    def __missing__(self, topic: str) -> int:
        matches = self.subscriptions.matches(topic)
        times = 2 if matches and (self._of_all or matches + self._left.matches(topic) > 1) else matches
        self[topic] = times
        return times

    def _changed(self, topic_filter: str) -> None:
        """It was subscribed or unsubscribed."""
        if topic_filter not in self.subscriptions and topic_filter not in self._left:
            self._left.add(topic_filter)
            if len(self._left) > LEFT_MAX:
                self._left.remove(next(iter(self._left.values())))
        self._forget(topic_filter)

    def _forget(self, topic_filter: str) -> None:
        """Forget the topics that it matches."""
        if "+" in topic_filter:
            self.clear()
        else:
            self.pop(topic_filter, None)

    def new_connection(self, *, is_present: bool) -> None:
        """Messages that were taken may come again. `is_present`: the broker still has our session, and what it had
        queued for unsubscribed filters."""
        self._taken.clear()
        if not is_present:
            self._left = Subscriptions(self._forget)
            self.clear()

    def has_unknown_filters(self, now_s: float) -> None:
        """The session may have filters of an earlier process now."""
        if not self._of_all:
            self.clear()
        self._of_all, self._of_all_until_s = True, now_s + LEFT_S

    def tick(self, now_s: float) -> None:
        if self._of_all and now_s >= self._of_all_until_s:
            self._of_all = False
            self.clear()

    def is_copy(self, encoded: bytes) -> bool:
        """Returns True if a message with these UAttributes (`encoded`) was taken before, and notes that it is now."""
        attributes = UAttributes.FromString(encoded)
        key = attributes.id.SerializeToString() + attributes.source.SerializeToString()
        if key in self._taken:
            return True
        self._taken[key] = None
        if len(self._taken) > COPIES_MAX:
            del self._taken[next(iter(self._taken))]
        return False


class Session:
    """Lives on the event loop. `start` runs a coroutine until the transport is closed."""

    def __init__(self, link: Link, start: Start) -> None:
        self.copies = Copies()
        self.subscriptions = self.copies.subscriptions
        self._link, self._start = link, start
        self._has: dict[str, None] = {}  # filters that the broker may have for us, in the order of the SUBSCRIBEs
        self._refused: dict[str, TopicSubscription] = {}
        self._suspects: dict[str, TopicSubscription] = {}  # unanswered when a connection was lost
        self._asking: set[asyncio.Future[None]] = set()
        self._alone: asyncio.Task[bool] | None = None  # asks for one while nothing else is asked for
        self._trying: asyncio.Task[None] | None = None  # asks for suspects, one by one
        self._pause, self._paused_until_s = Backoff(*RECONNECT_PAUSE_MS), 0.0
        self._unwanted: set[str] = set()
        self._leaving_stale: asyncio.Task[None] | None = None
        self._stale_pause, self._stale_at_s = Backoff(*HANG_UP_MS), 0.0
        self._has_stale = False  # the broker may have filters for us that nobody wants ...
        self._has_unknown = False  # ... of an earlier process, too
        self._was_welcomed = False
        self._is_up = self._may_try = False
        self._wildcards = True  # the broker supports them, as far as it says
        self._has_lossy = False  # it has granted QoS 0 for some filters
        self._hangs = False  # it has not answered an UNSUBSCRIBE in time
        self._lost = _LOST  # how the connection was last lost over a SUBSCRIBE

    def __repr__(self) -> str:
        return (
            f"Session(subscriptions={len(self.subscriptions)}, refused={len(self._refused)}, "
            f"suspects={len(self._suspects)})"
        )

    @property
    def listens(self) -> bool:
        """The broker has a subscription of ours."""
        return any(one.known for one in self.subscriptions.values())

    @property
    def filters(self) -> tuple[str, ...]:
        """Topic filters that the broker's session may have."""
        return tuple(self._has)

    @property
    def troubles(self) -> list[str]:
        lines = [
            f"nothing that matches the topic filter {topic_filter} arrives: {one.refusal}"
            for topic_filter, one in islice(self._refused.items(), REFUSED_NAMED_MAX)
        ]
        if len(self._refused) > REFUSED_NAMED_MAX:
            lines.append(f"and the same of {len(self._refused) - REFUSED_NAMED_MAX} more topic filters")
        lossy = [one.topic_filter for one in self.subscriptions.values() if one.is_lossy] if self._has_lossy else []
        if lossy:
            what = f"the broker grants QoS 0 only to {len(lossy)} of our subscriptions ({lossy[0]}, ...)"
            lines.append(f"{what}: what matches them may be lost on the way, and while we are away. Let it grant QoS 1")
        return lines

    # Events of the connection, reported by the transport.

    def restore(self, filters: Iterable[str]) -> None:
        """The session has these filters of an earlier process, if the broker resumes it."""
        self._has = dict.fromkeys(filters)

    def welcomed(self, *, is_present: bool) -> None:
        """The broker has accepted the login. A session that is present may be older than our last one: a broker that
        was killed restores an older state."""
        self._has_unknown = is_present and (self._has_unknown or not self._was_welcomed)
        self._was_welcomed = True
        self.copies.new_connection(is_present=is_present)
        if self._has_unknown:  # until unwanted filters have been unsubscribed
            self.copies.has_unknown_filters(asyncio.get_running_loop().time())
        for subscription in self.subscriptions.values():
            subscription.known = False
        if not is_present:
            self._has.clear()

    async def ask_for_all(self, *, wildcards: bool) -> int:
        """On a new connection, ask for all filters that are wanted and not suspect; returns how many. `wildcards`: the
        broker supports them. Raises UNAVAILABLE if the connection is lost meanwhile."""
        self._wildcards, self._has_lossy = wildcards, False
        tried: set[int] = set()
        while missing := [
            one
            for one in self.subscriptions.values()
            if not one.known and one.users and not one.hang_ups and id(one) not in tried
        ]:
            for start in range(0, len(missing), SUBSCRIBES_MAX):
                some = missing[start : start + SUBSCRIBES_MAX]
                tried.update(map(id, some))
                if not all(await asyncio.gather(*map(self._ask, some))):
                    raise UStatusError.from_status(self._lost)
        return len(tried)

    def up(self) -> None:
        self._is_up = True

    def down(self) -> None:
        self._is_up = self._may_try = False

    def try_suspects(self) -> None:
        """Suspects may be asked for from now on: nothing else is unanswered."""
        self._may_try = self._is_up
        self.tick(asyncio.get_running_loop().time())

    def leave_stale(self) -> None:
        """All listeners had time to register: unsubscribe filters that the broker has and nobody wants."""
        self._has_stale = True
        self.tick(asyncio.get_running_loop().time())

    def unwanted(self, topic: str) -> None:
        """A message arrived though nobody listens to its topic: the broker has a filter that we don't know. If it is
        the topic itself, it can be unsubscribed; one with wildcards can't be guessed."""
        if len(self._unwanted) < UNWANTED_TOPICS_MAX and topic not in self._unwanted:
            self._unwanted.add(topic)
            self._has[topic] = None
            self._has_stale = self._has_unknown = True

    async def close(self) -> None:
        """The connection is closed: wait until nothing is unanswered."""
        await asyncio.gather(*self._asking, return_exceptions=True)

    def tick(self, now_s: float) -> None:
        """Called once a second: ask again for what is due."""
        if self._has_unknown:
            self.copies.has_unknown_filters(now_s)
        self.copies.tick(now_s)
        if not self._is_up:
            return
        due = (one for one in self._refused.values() if not one.hang_ups and one.ask_at_s <= now_s)
        for one in list(islice(due, SUBSCRIBES_MAX)):
            one.ask_at_s = math.inf  # while it has no answer
            self._in_company(one)
        if self._may_try and _is_over(self._trying) and self._next_suspect() is not None:
            self._trying = self._start(self._try_one_by_one())
        if self._has_stale and now_s >= self._stale_at_s and _is_over(self._leaving_stale):
            self._leaving_stale = self._start(self._leave_stale())

    # Filters of listeners.

    def use(self, topic_filter: str) -> None:
        """A listener needs it."""
        subscription = self.subscriptions.get(topic_filter)
        if subscription is not None and subscription.users:
            subscription.users += 1
            return
        if subscription is not None:  # it is being unsubscribed
            self.subscriptions.remove(subscription)
        subscription = self.subscriptions.add(topic_filter)
        if self._is_up:
            subscription.granted = self._in_company(subscription, is_new=True)

    def answer_of(self, topic_filter: str) -> asyncio.Future[None] | None:
        """The broker's answer for a filter in use; a refused one is asked for again, unless that may cost the
        connection. None: there was no connection to ask on."""
        subscription = self.subscriptions[topic_filter]
        if self._is_up and subscription.refusal is not None and not subscription.hang_ups:
            subscription.granted = self._in_company(subscription, is_new=True)
        return subscription.granted

    async def release(self, topic_filter: str) -> None:
        """A listener needs it no longer; without any, it is unsubscribed. If the broker hangs, only the first call
        waits for it: the listener is not called any more in any case."""
        subscription = self.subscriptions[topic_filter]
        subscription.users -= 1
        if subscription.users:
            return
        self._clear(subscription)
        if topic_filter not in self._has:
            self.subscriptions.remove(subscription)
            return
        leaving = self._start(self._leave(subscription))
        if not self._hangs:
            self._hangs = not (await asyncio.wait({leaving}, timeout=DISCONNECT_MS_MAX / 1000))[0]

    async def _leave(self, subscription: TopicSubscription) -> None:
        topic_filter = subscription.topic_filter
        try:
            if self._is_up:
                await self._link.unsubscribe(topic_filter)
                if self.subscriptions.get(topic_filter) is subscription:  # else it is in use again
                    self._has.pop(topic_filter, None)
        except UStatusError as error:  # it is unsubscribed on the next connection
            log.debug("not unsubscribed yet", topic_filter=topic_filter, error=str(error))
        finally:
            self._hangs = False
            self.subscriptions.remove(subscription)

    async def _leave_stale(self) -> None:
        stale = [topic_filter for topic_filter in self._has if topic_filter not in self.subscriptions]
        for start in range(0, len(stale), SUBSCRIBES_MAX):
            some = stale[start : start + SUBSCRIBES_MAX]
            if not all(await asyncio.gather(*map(self._leave_one, some))):  # lost, perhaps over this
                self._stale_at_s = asyncio.get_running_loop().time() + self._stale_pause.next_ms() / 1000
                return
        self._has_stale = self._has_unknown = False
        self._stale_pause.reset()
        if stale:
            log.info(
                "unsubscribed filters that nobody wants any more", broker=self._link.address, topic_filters=len(stale)
            )

    async def _leave_one(self, topic_filter: str) -> bool:
        """Returns False if the connection is lost."""
        if not self._is_up:
            return False
        if topic_filter in self.subscriptions:  # in use meanwhile
            return True
        try:
            await self._link.unsubscribe(topic_filter)
        except RefusedError as error:  # it stays noted, and is unsubscribed on the next connection
            log.warning("the broker does not unsubscribe", topic_filter=topic_filter, error=str(error))
            return True
        except UStatusError:
            return False
        if topic_filter not in self.subscriptions:
            self._has.pop(topic_filter, None)
        return True

    # Asking the broker.

    def _in_company(self, subscription: TopicSubscription, *, is_new: bool = False) -> asyncio.Future[None]:
        """Ask for it while others are unanswered, too. `is_new`: the future raises a refusal for good."""
        asking = asyncio.ensure_future(self._ask_in_company(subscription, is_new))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
        return asking

    async def _ask_in_company(self, subscription: TopicSubscription, is_new: bool) -> None:
        while self._alone is not None:
            await asyncio.wait({self._alone})
        if not self._is_up or not subscription.users:
            return  # it is asked for on the next connection
        await self._ask(subscription)
        refusal = subscription.refusal
        if is_new and refusal is not None and not refusal.retryable:
            raise refusal

    async def _try_one_by_one(self) -> None:
        while self._may_try and self._can_ask and (one := self._next_suspect()) is not None:
            if self._asking:
                await asyncio.wait(self._asking)
                continue
            self._alone = asyncio.ensure_future(self._ask(one, alone=True))
            try:
                is_answered = await self._alone
            finally:
                self._alone = None
            if not is_answered:
                self._paused_until_s = asyncio.get_running_loop().time() + self._pause.next_ms() / 1000
                return
        if not any(one.refusal is None for one in self._suspects.values()):
            self._pause.reset()

    def _next_suspect(self) -> TopicSubscription | None:
        """The next one to be asked for alone; None if none is due."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._paused_until_s:
            return None
        return next((one for one in self._suspects.values() if one.ask_at_s <= now_s), None)

    @property
    def _can_ask(self) -> bool:
        """The connection is up. Turns False at once when it is lost; `down` is called a moment later."""
        connection = self._link.connection
        return connection is not None and connection.up

    async def _ask(self, one: TopicSubscription, *, alone: bool = False) -> bool:
        """Returns False if the connection is lost before the answer. Raises nothing: the answer is noted."""
        if not self._can_ask:
            return False
        had = one.topic_filter in self._has
        self._has[one.topic_filter] = None
        try:
            if "+" in one.topic_filter and not self._wildcards:
                raise RefusedError(UCode.UNIMPLEMENTED, f"{NO_WILDCARDS}: {one.topic_filter} can't be subscribed to")
            one.is_lossy = await self._link.subscribe(one.topic_filter) < 1
        except RefusedError as error:
            if not had:
                self._has.pop(one.topic_filter, None)
            one.hang_ups = 0
            self._suspects.pop(one.topic_filter, None)
            self._refuse(one, error, *REFUSED_MS)
        except UStatusError as error:
            self._suspect(one, error, alone)
            return False
        else:
            if one.refusal is not None:
                log.info("the broker grants a subscription that it had refused", topic_filter=one.topic_filter)
            self._clear(one)
            if one.is_lossy:
                self._has_lossy = True
                log.warning("the broker grants a subscription QoS 0 only", topic_filter=one.topic_filter)
            self._has[one.topic_filter] = None  # the answer to an UNSUBSCRIBE of it may have come meanwhile
            one.known = True
        return True

    def _suspect(self, one: TopicSubscription, lost: UStatusError, alone: bool) -> None:
        self._lost = lost.status
        if not one.users:
            return
        if alone or not one.hang_ups:
            one.hang_ups += 1
        self._suspects.pop(one.topic_filter, None)  # to the end: the others are tried first
        self._suspects[one.topic_filter] = one
        if alone:
            why = f"the connection was lost {one.hang_ups} times while the broker was asked for it ({lost.message})"
            what = f"{why}: does a rule or a limit of the broker forbid it?"
            self._refuse(one, UStatusError(UCode.UNAVAILABLE, what), *HANG_UP_MS)

    def _refuse(self, one: TopicSubscription, why: UStatusError, first_ms: int, last_ms: int) -> None:
        if not one.users:
            return
        if one.refusal is None or one.refusal.code != why.code:
            log.error("the broker refuses a subscription", topic_filter=one.topic_filter, error=str(why))
        wait_ms = min(first_ms << min(one.refusals, 30), last_ms)
        one.refusal, one.refusals = why, one.refusals + 1
        one.ask_at_s = asyncio.get_running_loop().time() + wait_ms / 1000
        self._refused[one.topic_filter] = one

    def _clear(self, one: TopicSubscription) -> None:
        """It is granted, or no longer in use."""
        one.refusal, one.refusals, one.hang_ups, one.ask_at_s = None, 0, 0, 0.0
        for kept in (self._refused, self._suspects):
            if kept.get(one.topic_filter) is one:
                del kept[one.topic_filter]


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()
