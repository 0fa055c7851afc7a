"""Counts the messages of each source authority, and enforces its quota during overload.

ingress, per message: account.messages, .bytes; quota.left -= its units --below 0--> AuthorityLedger.is_over: overload?
Pressure: share of time in which the loop's thread runs or waits for a processor -------------------------------^ |
                   dropped "over_quota"; the transport may refuse further ones until the next turn <--------------'
run: per turn, a slice of the accounts -> rates -> top() for metrics, the admin port, `up-streamer vehicles`

The account is looked up once per route, not per message. An authority that the configuration names has no quota. One
that only a pattern matches (a vehicle of a fleet) has two of its own, so that its flood does not harm the others:

passing  for what can't wait (requests, responses, volatile topics) and what nobody wants: BURST_S of it at once
kept     for what the durable log keeps: BACKLOG_S of it at once, since a vehicle that was away, or whose messages the
         broker has kept while we were away, brings a backlog that its network has acknowledged
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import structlog

from streamer.reporting import Sample
from uprotocol import callbacks
from uprotocol.callbacks import Remove

MESSAGE_UNIT_BYTES: Final = 1_024  # a message counts one unit, and one more for each KiB of its payload
UNITS_PER_S: Final = 5_000  # per authority: far more than a vehicle's telemetry, an eighth of what one core forwards
BURST_S: Final = 2.0  # of the quota may arrive at once, of what can't wait
# of the quota may arrive at once, of what the durable log keeps: 500,000 small messages, more than a broker with the
# settings of our examples keeps of one vehicle
BACKLOG_S: Final = 100.0
UNLIMITED: Final = 1 << 62
TURN_S: Final = 0.25  # length of a turn; short enough to detect a flood before people notice it
SLICES: Final = 40  # turns in which each account is sampled once: ten seconds
BUSY_SHARE_MAX: Final = 0.8  # busy share of the thread's time; above it messages queue
RELAXED_S: Final = 5.0  # overload lasts at least this long: dropping a flood makes the thread idle at once
TOP: Final = 20  # authorities that metrics list by name
REPORTED_S: Final = 60.0  # between two log lines about one authority
OTHER_ACCOUNTS: Final = "others"

log = structlog.get_logger()


def units_of(payload_bytes: int) -> int:
    """Returns the units of a message with this payload."""
    return 1 + payload_bytes // MESSAGE_UNIT_BYTES


@dataclass(slots=True, eq=False)
class AuthorityQuota:
    """What an authority may send, in units; `ingress` takes from `left`."""

    burst_s: float  # so many seconds of it may arrive at once
    left: int  # units that may come now
    refilled: float  # loop time
    held_until: float = 0.0  # loop time; until then it applies even without overload


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """Counters and quotas of one authority; `ingress` updates them."""

    authority: str
    endpoint: str
    passing: AuthorityQuota  # for what can't wait, and what nobody wants
    kept: AuthorityQuota  # for what the durable log keeps
    is_limited: bool
    created: float  # loop time
    messages: int = 0
    bytes: int = 0
    dropped: int = 0
    rate: float = 0.0  # messages per second, at the last sample
    sampled: tuple[int, float] = (0, 0.0)  # messages and loop time of the last sample
    settled: tuple[int, int, int] = (0, 0, 0)  # messages, bytes, dropped: its part in `AuthorityLedger.others`
    reported_at: float = 0.0  # loop time
    seen_ms: int = 0  # Unix milliseconds; in steps of ten seconds

    def __post_init__(self) -> None:
        self.reported_at, self.sampled = self.created, (0, self.created)

    def __repr__(self) -> str:
        counts = f"messages={self.messages}, dropped={self.dropped}, rate={self.rate:.0f}/s"
        return f"Account({self.authority} on {self.endpoint}, {counts})"

    @property
    def own(self) -> tuple[int, int, int]:
        """Returns messages, bytes, dropped: those that metrics show under its name and not in `others`."""
        messages, size, dropped = self.settled
        return self.messages - messages, self.bytes - size, self.dropped - dropped

    def as_dict(self, topics: int = 0) -> dict[str, Any]:
        return {
            "authority": self.authority,
            "endpoint": self.endpoint,
            "messages": self.messages,
            "bytes": self.bytes,
            "dropped": self.dropped,
            "per_s": round(self.rate, 1),
            "topics": topics,
            "seen_ms": self.seen_ms,
        }


_by_rate: Final = attrgetter("rate", "messages")


class Pressure:
    """Detects overload of the loop's thread."""

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self._last: tuple[float, float] | None = None
        self._until = 0.0
        self.share = 0.0  # 0 to 1: recent part of its time in which it ran or waited for a processor

    def look(self, now: float) -> None:
        """Measures the load. `now`: loop time in seconds."""
        busy = self._busy_s()
        if self._last is not None and now > self._last[1]:
            self.share = (busy - self._last[0]) / (now - self._last[1])
            if self.share >= BUSY_SHARE_MAX:
                self._until = now + RELAXED_S
        self._last = (busy, now)

    def is_on(self, now: float) -> bool:
        return now < self._until


