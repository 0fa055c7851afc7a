"""Merges the frontiers of one group that several logs report: how far the group has come in all of them. Pure.

update(log, LogFrontier) -> lower: the minimal times that may come from any log
                         -> is_over(time): over in each log, at a version that knows that time
silence: a log that has reported nothing for too long is no longer waited for, until it reports again

The cost depends on the change, not on the number of logs: each of a thousand vehicles reports all the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from history.epochs.frontier import (
    ACTIVE_MAX,
    GROUP_MAX,
    LENGTH_MAX,
    Antichain,
    Time,
    is_ahead,
    maximal,
    minimal,
    time_of,
)
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import GroupFrontier

LOGS_MAX: Final = 16  # of one keeper; it has a durable and a volatile one
SINCE_MAX: Final = 4_096  # times that some log of a keeper does not know

KeeperAddress = tuple[str, int]  # of the keeper of a group: authority, uEntity
Life = tuple[Any, int, Collection[Any]]  # of a log: its incarnation, the version, and the logs that this version names


def times_of(report: GroupFrontier) -> tuple[list[Time], list[Time]] | None:
    """Returns the lower frontier and the active times, all with the same number of numbers. None: it is invalid."""
    if max(len(report.lower), len(report.active)) > ACTIVE_MAX or len(report.logs) > LOGS_MAX:
        return None
    if not 0 < len(report.group.encode()) <= GROUP_MAX:
        return None
    lower, active = ([time_of(one) for one in times] for times in (report.lower, report.active))
    lengths = {len(time) for time in (*lower, *active)}
    return (lower, active) if not lengths or (len(lengths) == 1 and 0 < lengths.pop() <= LENGTH_MAX) else None


def is_replaced(old: Life, new: Life) -> bool:
    """Returns whether the old one of two logs of a keeper no longer exists, by the last report of each; the new log's
    came last. If both exist, one names the other."""
    (old_log, old_version, old_logs), (log, version, logs) = old, new
    return old_log not in logs and (old_version <= version or log not in old_logs)


def passed_unread(report: GroupFrontier, length: int) -> list[Time]:
    """Returns the times that were over before this frontier, which is the first one that is read of its log: they may
    have records that are not read. Only other logs of the group can bring more of them. All have `length` numbers; 0:
    as many as the first one."""
    if report.number == 1 or len(report.logs) < 2:
        return []
    passed = [time_of(one) for one in report.kept.passed if 0 < len(one.numbers) <= LENGTH_MAX]
    return [time for time in passed if len(time) == (length or len(passed[0]))]


@dataclass(slots=True)
class LogFrontier:
    """The frontiers that one log reports."""

    keeper: KeeperAddress
    version: int
    lower: Antichain
    active: frozenset[Time]
    logs: frozenset[bytes]
    number: int  # of the report in that log
    heard_at: float
    is_silent: bool = False


@dataclass(slots=True)
class _Keeper:
    parts: dict[bytes, LogFrontier] = field(default_factory=dict)  # by log
    since: dict[Time, int] = field(default_factory=dict)  # the first known version that has this time
    oldest: int = 0  # version of the logs that are not silent

    def is_behind(self, time: Time) -> bool:
        """Returns whether one of its logs does not know the time."""
        return self.since.get(time, 0) > self.oldest


class MergedFrontiers:
    """`unheard`: logs that others name and that have reported nothing. `is_settled`: nothing that decides what is over
    has changed since it was set."""

    def __init__(self) -> None:
        self.parts: dict[bytes, LogFrontier] = {}  # by the log in which it was first appended
        self.unheard: set[bytes] = set()
        self.unheard_since: float | None = None
        self.is_settled = False
        self._keepers: dict[KeeperAddress, _Keeper] = {}
        self._behind: set[KeeperAddress] = set()  # whose logs have different versions
        self._lows: Counter[Time] = Counter()
        self._lower: Antichain | None = None
        self._named: Counter[bytes] = Counter()
        self._waited_for: OrderedDict[bytes, LogFrontier] = OrderedDict()  # the last one reported last
        self._silent: dict[bytes, LogFrontier] = {}
        self._has_given_up = False  # True: the unheard logs are no longer waited for

    def __repr__(self) -> str:
        return f"MergedFrontiers({sorted(self.lower)}, {len(self.parts)} logs)"

    # -- frontiers

    @property
    def lower(self) -> Antichain:
        """Returns the minimal times that may come from the logs that are waited for."""
        if self._lower is None:
            self._lower = minimal(self._lows)
        return self._lower

    @property
    def upper(self) -> Antichain:
        return maximal(time for part in self.parts.values() for time in part.active)

    @property
    def is_whole(self) -> bool:
        """True if every log that is waited for has reported."""
        return not self.unheard or self._has_given_up

    def is_over(self, time: Time) -> bool:
        return not is_ahead(self.lower, time) and not any(self._keepers[one].is_behind(time) for one in self._behind)

    def missing(self, time: Time) -> str:
        """Returns which silent logs might bring more of a time that is over; empty: none."""
        who = {
            part.keeper[0]
            for part in self._silent.values()
            if is_ahead(part.lower, time) or part.version < self._keepers[part.keeper].since.get(time, 0)
        }
        return ", ".join(sorted(who)) or ("one of its logs" if self.unheard else "")

    # -- reports

    def update(self, log: bytes, part: LogFrontier) -> None:
        old = self.parts.get(log)
        if old is not None and old.keeper != part.keeper:
            self.drop(log, part.heard_at)
            old = None
        self.parts[log] = self._waited_for[log] = part
        self._waited_for.move_to_end(log)
        self._silent.pop(log, None)
        lower = old.lower if old is not None and not old.is_silent else frozenset[Time]()
        if lower != part.lower:
            self._rise(part.lower)
            self._sink(lower)
        keeper = self._keepers.setdefault(part.keeper, _Keeper())
        keeper.parts[log] = part
        for time in part.active:
            keeper.since[time] = min(part.version, keeper.since.get(time, part.version))
        self._count(part.keeper)
        self._touch_others(keeper, log, part if old is None else old, part.heard_at)
        self.unheard.discard(log)
        if old is None or old.logs != part.logs:
            self._name(part.logs)
            self._unname(old.logs if old is not None else ())
        if not self.unheard:
            self._forget(keeper, part)
        self._note_unheard(part.heard_at)

    def replaced_by(self, log: bytes) -> list[bytes]:
        """Returns the logs that no longer exist, by the report of this one: they were in memory before a restart, or
        their disk was replaced. The caller drops them."""
        part = self.parts[log]
        parts = self._keepers[part.keeper].parts
        new = log, part.version, part.logs
        replaced = [one for one, old in parts.items() if one != log and is_replaced((one, old.version, old.logs), new)]
        if len(parts) - len(replaced) > LOGS_MAX:
            replaced.append(min(parts.keys() - {log, *replaced}, key=lambda one: (parts[one].version, one)))
        return replaced

    def touch(self, log: bytes, part: LogFrontier, now: float) -> None:
        """Note that the log is there, without a new report."""
        if part.heard_at == now and not part.is_silent:
            return
        part.heard_at = now
        self._waited_for[log] = part
        self._waited_for.move_to_end(log)
        self._touch_others(self._keepers[part.keeper], log, part, now)
        if part.is_silent:
            part.is_silent = False
            del self._silent[log]
            self._rise(part.lower)
            self._count(part.keeper)

    def drop(self, log: bytes, now: float) -> None:
        part = self.parts.pop(log)
        self._waited_for.pop(log, None)
        self._silent.pop(log, None)
        if not part.is_silent:
            self._sink(part.lower)
        keeper = self._keepers[part.keeper]
        del keeper.parts[log]
        self._count(part.keeper)
        if keeper.parts:
            newest = max(one.version for one in keeper.parts.values())
            keeper.since = {time: version for time, version in keeper.since.items() if version <= newest}
        else:
            del self._keepers[part.keeper]
        self._unname(part.logs)
        if log in self._named:
            self.unheard.add(log)
        self._note_unheard(now)
        self.is_settled = False

    # -- silent logs

    def silent_at(self, timeout_s: float) -> float | None:
        """Returns when to stop waiting for the next log; None: none is waited for."""
        heard = next((part.heard_at for part in self._waited_for.values()), None)
        if self.unheard and not self._has_given_up and self.unheard_since is not None:
            heard = self.unheard_since if heard is None else min(heard, self.unheard_since)
        return None if heard is None else heard + timeout_s

    def silence(self, now: float, timeout_s: float) -> None:
        """Stop waiting for each log that `silent_at` has announced up to now."""
        while self._waited_for:
            log, part = next(iter(self._waited_for.items()))
            if part.heard_at + timeout_s > now:  # the same arithmetic as in `silent_at`
                break
            del self._waited_for[log]
            self._silent[log] = part
            part.is_silent = True
            self._sink(part.lower)
            self._count(part.keeper)
        if self.unheard and self.unheard_since is not None and self.unheard_since + timeout_s <= now:
            self._has_given_up = True
            self.is_settled = False

    # -- internals

    def _touch_others(self, keeper: _Keeper, log: bytes, part: LogFrontier, now: float) -> None:
        """Count the keeper's other logs with the same version as heard, too: they had nothing to report."""
        if len(keeper.parts) > 1:
            for other_log, other in keeper.parts.items():
                if other_log != log and not other.is_silent and other.version >= part.version:
                    other.heard_at = now
                    self._waited_for.move_to_end(other_log)

    def _rise(self, times: Iterable[Time]) -> None:
        for time in times:
            self._lows[time] += 1
            if self._lows[time] == 1 and (self._lower is None or not is_ahead(self._lower, time)):
                self._lower, self.is_settled = None, False

    def _sink(self, times: Iterable[Time]) -> None:
        for time in times:
            self._lows[time] -= 1
            if not self._lows[time]:
                del self._lows[time]
                if self._lower is None or time in self._lower:
                    self._lower, self.is_settled = None, False

    def _name(self, logs: Iterable[bytes]) -> None:
        for log in logs:
            self._named[log] += 1
            if log not in self.parts:
                self.unheard.add(log)

    def _unname(self, logs: Iterable[bytes]) -> None:
        for log in logs:
            self._named[log] -= 1
            if not self._named[log]:
                del self._named[log]
                self.unheard.discard(log)

    def _note_unheard(self, now: float) -> None:
        if not self.unheard and self.unheard_since is not None:
            self.unheard_since, self._has_given_up, self.is_settled = None, False, False
        elif self.unheard and self.unheard_since is None:
            self.unheard_since = now

    def _count(self, of: KeeperAddress) -> None:
        """Update after the versions of the keeper's logs have changed."""
        keeper = self._keepers[of]
        versions = {one.version for one in keeper.parts.values() if not one.is_silent}
        keeper.oldest = min(versions, default=1 << 63)
        was_behind = of in self._behind
        if len(versions) > 1:
            self._behind.add(of)
        else:
            self._behind.discard(of)
        if was_behind or len(versions) > 1:
            self.is_settled = False

    @staticmethod
    def _forget(keeper: _Keeper, part: LogFrontier) -> None:
        """Forget times that are over and that all logs of the keeper know."""
        since = keeper.since
        if len(since) > len(part.active):
            for time in [one for one, version in since.items() if version <= keeper.oldest and one not in part.active]:
                del since[time]
        while len(since) > SINCE_MAX:
            del since[next(iter(since))]
