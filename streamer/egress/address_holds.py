"""Addresses toward one peer that its network refuses, or where nobody listens: the records of each wait in the log at
a position of its own, while the pump goes on with all others.

refused, unheard -> hold -> in 1, 2, 4 ... 60 s: one message -> not taken: later        (hold_state.py)
                      |                                      '-> taken: read back -> live again
                      '-> for too long: ended

The unit is the address by which the network routes (UTransport.address_of). There are at most ADDRESSES_MAX of them;
beyond that the addresses of one source authority, at last all of an endpoint, are one unit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Final, NamedTuple

import structlog

from history.log.log import Log
from streamer.egress.held_records import HeldBudget, HeldRecords
from streamer.egress.hold_state import HOLD_RULES, NEW, OVER, TRYING, WAITING, HoldEvent, HoldProgress, begun, step
from streamer.egress.reasons import ACCESS_CODES, LABELS, PASSING_CODES, Kind, Label, text_of
from streamer.egress.rows import HOLDER, NOTE_S, row, rows_left, units_of
from streamer.walk.sender import QueuedRecord
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

ADDRESSES_MAX: Final = 5_000  # units of one peer; with more, several addresses become one
# addresses in merged units of one peer; with more, no further one is held, so that a stranger who makes up addresses
# delays nobody else
COVERED_MAX: Final = 20_000
DUE_MAX: Final = 8 * ADDRESSES_MAX  # scheduled times, including outdated ones
YOUNG_S: Final = 1.0  # a younger hold has no row, and the pump's cursor waits: a subscriber is often a moment late
YOUNG_MAX: Final = 64
HELD_HOURS: Final = 24.0  # longest wait of messages that a network refuses, or nobody listens to
LOGGED_MAX: Final = 16  # holds of a label with a log line each; a stranger may cause thousands
SHOWN_AFTER_S: Final = 60.0  # a hold that may end by itself is a condition of its endpoint once it is older

Clock = Callable[[], float]
OnChange = Callable[[Iterable[int] | None], None]

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class AddressHold:
    """One unit: messages to its addresses with a greater seq than `after` wait. All but `unit`, `began`, `authority`
    and `is_loaded` changes."""

    unit: str  # "=" and the address; for several addresses: "@" and their source authority, or "*"
    after: int
    kind: Kind
    why: str  # the answer of the network
    code: UCode.ValueType
    began: float  # loop time, minus the wait before a restart
    held: HeldRecords
    authority: str = ""  # source of its messages; "": unknown after a restart, or several addresses
    streams: set[int] = field(default_factory=set)  # ids of the log that are known since the start
    is_loaded: bool = False  # from before a restart: it may have more streams
    covers: set[str] | None = None  # addresses of a merged unit; None: unknown after a restart, so any
    was_heard: bool = False  # somebody has listened there in this process
    progress: HoldProgress = NEW
    tried: int = 0  # seq of the message that is tried; less, if an earlier one was refused meanwhile
    saved_s: float = 0.0  # how long it had waited when it was last saved
    has_row: bool = False

    @property
    def label(self) -> Label:
        return "left" if self.kind == "unheard" and self.was_heard else self.kind

    @property
    def records(self) -> int:
        """Returns how many records are counted."""
        return self.held.count

    @property
    def may_end_by_itself(self) -> bool:
        return self.kind == "unheard" or self.code in PASSING_CODES

    @property
    def is_waiting(self) -> bool:
        return self.progress.state in (WAITING, TRYING)

    @property
    def is_over(self) -> bool:
        return self.progress.state is OVER

    def is_new_to(self, stream: int) -> bool:
        """Returns whether several streams send to this address now: those without a record here would go on."""
        return self.unit[0] == "=" and bool(self.streams) and stream not in self.streams

    @property
    def name(self) -> str:
        """Returns the name of the unit for log lines and conditions."""
        what = self.unit[1:]
        return {"=": repr(what), "@": f"whatever comes from {what!r}", "*": "every address"}[self.unit[0]]


class HeldState(NamedTuple):
    """The holds of one label, as an operator sees them."""

    label: Label
    units: int
    records: int  # at least
    are_counted: bool  # False: holds from before the last start may have more records
    oldest: AddressHold  # of those that can't end by themselves, if there are any
    waited_s: float  # of the oldest

    def sentence(self, now_ms: int) -> str:
        """Returns a sentence for operators; the oldest hold stands for all."""
        since = datetime.fromtimestamp(now_ms / 1_000 - self.waited_s, UTC).isoformat(timespec="seconds")
        others = f" and {self.units - 1:,} more" if self.units > 1 else ""
        count = f"{'' if self.are_counted else 'at least '}{self.records:,} records wait"
        what = f"{self.oldest.name}{others}"
        if self.label == "refused":
            rules = ": see its access rules" if self.oldest.code in ACCESS_CODES else ""
            return f"{self.oldest.why}: {what} since {since}, {count}{rules}"
        if self.label == "left":
            return f"nobody listens any more at {what} since {since}, {count} until somebody does"
        return f"nobody has listened yet at {what} since {since}, {count} until somebody does"


class AddressHolds(dict[str, AddressHold]):
    """The addresses of one peer that its network refuses, or where nobody listens, by unit. Owns the log's cursors
    `held:PEER:KIND UNIT`."""

    def __init__(
        self, source: Log, peer: str, time: Clock, refused_s: float, unheard_s: float, on_change: OnChange
    ) -> None:
        """`refused_s`, `unheard_s`: the longest times of a hold while the streamer runs. `on_change(streams)`: some
        addresses of these streams are held now, or no longer; None: perhaps those of any stream."""
        super().__init__()
        self._log, self._peer, self._time, self._on_change = source, peer, time, on_change
        self._limits: dict[Kind, float] = {"refused": refused_s, "unheard": unheard_s}
        # what changes, beside the holds: those without a row, and the units of several addresses; how many there are of
        # each label, what they have in memory, and how many were ended at their limit; a heap of tries by loop time
        self._young: dict[str, AddressHold] = {}
        self.merged: dict[str, AddressHold] = {}
        self._labels = Counter[Label]()
        self._budget = HeldBudget()
        self.ended = 0
        self._due: list[tuple[float, int, AddressHold]] = []
        self._count = itertools.count()

    # Look up

    def at(self, address: str) -> AddressHold | None:
        """Returns the hold of this address, or a merged one that covers it."""
        hold = self.get("=" + address)
        if hold is None and self.merged:
            covers = (merged for merged in self.merged.values() if merged.covers is None or address in merged.covers)
            hold = next(covers, None)
        return hold

    def of(self, address: str, authority: str) -> AddressHold | None:
        """Returns the hold of messages from the source `authority` to `address`."""
        hold = self.get("=" + address)
        if hold is None and self.merged:
            for merged in (self.merged.get("@" + authority), self.merged.get("*")):
                if merged is not None and (merged.covers is None or address in merged.covers):
                    return merged
        return hold

    def load(self) -> None:
        now = self._time()
        for rest, cursor in units_of(self._log.cursors.all(), "held", self._peer).items():
            kind: Kind = "unheard" if rest[:1] == "u" else "refused"
            hold = AddressHold(
                rest[1:],
                cursor.seq,
                kind,
                "as before the restart",
                UCode.UNAVAILABLE if kind == "unheard" else UCode.PERMISSION_DENIED,
                now - cursor.absent_ms / 1000,
                HeldRecords(self._budget),
                is_loaded=True,
                progress=begun(now),
                saved_s=cursor.absent_ms / 1000,
                has_row=True,
            )
            self._add(hold)
            self._push(hold)

    @property
    def oldest_young(self) -> int | None:
        """Returns the lowest position of the holds that have no row yet."""
        return min([hold.after for hold in self._young.values()], default=None) if self._young else None

    @property
    def next_at(self) -> float | None:
        """Returns the loop time at which the next step is due."""
        return self._due[0][0] if self._due else None

    def states(self) -> Iterator[HeldState]:
        """Yields the state of each label that has holds."""
        for label in LABELS if self else ():
            if holds := [hold for hold in self.values() if hold.label == label]:
                records = sum([hold.records for hold in holds])
                oldest = min(holds, key=attrgetter("may_end_by_itself", "began"))
                are_counted = all(hold.held.are_counted and not hold.is_loaded for hold in holds)
                yield HeldState(label, len(holds), records, are_counted, oldest, self._time() - oldest.began)

    # Hold

    def hold(
        self,
        address: str,
        authority: str,
        known: AddressHold | None,
        item: QueuedRecord,
        status: UStatus,
        kind: Kind,
        *,
        was_heard: bool = False,
        was_tried: bool = False,
    ) -> AddressHold | None:
        """Hold everything to `address` from `item` on, which the network has not taken. Returns None if too many
        addresses are held. `known`: the result of `of` for the address; `was_heard`: somebody has listened there since
        the start; `was_tried`: `item` was the trial of a hold."""
        now = self._time()
        if known is None:
            known = self._new(address, authority, item[0] - 1, status, kind, now, was_heard)
            if known is None:
                return None
        else:
            if known.is_new_to(item[2]):
                self._on_change(None)
            elif not known.is_waiting:
                self._on_change(known.streams)
            known.why, known.code = text_of(status), status.code
            if known.kind != kind:
                self._change_kind(known, kind)
                self._log_hold(known)
        if was_tried:
            self._on_change((item[2],))
        else:
            self.wait_behind(known, item)
        is_put_off = self._apply(known, HoldEvent.TRIAL_NOT_TAKEN if was_tried else HoldEvent.NOT_TAKEN)
        if is_put_off and known.has_row and now - known.began >= known.saved_s + NOTE_S:
            self._save(known)
        return known

    def _apply(self, hold: AddressHold, event: HoldEvent) -> bool:
        """Have the table of states change a hold. Returns whether it is tried at another time now."""
        hold.progress, is_put_off = step(hold.progress, event, self._time())
        if is_put_off:
            self._push(hold)
        return is_put_off

    def _new(
        self, address: str, authority: str, after: int, status: UStatus, kind: Kind, now: float, was_heard: bool
    ) -> AddressHold | None:
        has_capacity = sum([len(merged.covers or ()) for merged in self.merged.values()]) < COVERED_MAX
        if len(self) >= ADDRESSES_MAX or rows_left(self._log) <= 0:
            if not has_capacity:
                return None
            self._merge()
        if has_capacity and (merged := self._merged_for(address, authority)) is not None:
            return merged
        unit, why, held = "=" + address, text_of(status), HeldRecords(self._budget)
        hold = AddressHold(unit, after, kind, why, status.code, now, held, authority, was_heard=was_heard)
        self._add(hold)
        self._log_hold(hold)
        if kind == "unheard" and len(self._young) < YOUNG_MAX and not self._is_behind_cursor(hold):
            self._young[hold.unit] = hold
            heapq.heappush(self._due, (now + YOUNG_S, next(self._count), hold))
        else:
            self._save(hold)
        return hold

    def _log_hold(self, hold: AddressHold) -> None:
        if self._labels[hold.label] > LOGGED_MAX:
            return
        if hold.kind == "refused":
            what = "a network refuses an address: what is for it waits, and everything else goes on"
            log.warning(what, endpoint=self._peer, address=hold.name, why=hold.why)
        else:
            what = "nobody listens at an address: what is for it waits until somebody does"
            log.info(what, endpoint=self._peer, address=hold.name)

    def _merged_for(self, address: str, authority: str) -> AddressHold | None:
        """Returns the merged unit for `address`, if there is one, and adds the address to it."""
        merged = self.merged.get("@" + authority) or self.merged.get("*")
        if merged is not None and merged.covers is not None:
            merged.covers.add(address)
        return merged

    def _add(self, hold: AddressHold) -> None:
        self[hold.unit] = hold
        self._labels[hold.label] += 1
        if hold.unit[0] != "=":
            self.merged[hold.unit] = hold

    def _merge(self) -> None:
        """Free capacity: merge the addresses of the source authority with the most addresses into one unit; if each
        authority has few, merge all."""
        authorities = Counter([hold.authority for hold in self.values() if hold.unit[0] == "="])
        ((whose, count),) = authorities.most_common(1) or [("", 0)]
        unit = "@" + whose if whose and count > max(1, ADDRESSES_MAX // 100) else "*"
        merging = [hold for hold in self.values() if unit in ("*", hold.unit) or hold.authority == whose]
        if len(merging) < 2:
            return
        first, began = min(merging, key=attrgetter("after")), min(hold.began for hold in merging)
        held, head = HeldRecords(self._budget), first.held.head
        merged = AddressHold(unit, first.after, first.kind, first.why, first.code, began, held)
        covers = set[str]()
        are_covers_known = all(hold.unit[0] == "=" or hold.covers is not None for hold in merging)
        for hold in merging:
            merged.streams |= hold.streams
            held.add_all(hold.held)
            merged.is_loaded = merged.is_loaded or hold.is_loaded
            merged.was_heard = merged.was_heard or hold.was_heard
            covers.update([hold.unit[1:]] if hold.unit[0] == "=" else hold.covers or ())
            self.drop(hold)
        if are_covers_known:
            merged.covers = covers
        if head is not None:
            held.keep_head(head)
        self._on_change(None)
        self._add(merged)
        merged.progress = begun(self._time())
        self._push(merged)
        self._save(merged)
        what = "many addresses are held: they are held as one from now on"
        log.warning(what, endpoint=self._peer, addresses=len(merging), unit=merged.name)

    def _change_kind(self, hold: AddressHold, kind: Kind) -> None:
        if hold.has_row:
            self._log.cursors.drop(self._row_of(hold))
        self._labels[hold.label] -= 1
        hold.kind = kind
        self._labels[hold.label] += 1
        if hold.has_row:
            self._save(hold)

    def wait_behind(self, hold: AddressHold, item: QueuedRecord) -> None:
        self.passed(hold, item[0], item[2])
        hold.streams.add(item[2])
        self._on_change((item[2],))
        hold.held.offer_head(item, hold.after)

    def passed(self, hold: AddressHold, seq: int, stream: int) -> None:
        """Have the record `seq` of `stream` wait in `hold`."""
        if hold.progress.state is OVER:
            return  # it was merged into a unit whose position is not later than its own
        hold.held.add(seq, stream)
        hold.tried = min(hold.tried, seq)
        if seq <= hold.after:
            hold.after = seq - 1
            hold.held.forget_head()
            if hold.has_row or self._is_behind_cursor(hold):
                self._save(hold)

    def begin_return(self, hold: AddressHold) -> None:
        """Note that everything in `hold` is read back and sent from now on. What is refused again counts again."""
        self._apply(hold, HoldEvent.READ_BACK)
        hold.held.clear()

    def _is_behind_cursor(self, hold: AddressHold) -> bool:
        """Returns whether the pump's cursor has passed the position of a hold, as for a topic that was held before.
        The cursor can't wait for it then, and only a row keeps what waits over a restart."""
        cursor = self._log.cursors.seq(row("egress", self._peer))
        return cursor is not None and hold.after < cursor

    # Try again

    def take_due(self, count: int) -> Iterator[AddressHold]:
        """Yields the holds whose first message is to be tried now, `count` at most; the caller reports the result."""
        now = self._time()
        while count > 0 and self._due and self._due[0][0] <= now:
            _, _, hold = heapq.heappop(self._due)
            if hold.is_over:
                continue
            if hold.unit in self._young and now >= hold.began + YOUNG_S:
                self._save(hold)
            if hold.progress.state is WAITING and hold.progress.due_at <= now:
                self._apply(hold, HoldEvent.DUE)
                count -= 1
                yield hold

    def is_at_its_limit(self, hold: AddressHold) -> bool:
        return self._time() - hold.began >= self._limits[hold.kind]

    def try_now(self, hold: AddressHold) -> None:
        """Try a hold at once: the network may take its messages now."""
        self._apply(hold, HoldEvent.NEWS)

    def try_all(self, kind: Kind | None = None) -> None:
        for hold in self.values():
            if kind is None or hold.kind == kind:
                self.try_now(hold)

    def try_heard(self, addresses: Sequence[str] | None) -> None:
        """Try these addresses, at which somebody listens now; None: all. See UTransport.on_heard."""
        if addresses is None:
            self.try_all("unheard")
        for address in addresses or ():
            if (hold := self.at(address)) is not None:
                self.try_now(hold)

    def not_tried(self, hold: AddressHold) -> None:
        """Note that the first message was removed before it left."""
        self._apply(hold, HoldEvent.WITHDRAWN)

    def taken(self, hold: AddressHold) -> None:
        """Note that the network has taken the first message. The rest is read back soon."""
        self._apply(hold, HoldEvent.TRIAL_TAKEN)
        if self._time() - hold.began >= YOUNG_S and self._labels[hold.label] <= LOGGED_MAX:
            what = "the network takes messages for an address again: what has waited follows"
            log.info(what, endpoint=self._peer, address=hold.name, records=hold.records)

    def drop(self, hold: AddressHold) -> None:
        """Remove a hold in which nothing waits any more."""
        assert not hold.is_over, "it is dropped once"
        self._apply(hold, HoldEvent.END)
        self._on_change(hold.streams)
        del self[hold.unit]
        self._labels[hold.label] -= 1
        self._young.pop(hold.unit, None)
        self.merged.pop(hold.unit, None)
        hold.held.forget_head()
        hold.held.clear()
        if hold.has_row:
            self._log.cursors.drop(self._row_of(hold))

    def confirmed(self, hold: AddressHold) -> None:
        """Note that all that was read back has left; some of it may have been refused again."""
        if (hold.progress.state, HoldEvent.CONFIRMED) in HOLD_RULES:
            self.drop(hold)

    def uncover(self, hold: AddressHold) -> None:
        """Begin to read back a merged unit: from now on it covers only addresses that are refused again."""
        if hold.unit[0] != "=":
            hold.covers = set()

    def move(self, hold: AddressHold, after: int) -> None:
        """Move the position of a hold to `after`: nothing up to it waits any more."""
        if after > hold.after:
            hold.after = after
            hold.held.pass_to(after)
            if hold.has_row:
                self._save(hold)

    def _push(self, hold: AddressHold) -> None:
        if len(self._due) > DUE_MAX:  # the network comes and goes: keep only the newest time of each hold
            others = [other for other in self.values() if other is not hold]
            self._due = [(young.began + YOUNG_S, next(self._count), young) for young in self._young.values()]
            self._due += [(other.progress.due_at, next(self._count), other) for other in others]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (hold.progress.due_at, next(self._count), hold))

    # On disk

    def _row_of(self, hold: AddressHold) -> str:
        return row("held", self._peer, hold.kind[0] + hold.unit)

    def _save(self, hold: AddressHold) -> None:
        self._young.pop(hold.unit, None)
        hold.has_row = True
        hold.saved_s = self._time() - hold.began
        self._log.cursors.set(self._row_of(hold), hold.after, absent_ms=int(hold.saved_s * 1000), holder=HOLDER)
