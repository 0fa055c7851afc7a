"""Knows which messages were acknowledged and wanted, and reports what is wrong.

publishes, acknowledged -> Sent --owed to every hearer with a want confirmed before--> heard | reported | excused
                                                                                           '-> order, phantom, duplicate
reported: as a dead letter or a gap
A hearer is excused only by the configuration, an Unsubscribe or the end of a volatile log.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from campaigns.simulation.apps import is_application
from campaigns.simulation.recording import Recording
from history.records.chunk import Origin
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.encoded import decoded
from uprotocol.status import code_name
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client import Status

VIOLATIONS_MAX: Final = 20  # of one run; the first ones are enough

NETWORK_LOST: Final = "a network has lost messages for us"  # in the log
OVER_QUOTA: Final = "dropped: an authority sends more than its quota"  # in the log

Key = tuple[str, int, int, int]
Id = bytes
Hop = tuple[str, str, str]
"""Machine, source network, destination network."""


@dataclass(slots=True, eq=False)
class Sent:
    checker: Checker
    id: Id
    number: int
    message: UMessage
    at: float
    era: int
    is_flood: bool = False  # beyond a quota: may be dropped while the gateway is overloaded, which counts it
    is_kept: bool = False  # by its publisher, whose history is followed, so that no network can lose it
    acknowledged_at: float | None = None
    heard: dict[str, int] = field(default_factory=dict)
    promised: set[str] = field(default_factory=set)  # hearers to whom it is owed, or was until it came
    lost: bool = False  # by a network without acknowledgements

    @property
    def topic(self) -> Key:
        return uris.key(self.message.attributes.source)

    @property
    def sink(self) -> Key | None:
        attributes = self.message.attributes
        return uris.key(attributes.sink) if attributes.HasField("sink") else None

    @property
    def stream(self) -> Any:
        return (self.topic, self.sink, self.message.attributes.priority, self.era)

    def acknowledged(self) -> None:
        self.acknowledged_at = self.checker.now
        self.checker.acknowledged(self)

    def __str__(self) -> str:
        return f"{self.message.payload.decode()!r} on {uris.format(self.message.attributes.source)}"


@dataclass(slots=True, eq=False)
class Want:
    """A hearer wants a topic; with the time since which that is certain."""

    hearer: str
    topic: Key
    hops: tuple[Hop, ...]
    wanted: bool = True
    confirmed_at: float | None = None
    is_early: bool = False  # confirmed while a gateway on the way starts: certain once that is ready
    answered: bool = False
    refused: str = ""
    unsure: bool = False  # it is unknown whether the service has executed the last command


class Wish:
    """One command of a subscriber until its answer."""

    def __init__(
        self, checker: Checker, want: Want, number: int, *, was_subscribed: bool, is_hurried: bool = False
    ) -> None:
        self._checker, self._want, self._number = checker, want, number
        self._was_subscribed = was_subscribed  # according to the service's answers
        self._is_hurried = is_hurried  # the opposite command may have been executed as well, and last
        self._was_tried = False

    def answered(self, status: Status) -> None:
        want = self._want
        want.answered = True
        self._checker.note("answered", want.hearer, want.topic, str(status))
        if want.wanted and status is Status.SUBSCRIBED:
            self._checker.confirm(want)
        elif want.wanted and status is Status.UNSUBSCRIBED:
            self._checker.fail(
                "a subscription that nobody ended",
                f"{want.hearer} subscribed to {want.topic} and was answered UNSUBSCRIBED",
            )

    def unanswered(self) -> None:
        """The command is repeated, and may have been executed already."""
        self._was_tried = True

    def refused(self, code: int) -> None:
        """Refused by the service or by the network on the way: the previous state holds."""
        want = self._want
        want.unsure = self._was_tried and (self._is_hurried or want.wanted != self._was_subscribed)
        if self._was_subscribed:
            want.wanted = want.answered = True
        else:
            want.refused = code_name(code)


class Checker:
    """The world and its applications call all methods."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.violations: list[tuple[str, str]] = []
        self.recording = Recording()
        self.sent: dict[Id, Sent] = {}
        self.wants: dict[tuple[str, Key], Want] = {}
        self.ever: set[tuple[str, Key]] = set()
        self.sinks: dict[Key, str] = {}  # whose notifications somebody hears
        self.owed: dict[str, dict[Id, Sent]] = defaultdict(dict)
        # by machine that has been ready: the pairs of networks that it forwards between
        self.effective: dict[str, set[tuple[str, str]]] = {}
        self._starting: set[str] = set()  # machines, until they are ready
        self.recorded: dict[str, list[UUri]] = {}
        self.volatile: list[UUri] = []
        self.era = 0
        self.disturbances: list[tuple[float, float, str]] = []
        self._open_disturbances: dict[str, float] = {}
        self._last: dict[tuple[str, Any], int] = {}
        self._numbers = 0
        self._wish_numbers = 0
        self._seqs: dict[tuple[bytes, int], Id] = {}
        self.places: dict[Id, list[tuple[str, bytes, int]]] = defaultdict(list)  # positions of a message in logs
        self._owed_to_reader: dict[Id, Sent] = {}
        self._on_reader: dict[tuple[bytes, int], Id] = {}  # records that the reader must get
        self._read: set[tuple[bytes, int]] = set()
        self._reader_gaps: list[tuple[bytes, int, int]] = []
        self._reader_last: dict[bytes, int] = {}
        self._reader_first: dict[bytes, int] = {}
        self.reader_topics: list[UUri] = []
        self.gaps: list[tuple[str, int, int]] = []  # of pumps: machine, after, before
        self.reported_lost: Counter[str] = Counter()  # by machine: messages that a network has lost
        self.allowed_gaps = False
        self.has_expired = False  # records were older than retention by age keeps them
        self.was_unfollowed = False  # for a while, in which no cursor of a follower has held retention
        self.clock_was_set_back = False  # by an hour or more
        self.kept_ids_went_back = False  # their publisher has started since then
        # by machine: a range of seqs with records for a removed endpoint
        self.unclaimed: list[tuple[str, int, int]] = []
        self.newest: dict[str, int] = {}  # durable seq, by machine
        self._refused_alone: set[Id] = set()
        self._maybe_dead: set[Id] = set()
        self.followed: dict[str, FollowedLog] = {}  # by machine, since its log was whole
        self._followed_gaps: list[Gap] = []
        self._in_memory: set[bytes] = set()  # incarnations of logs that end with their process, or were emptied
        self._incarnations: dict[str, set[bytes]] = defaultdict(set)  # of a machine's logs

    @property
    def now(self) -> float:
        return float(self.world.loop.now)

    def note(self, *what: Any) -> None:
        self.world.note(*what)

    def fail(self, kind: str, text: str) -> None:
        self.world.note("VIOLATION", kind, text)
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append((kind, f"{text} (at {self.now:.3f} s)"))

    # -- publishing and receiving

    def publishes(self, message: UMessage, *, is_kept: bool = False, is_flood: bool = False) -> Sent:
        self._numbers += 1
        id = uuids.to_bytes(message.attributes.id)
        sent = self.sent[id] = Sent(self, id, self._numbers, message, self.now, self.era, is_flood, is_kept)
        self.recording.published(sent)
        return sent

    def acknowledged(self, sent: Sent) -> None:
        self.note("acked", sent.number, str(sent))
        if sent.lost or sent.message.attributes.ttl:
            return  # its lifetime on the way depends on delays
        if sent.sink is not None:
            hearer = self.sinks.get(sent.sink)
            if hearer is not None and self._passes(self._hops(hearer, sent)):
                self._owe(hearer, sent)
            return
        for want in self.wants.values():
            if (
                want.topic == sent.topic
                and want.confirmed_at is not None
                and want.confirmed_at < sent.at
                and self._passes(want.hops)
            ):
                self._owe(want.hearer, sent)
        source = sent.message.attributes.source
        if _matches(self.recorded.get("V", ()), source) and _matches(self.reader_topics, source):
            self._owed_to_reader[sent.id] = sent

    def lost(self, id: Id, *, is_for_good: bool) -> None:
        """A network without acknowledgements has lost it, so no gateway is at fault. Messages that a publisher keeps
        must arrive all the same, except where nobody follows."""
        sent = self.sent.get(id)
        if sent is not None and (is_for_good or not sent.is_kept):
            sent.lost = True
            self._owed_to_reader.pop(id, None)
            for owed in self.owed.values():
                owed.pop(id, None)

    def _owe(self, hearer: str, sent: Sent) -> None:
        sent.promised.add(hearer)
        if hearer not in sent.heard:
            self.owed[hearer][sent.id] = sent

    def _passes(self, hops: tuple[Hop, ...]) -> bool:
        return all((origin, target) in self.effective.get(machine, ()) for machine, origin, target in hops)

    def heard(self, hearer: str, message: UMessage) -> None:
        if not is_application(message):
            return
        id = uuids.to_bytes(message.attributes.id)
        sent = self.sent.get(id)
        self.note("heard", hearer, message.payload.decode())
        if sent is None or sent.message != message:
            self.fail("phantom", f"{hearer} heard {message.payload!r}, which nobody has sent so")
            return
        if sent.sink is None and (hearer, sent.topic) not in self.ever:
            self.fail("phantom", f"{hearer} heard {sent}, and never subscribed to it")
        self.owed[hearer].pop(id, None)
        times = sent.heard[hearer] = sent.heard.get(hearer, 0) + 1
        self.recording.heard(hearer, sent, times)
        if times > 1:
            if not self._is_disturbed(sent.at, self.now, hearer):
                self.fail("unexplained duplicate", f"{hearer} heard {sent} {times} times")
            return
        last = self._last.get((hearer, sent.stream), 0)
        if sent.number < last and id in self._refused_alone:
            last = 0  # later ones were accepted all the same: sending resumes from this one
        elif sent.is_kept and self.kept_ids_went_back:
            pass  # until its history answers, followers store its plain copies, ahead of records that they have to read
        elif sent.number < last and hearer in sent.promised and not sent.lost and id not in self._maybe_dead:
            # (dead letters, messages from before the subscription and those that waited when it was ended may still
            # arrive when an endpoint has its name again; one that a network has lost is sent again after a kill)
            self.fail(
                "reordered", f"{hearer} heard {sent} (message {sent.number}) after message {last} of the same stream"
            )
        self._last[hearer, sent.stream] = max(last, sent.number)

    def refused_alone(self, id: Id) -> None:
        """A network has refused this message, and may have accepted later ones."""
        self._refused_alone.add(id)

    # -- permitted repetitions

    def disturbed(self, why: str) -> None:
        """At this moment something happened after which a message may arrive twice."""
        self.disturbances.append((self.now, self.now, why))

    def disturbed_from(self, why: str) -> None:
        self._open_disturbances.setdefault(why, self.now)

    def disturbed_until(self, why: str) -> None:
        begin = self._open_disturbances.pop(why, None)
        if begin is not None:
            self.disturbances.append((begin, self.now, why))

    def _is_disturbed(self, begin: float, end: float, hearer: str) -> bool:
        """True if any excuse permits `hearer` to get a message twice."""
        excuses = self.world.excuses
        return any(excuses(hearer, why) for why in self._open_disturbances) or any(
            low <= end and begin <= high and excuses(hearer, why) for low, high, why in self.disturbances
        )

    # -- wants

    def want(self, hearer: str, topic: Key, hops: tuple[Hop, ...], *, confirmed: bool) -> Want:
        want = self.wants.get((hearer, topic))
        if want is None:
            want = self.wants[hearer, topic] = Want(hearer, topic, hops)
        self.ever.add((hearer, topic))
        want.wanted = True
        if confirmed and want.confirmed_at is None:
            want.confirmed_at = self.now
        return want

    def confirm(self, want: Want) -> None:
        """A service has answered SUBSCRIBED. A gateway that is starting waits BACK_SOON_S (networks.py) at most for
        its networks, and then answers even if one is not open yet. That network keeps no messages for a new filter, so
        the subscription counts from when the gateway is ready."""
        if want.confirmed_at is None:
            want.is_early = any(machine in self._starting for machine, _, _ in want.hops)
            want.confirmed_at = None if want.is_early else self.now

    def unwant(self, hearer: str, topic: Key) -> None:
        want = self.wants.get((hearer, topic))
        if want is not None:
            want.wanted, want.confirmed_at, want.is_early, want.answered = False, None, False, False
        self._let_off(hearer, lambda sent: sent.sink is None and sent.topic == topic)

    def wishes(self, hearer: str, topic: UUri, wanted: bool, *, is_hurried: bool = False) -> Wish:
        """`is_hurried`: the command is sent twice, with the opposite one in between. So one of the three is an
        Unsubscribe, after which the messages that wait for the hearer need not arrive."""
        key = uris.key(topic)
        self._wish_numbers += 1
        self.note("wishes", hearer, key, wanted)
        known = self.wants.get((hearer, key))
        was_subscribed = known is not None and known.wanted and known.answered and not known.refused
        if is_hurried:
            self.unwant(hearer, key)
        if wanted:
            want = self.want(hearer, key, self.world.hops(hearer, key), confirmed=False)
            want.answered = want.answered and known is not None and known.confirmed_at is not None
        else:
            want = self.wants.get((hearer, key)) or self.want(
                hearer, key, self.world.hops(hearer, key), confirmed=False
            )
            self.unwant(hearer, key)
        want.refused, want.unsure = "", False  # about an earlier command
        return Wish(self, want, self._wish_numbers, was_subscribed=was_subscribed, is_hurried=is_hurried)

    def on_change(self, hearer: str, topic: UUri, status: Status) -> None:
        """A change that a service reports. A late one is about an earlier command, so the end of the run decides,
        not this."""
        want = self.wants.get((hearer, uris.key(topic)))
        self.note("told", hearer, uris.key(topic), str(status))
        if want is None or not want.wanted or not want.answered:
            return
        if status is Status.SUBSCRIBED:
            self.confirm(want)
        else:
            want.confirmed_at, want.is_early = None, False
            self._let_off(hearer, lambda sent: sent.sink is None and sent.topic == uris.key(topic))

    def no_for_good(self, topic: Key) -> None:
        """A network has refused a Subscribe or Unsubscribe for `topic` between two services. That ends the
        subscriptions to it, unless a later command was already on its way."""
        for want in self.wants.values():
            if want.topic == topic:
                want.unsure = True

    def _let_off(self, hearer: str, which: Any) -> None:
        for id in [id for id, sent in self.owed[hearer].items() if which(sent)]:
            self.owed[hearer].pop(id).promised.discard(hearer)

    # -- gateways

    def starts(self, machine: Any) -> None:
        """The gateway is ready with its present configuration: messages that this forbids are not owed any more."""
        passes = self.world.passes(machine)
        self._starting.add(machine.name)
        self.effective[machine.name] = self.effective.get(machine.name, set()) & passes
        self.recorded[machine.name] = []
        for hearer in list(self.owed):
            self._let_off(hearer, lambda sent, hearer=hearer: not self._passes(self._hops(hearer, sent)))
            self._let_off(hearer, lambda sent: _matches(self.volatile, sent.message.attributes.source))
        self._keep_recorded(machine)

    def changes(self, machine: Any) -> None:
        """The gateway takes over a configuration while it runs: until `ready`, only what the one before allows, too,
        is owed."""
        self.effective[machine.name] = self.effective.get(machine.name, set()) & self.world.passes(machine)
        recorded = self.world.recorded(machine)
        self.recorded[machine.name] = [one for one in self.recorded.get(machine.name, ()) if one in recorded]
        for hearer in list(self.owed):
            self._let_off(hearer, lambda sent, hearer=hearer: not self._passes(self._hops(hearer, sent)))
        self._keep_recorded(machine)

    def _keep_recorded(self, machine: Any) -> None:
        """Messages that wait on a network for a gateway that no longer records them are not owed to the reader."""
        if machine.name != "V":
            return
        recorded = self.world.recorded(machine)
        for id, sent in list(self._owed_to_reader.items()):
            if id not in self.places and not _matches(recorded, sent.message.attributes.source):
                del self._owed_to_reader[id]

    def _hops(self, hearer: str, sent: Sent) -> tuple[Hop, ...]:
        if sent.sink is not None:
            return tuple(self.world.hops(hearer, sent.topic))
        return self.wants[hearer, sent.topic].hops

    def ready(self, machine: Any) -> None:
        self.effective[machine.name] = self.world.passes(machine)
        self.recorded[machine.name] = self.world.recorded(machine)
        self._starting.discard(machine.name)
        for want in self.wants.values():
            if want.is_early:
                self.confirm(want)

    def died(self, machine: Any, error: Exception) -> None:
        if not machine.disk_faults and not machine.torn:
            self.fail("a gateway that died", f"{machine.name}: {error!r}")
        self.disturbed(machine.name)

    def logged(self, machine: str, event: dict[str, Any]) -> None:
        """An error or a warning of a gateway."""
        if event.get("event") == NETWORK_LOST:
            self.reported_lost[machine] += event["messages_at_most"] or 0
        if event.get("event") == OVER_QUOTA and not self.world.is_busy(machine):
            self.fail("dropped without overload", f"{machine} drops messages of {event['authority']}")
        if "after" in event and "before" in event:
            self.gaps.append((machine, event["after"], event["before"]))
        if event.get("exc_info") and not self.world.disk_troubled(machine):
            self.fail(
                "an exception that nobody foresaw", f"{machine}: {event.get('event')}: {event.get('exception', '')}"
            )
        if "moved_to" in event:  # the whole log is lost, and that is reported
            self.note("moved aside", machine)
            for owed in self.owed.values():
                owed.clear()
            self._owed_to_reader.clear()
            self._on_reader.clear()
            self.followed.pop(machine, None)

    def appended(
        self, machine: str, incarnation: bytes, durable: bool, seq: int, carried: Any, origin: Origin | None = None
    ) -> None:
        message = decoded(carried)
        id = uuids.to_bytes(message.attributes.id)
        known = self._seqs.setdefault((incarnation, seq), id)
        self.note("appended", machine, seq, f"from {origin.seq}" if origin is not None else "")
        if known != id:
            self.fail(
                "a seq that names two records",
                f"{machine}: seq {seq} is {message.payload!r}, and was another one before",
            )
        self.places[id].append((machine, incarnation, seq))
        self._incarnations[machine].add(incarnation)
        if machine in self.world.machines:
            followed = self.followed.setdefault(machine, FollowedLog(self, machine))
            followed.take(incarnation, message, origin)
        if machine == "V" and id in self.sent:
            self.sent[id].era = self.era
        if machine == "V" and self.world.rest is not None:
            self.world.rest.checker.appended(incarnation, seq, message)
        if durable:
            self.newest[machine] = seq
        else:
            self._in_memory.add(incarnation)
        published = durable and not message.attributes.HasField("sink")
        if machine == "V" and published and _matches(self.reader_topics, message.attributes.source):
            self._on_reader[incarnation, seq] = id

    # -- following

    def followed_gap(self, machine: str, gap: Gap) -> None:
        self.note("followed gap", machine, Gap.Reason.Name(gap.reason), gap.after_seq, gap.before_seq)
        is_owed_to_nobody = self.was_unfollowed and gap.reason == Gap.REASON_RETENTION
        if not (self.allowed_gaps or is_owed_to_nobody or gap.incarnation in self._in_memory):
            what = f"{machine} tells a gap from {gap.after_seq} to {gap.before_seq} ({Gap.Reason.Name(gap.reason)})"
            self.fail("a gap that nothing explains", what)
        self._followed_gaps.append(gap)

    def is_record(self, origin: Origin, id: Id) -> bool:
        """The newest known seq of that log."""
        return self._seqs.setdefault((origin.incarnation, origin.seq), id) == id

    def torn(self, machine: str) -> None:
        """The followed records may be lost with the end of the log, and come again."""
        self.followed.pop(machine, None)
        if machine == "V" and self.world.rest is not None:
            self.world.rest.checker.torn()

    def emptied(self, machine: str) -> None:
        """Its folder is empty now. Followers of it report that, and it may get everything again."""
        self.followed.pop(machine, None)
        self._in_memory |= self._incarnations[machine]
        self.was_unfollowed = True  # it reads again what others have kept for nobody
        self.disturbed(machine)

    def in_followed_gap(self, incarnation: bytes, seq: int) -> bool:
        return any(
            gap.incarnation == incarnation
            and gap.after_seq < seq
            and (gap.reason == Gap.REASON_INCARNATION or seq < gap.before_seq)
            for gap in self._followed_gaps
        )

    # -- the history

    def reader_starts(self) -> None:
        self._reader_last.clear()

    def read(self, incarnation: bytes, seq: int, message: UMessage) -> None:
        id = uuids.to_bytes(message.attributes.id)
        self.note("read", seq)
        known = self._seqs.setdefault((incarnation, seq), id)
        if known != id:
            self.fail(
                "a seq that names two records",
                f"the history has another record under {seq} than the one that was committed",
            )
        sent = self.sent.get(id)
        if is_application(message) and (sent is None or sent.message != message):
            self.fail("phantom", f"the history has {message.payload!r}, which nobody has sent so")
        if seq <= self._reader_last.get(incarnation, 0):
            self.fail("reordered", f"the history reader got seq {seq} after {self._reader_last[incarnation]}")
        self._reader_last[incarnation] = seq
        self._reader_first.setdefault(incarnation, seq)
        self._read.add((incarnation, seq))
        self._owed_to_reader.pop(id, None)

    def reader_gap(self, gap: Gap) -> None:
        self.note("reader gap", Gap.Reason.Name(gap.reason), gap.after_seq, gap.before_seq)
        if gap.reason == Gap.REASON_INCARNATION:
            self._reader_gaps.append((gap.incarnation, -1, 1 << 62))
        self._reader_gaps.append((gap.incarnation, gap.after_seq, gap.before_seq))

    def _reader_lacks(self) -> list[tuple[bytes, int]]:
        return [
            place
            for place in self._on_reader
            if place not in self._read
            and place[1] > self._reader_first.get(place[0], 0)  # it began with the earliest record
            and not any(one == place[0] and low < place[1] < high for one, low, high in self._reader_gaps)
        ]

    # -- the end of a run

    @property
    def outstanding(self) -> int:
        """The number of owed messages. Dead letters count only at the very end, since they are read from disk."""
        dropped = self._over_quota()
        owed = sum(
            1
            for owed in self.owed.values()
            for id in owed
            if id not in self._maybe_dead and id not in dropped and not self._is_unclaimed(id)
        )
        return owed + len(self._unread()) + len(self._reader_lacks())

    def dead_letter(self, message: UMessage) -> None:
        self._maybe_dead.add(uuids.to_bytes(message.attributes.id))
        self.note("dead letter", message.payload[:40] if is_application(message) else "")

    def may_be_dead_letter(self, message: UMessage) -> bool:
        """Some gateway has made a dead letter of it, or was killed meanwhile."""
        return uuids.to_bytes(message.attributes.id) in self._maybe_dead

    def _unread(self) -> list[Sent]:
        """True if it is owed to the reader, and in no log."""
        return [sent for sent in self._owed_to_reader.values() if sent.id not in self.places]

    def _over_quota(self) -> set[Id]:
        """The messages of a flood that are in no log, if the gateway has counted as many as dropped."""
        missing = {
            id for owed in self.owed.values() for id, sent in owed.items() if sent.is_flood and id not in self.places
        }
        return missing if missing and len(missing) <= self.world.over_quota() else set()

    def forgive(self, letters: Iterable[tuple[Id, str]]) -> None:
        """Reported messages are not owed: dead letters, those beyond a quota, and gaps if a disk was torn or an absence
        was longer than retention."""
        reported = {id for id, _ in letters} | self._over_quota()
        for owed in self.owed.values():
            for id in [id for id in owed if id in reported or self._is_unclaimed(id)]:
                del owed[id]
        if not (self.allowed_gaps or self.has_expired):
            return
        for owed in self.owed.values():
            for id in list(owed):
                places = self.places.get(id, ())
                if any(self._in_gap(machine, seq) or self._is_allowed_gap(of, seq) for machine, of, seq in places):
                    del owed[id]

    def _is_unclaimed(self, id: Id) -> bool:
        """It waits for an endpoint that is not configured; readiness reports that, so that a person can adopt it."""
        if id not in self.places:  # a kill may have come between its commit and the acknowledgement
            return any(low < high for _, low, high in self.unclaimed)
        return any(
            one == machine and low < seq <= high
            for machine, _, seq in self.places[id]
            for one, low, high in self.unclaimed
        )

    def _is_allowed_gap(self, incarnation: bytes, seq: int) -> bool:
        return self.allowed_gaps and self.in_followed_gap(incarnation, seq)

    def _in_gap(self, machine: str, seq: int) -> bool:
        return any(one == machine and after < seq < before for one, after, before in self.gaps)

    def finish(self) -> None:
        for hearer, owed in self.owed.items():
            for sent in list(owed.values())[:3]:
                where = [(machine, seq) for machine, _, seq in self.places.get(sent.id, ())]
                self.fail(
                    "neither delivered nor told",
                    f"{hearer} never heard {sent}, acknowledged at {sent.acknowledged_at or 0:.3f} s, in logs as "
                    f"{where or 'nothing'}"
                    f" ({len(owed)} such messages)",
                )
        for sent in self._unread()[:3]:
            self.fail("neither delivered nor told", f"{sent} was acknowledged and is recorded by no log")
        lacks = self._reader_lacks()
        if lacks:
            self.fail(
                "neither delivered nor told",
                f"the history reader never got seq {lacks[0][1]}, and no gap ({len(lacks)} such records)",
            )