class AuthorityLedger:
    """At most `accounts_max` accounts. If full, the longest silent are removed; their counts go to `others`.
    `on_new(authority, endpoint)` is called with each new one.

    Its state: the accounts, with what removed ones have counted (`others`), and a turn over all of them in slices,
    which finds those with the highest rates: `_snapshot`, `_next`, `_rising`, and its result `top`.
    """

    def __init__(
        self,
        accounts_max: int,
        units_per_s: int,
        *,
        is_named: Callable[[str, str], bool],
        now: Callable[[], float],
        now_ms: Callable[[], int],
        pressure: Pressure,
    ) -> None:
        """`is_named(authority, endpoint)`: the endpoint names it, not only a pattern. `now`: loop time in seconds."""
        assert accounts_max > 1, "an account makes room for another one"
        self._accounts_max, self._is_named = accounts_max, is_named
        self._now, self._now_ms = now, now_ms
        self.units_per_s = units_per_s  # that an authority may send which only a pattern names
        self._accounts: dict[tuple[str, str], Account] = {}  # per endpoint: a false name uses no foreign quota
        self.pressure = pressure
        self._next = 0  # start of the next slice
        self._snapshot: list[Account] = []
        self.top: list[Account] = []  # highest rates some seconds ago; if equal, most messages
        self._rising: list[Account] = []  # highest rates in the slices so far
        self.others = self._new_account(OTHER_ACCOUNTS, "", False, 0.0)  # of all accounts outside `top`; never falls
        self.on_new: Callable[[str, str], None] = lambda authority, endpoint: None
        self._evicted_callbacks: list[Callable[[], None]] = []
        self._turn_callbacks: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def on_evicted(self, callback: Callable[[], None]) -> Remove:
        """Calls `callback()` after accounts were removed: holders must look them up again. Returns a function that
        removes the callback."""
        return callbacks.add(self._evicted_callbacks, callback)

    def on_turn(self, callback: Callable[[], None]) -> Remove:
        """Calls `callback()` at each turn: refused authorities may send again then. Returns a function that removes the
        callback."""
        return callbacks.add(self._turn_callbacks, callback)

    def remove_endpoint(self, endpoint: str) -> None:
        """Removes the accounts of its authorities; their counts go to `others`."""
        self._remove([account for account in self if account.endpoint == endpoint])

    def account(self, authority: str, endpoint: str) -> Account:
        found = self._accounts.get((authority, endpoint))
        if found is None:
            if len(self._accounts) >= self._accounts_max:
                self._evict()
            is_limited = not self._is_named(authority, endpoint)
            found = self._new_account(authority, endpoint, is_limited, self._now())
            found.seen_ms = self._now_ms()
            self._accounts[authority, endpoint] = found
            self.on_new(authority, endpoint)
            if len(self.top) < TOP:
                self.top.append(found)  # a small fleet has metrics by name from the first message
        return found

    def _new_account(self, authority: str, endpoint: str, is_limited: bool, now: float) -> Account:
        passing, kept = (
            AuthorityQuota(burst_s, int(self.units_per_s * burst_s) if is_limited else UNLIMITED, now)
            for burst_s in (BURST_S, BACKLOG_S)
        )
        return Account(authority, endpoint, passing, kept, is_limited, now)

    def _evict(self) -> None:
        """Removes a tenth of the accounts at a time, so that the cost per account is small."""
        self._remove(heapq.nsmallest(max(1, self._accounts_max // 10), self, key=lambda account: account.seen_ms))

    def _remove(self, leaving: list[Account]) -> None:
        if not leaving:
            return
        for one in leaving:
            del self._accounts[one.authority, one.endpoint]
        self._snapshot, self._next, self._rising = [], 0, []
        self._show([one for one in self.top if (one.authority, one.endpoint) in self._accounts])
        for one in leaving:
            self._settle(one)
        for callback in self._evicted_callbacks:
            callback()

    def is_over(self, account: Account, quota: AuthorityQuota) -> bool:
        """Decides on a message when `quota.left`, one of the account's, is below 0. Returns True, and counts it, if it
        must be dropped."""
        if not account.is_limited:
            quota.left = UNLIMITED
            return False
        now = self._now()
        if self._refill(quota, now) >= 0:
            return False
        quota.left = max(quota.left, -1 - self.units_per_s)  # so that a large excess does not block it for minutes
        if not self.pressure.is_on(now) and now >= quota.held_until:
            return False
        quota.held_until = now + RELAXED_S  # dropping relieves the thread, which must not readmit the flood
        self.drop(account)
        if now - account.reported_at >= REPORTED_S or account.dropped == 1:
            account.reported_at = now
            whose = {"endpoint": account.endpoint, "authority": account.authority, "dropped": account.dropped}
            log.warning("dropped: an authority sends more than its quota", **whose, quota_per_s=self.units_per_s)
        return True

    def drop(self, account: Account, messages: int = 1) -> None:
        """Counts dropped messages. Metrics show them at once: the sum of all authorities must match the drops."""
        account.dropped += messages
        if account not in self.top:
            self._settle(account)

    def _refill(self, quota: AuthorityQuota, now: float) -> int:
        burst = int(self.units_per_s * quota.burst_s)
        quota.left = min(burst, quota.left + int((now - quota.refilled) * self.units_per_s))
        quota.refilled = now
        return quota.left

    def refused(self, account: Account, messages: int) -> bool:
        """Counts messages that were refused unread since the last turn. Returns True if it may send again."""
        now, quota = self._now(), account.passing
        account.messages += messages
        if messages:
            self.drop(account, messages)
            quota.held_until = now + RELAXED_S
        return self._refill(quota, now) >= int(self.units_per_s * TURN_S)

    # Rates

    async def run(self) -> None:
        """Samples the accounts, one slice per turn, until cancelled."""
        while True:
            await asyncio.sleep(TURN_S)
            now = self._now()
            self.pressure.look(now)
            for callback in self._turn_callbacks:
                callback()
            self.sample(now)

    def sample(self, now: float) -> None:
        """Samples the next slice: updates rates, `top` and `others`."""
        if self._next >= len(self._snapshot):
            newer = [one for one in self.top if one not in self._rising]  # or slower
            self._show([*self._rising, *newer][:TOP])
            self._rising = []
            self._snapshot, self._next = list(self), 0
        end = self._next + max(1, -(-len(self._snapshot) // SLICES))
        part = self._snapshot[self._next : end]
        self._next = end
        now_ms = self._now_ms()
        for account in part:
            if account not in self.top:
                self._settle(account)
            messages, at = account.sampled
            if now > at:
                account.rate = (account.messages - messages) / (now - at)
            if account.messages != messages:
                account.seen_ms = now_ms
            account.sampled = (account.messages, now)
        self._rising = heapq.nlargest(TOP, [*self._rising, *part], key=_by_rate)

    def _show(self, top: list[Account]) -> None:
        """Replaces `top`; the counts of accounts that leave it go to `others`."""
        before, self.top = self.top, top
        for account in before:
            if account not in top:
                self._settle(account)

    def _settle(self, account: Account) -> None:
        """Moves the counts of an account to `others`."""
        messages, size, dropped = account.own
        account.settled = (account.messages, account.bytes, account.dropped)
        self.others.messages += messages
        self.others.bytes += size
        self.others.dropped += dropped

    def by_rate(self, count: int) -> list[Account]:
        """Returns the `count` accounts with the highest rates; sorts all of them."""
        return heapq.nlargest(count, self, key=_by_rate)

    def samples(self, topics_of: Callable[[str], int]) -> Iterator[Sample]:
        """Returns samples of `top` by name, of `others` as one: a time series database can't take all names of a fleet.
        `topics_of(authority)`: number of its topics in the logs."""
        for account in (*self.top, self.others):
            label = (account.endpoint, account.authority)
            messages, size, dropped = account.own
            yield "authority_received", label, messages
            yield "authority_received_bytes", label, size
            yield "authority_dropped", label, dropped
            if account is not self.others:
                yield "authority_topics", label, topics_of(account.authority)
        yield "authorities", (), len(self)
        yield "busy", (), self.pressure.share

    def notes(self) -> list[str]:
        """Returns a sentence for each authority whose messages were dropped within the last minute."""
        now = self._now()
        late = [
            one
            for one in self.top
            if one.dropped
            and any(quota.left < 0 and now - quota.refilled < REPORTED_S for quota in (one.passing, one.kept))
        ]
        over = heapq.nlargest(5, late, key=lambda account: account.dropped)
        return [
            f"authority {one.authority} on endpoint {one.endpoint} sends more than {self.units_per_s} messages (or "
            "KiB) a second while "
            f"the streamer is behind: {one.dropped} were dropped; see limits.authority_messages_per_s"
            for one in over
        ]
