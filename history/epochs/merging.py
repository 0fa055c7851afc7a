"""What several logs say of a group of topics, as one: how far it has come in all of them. Pure.

hear(log, Part) -> lower: the minimal of what any log may bring -> is_over(time): in each log, as of a version in which
                                                                   that time was there
silence: who has said nothing for too long is waited for no longer, until it says something

Cost follows the change: each of a thousand vehicles says something all the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from history.epochs.frontier import ACTIVE_MAX, GROUP_MAX, LENGTH_MAX, Antichain, Time, is_ahead, maximal, minimal
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import GroupFrontier

LOGS_MAX: Final = 16  # of one keeper; it has a durable and a volatile one
SINCE_MAX: Final = 4_096  # times that some log of a keeper has not heard of

Keeper = tuple[str, int]  # who keeps a group: authority, uEntity
Life = tuple[Any, int, Collection[Any]]  # of a log: its incarnation, the version, and which logs there are by that


def times_of(told: GroupFrontier) -> tuple[list[Time], list[Time]] | None:
    """Its lower frontier, and what is active, all with as many numbers. None: no keeper says that."""
    if max(len(told.lower), len(told.active)) > ACTIVE_MAX or len(told.logs) > LOGS_MAX:
        return None
    if not 0 < len(told.group.encode()) <= GROUP_MAX:
        return None
    lower, active = ([tuple(one.numbers) for one in times] for times in (told.lower, told.active))
    lengths = {len(time) for time in (*lower, *active)}
    return (lower, active) if not lengths or (len(lengths) == 1 and 0 < lengths.pop() <= LENGTH_MAX) else None


def is_replaced(old: Life, new: Life) -> bool:
    """Of two logs of one keeper: the old one is not there any more, by what was told last in each, in the new one last.
    One that lives beside the other names it, or is named by it."""
    (old_log, old_version, old_logs), (log, version, logs) = old, new
    return old_log not in logs and (old_version <= version or log not in old_logs)


def passed_unread(told: GroupFrontier, length: int) -> list[Time]:
    """Of a log of which this is the first that is read: what was over there before, and may have had records that are
    not read. Only other logs of the group can still bring more of it. All have `length` numbers; 0: as many as the
    first."""
    if told.number == 1 or len(told.logs) < 2:
        return []
    passed = [tuple(one.numbers) for one in told.kept.passed if 0 < len(one.numbers) <= LENGTH_MAX]
    return [time for time in passed if len(time) == (length or len(passed[0]))]


@dataclass(slots=True)
class Part:
    """What one log says."""

    keeper: Keeper
    version: int
    lower: Antichain
    active: frozenset[Time]
    logs: frozenset[bytes]
    number: int  # of what was told in that log
    heard_at: float
    is_silent: bool = False


@dataclass(slots=True)
class _Keeper:
    parts: dict[bytes, Part] = field(default_factory=dict)  # by log
    since: dict[Time, int] = field(default_factory=dict)  # the first version, as far as we know, that has this time
    oldest: int = 0  # version of those that are not silent

    def is_behind(self, time: Time) -> bool:
        """One of its logs has not heard of it."""
        return self.since.get(time, 0) > self.oldest


class Merged:
    """`unheard`: logs that others name and that have said nothing. `is_settled`: nothing has changed of what is over
    since somebody set it."""

    def __init__(self) -> None:
        self.parts: dict[bytes, Part] = {}  # by the log in which it was told first
        self.unheard: set[bytes] = set()
        self.unheard_since: float | None = None
        self.is_settled = False
        self._keepers: dict[Keeper, _Keeper] = {}
        self._behind: set[Keeper] = set()  # whose logs are not all of one version
        self._lows: Counter[Time] = Counter()
        self._lower: Antichain | None = None
        self._named: Counter[bytes] = Counter()
        self._waited_for: OrderedDict[bytes, Part] = OrderedDict()  # who was heard last is the last
        self._silent: dict[bytes, Part] = {}
        self._has_given_up = False  # those that are unheard

    def __repr__(self) -> str:
        return f"Merged({sorted(self.lower)}, {len(self.parts)} logs)"

    # -- how far it has come

    @property
    def lower(self) -> Antichain:
        """Of what may come from those that are waited for."""
        if self._lower is None:
            self._lower = minimal(self._lows)
        return self._lower

    @property
    def upper(self) -> Antichain:
        return maximal(time for part in self.parts.values() for time in part.active)

    @property
    def is_whole(self) -> bool:
        """Nobody is waited for of whom nothing is known."""
        return not self.unheard or self._has_given_up

    def is_over(self, time: Time) -> bool:
        return not is_ahead(self.lower, time) and not any(self._keepers[one].is_behind(time) for one in self._behind)

    def missing(self, time: Time) -> str:
        """Who might bring more of what is over, and was silent for too long; empty: nobody."""
        who = {
            part.keeper[0]
            for part in self._silent.values()
            if is_ahead(part.lower, time) or part.version < self._keepers[part.keeper].since.get(time, 0)
        }
        return ", ".join(sorted(who)) or ("one of its logs" if self.unheard else "")

    # -- what is said

    def hear(self, log: bytes, part: Part) -> None:
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
        """Logs that are not there any more, by what was said in this one: they were in memory before a restart, or
        their disk was replaced. To be dropped."""
        part = self.parts[log]
        parts = self._keepers[part.keeper].parts
        new = log, part.version, part.logs
        gone = [one for one, old in parts.items() if one != log and is_replaced((one, old.version, old.logs), new)]
        if len(parts) - len(gone) > LOGS_MAX:
            gone.append(min(parts.keys() - {log, *gone}, key=lambda one: (parts[one].version, one)))
        return gone

    def touch(self, log: bytes, part: Part, now: float) -> None:
        """It is there, and has said nothing new."""
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

    # -- who says nothing

    def silent_at(self, timeout_s: float) -> float | None:
        """When the next one is to be waited for no longer; None: nobody is."""
        heard = next((part.heard_at for part in self._waited_for.values()), None)
        if self.unheard and not self._has_given_up and self.unheard_since is not None:
            heard = self.unheard_since if heard is None else min(heard, self.unheard_since)
        return None if heard is None else heard + timeout_s

    def silence(self, now: float, timeout_s: float) -> None:
        """Whoever was not heard for so long is waited for no longer: all of whom `silent_at` told."""
        while self._waited_for:
            log, part = next(iter(self._waited_for.items()))
            if part.heard_at + timeout_s > now:  # as there, to the last bit
                break
            del self._waited_for[log]
            self._silent[log] = part
            part.is_silent = True
            self._sink(part.lower)
            self._count(part.keeper)
        if self.unheard and self.unheard_since is not None and self.unheard_since + timeout_s <= now:
            self._has_given_up = True
            self.is_settled = False

    # -- inside

    def _touch_others(self, keeper: _Keeper, log: bytes, part: Part, now: float) -> None:
        """Logs of one keeper that know as much are heard together: nothing had to be said in them."""
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

    def _count(self, of: Keeper) -> None:
        """Versions of its logs have changed."""
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
    def _forget(keeper: _Keeper, part: Part) -> None:
        """Times that all of its logs have heard of, and that are over."""
        since = keeper.since
        if len(since) > len(part.active):
            for time in [one for one, version in since.items() if version <= keeper.oldest and one not in part.active]:
                del since[time]
        while len(since) > SINCE_MAX:
            del since[next(iter(since))]