class FollowedLog:
    """Records that one gateway's logs have from other logs: each once, and those of a topic in their order there."""

    def __init__(self, checker: Checker, machine: str) -> None:
        self._checker, self._machine = checker, machine
        self._own: set[bytes] = set()  # incarnations
        self._ids: dict[Id, Origin | None] = {}
        self._origins: dict[Origin, Id] = {}
        self._last: dict[tuple[bytes, Key], int] = {}

    def take(self, incarnation: bytes, message: UMessage, origin: Origin | None) -> None:
        """One record more."""
        attributes = message.attributes
        id, fail = uuids.to_bytes(attributes.id), self._checker.fail
        self._own.add(incarnation)
        known = self._ids.setdefault(id, origin)
        if origin is None:
            if known is not None:
                what = f"{self._machine} has stored {message.payload!r}, which it had followed from seq {known.seq}"
                fail("a plain copy beside what was followed", what)
            return
        what = f"{self._machine} has {message.payload!r} from seq {origin.seq}"
        if origin.incarnation in self._own:
            fail("a loop", f"{what} of its own log")
        if not self._checker.is_record(origin, id):
            fail("an origin that is another record", what)
        if self._origins.setdefault(origin, id) != id:
            fail("an origin that is two records", what)
        elif known is not origin:
            fail("a record that was followed twice", f"{what}, and had it from {known}")
        topic = (origin.incarnation, uris.key(attributes.source))
        if origin.seq <= self._last.get(topic, 0):
            fail("reordered", f"{what}, behind seq {self._last[topic]} of the same topic")
        self._last[topic] = origin.seq


def _matches(patterns: Iterable[UUri], address: UUri) -> bool:
    return any(uris.matches(pattern, address) for pattern in patterns)


__all__ = ["Checker", "Sent", "Want", "Wish"]
