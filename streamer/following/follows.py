"""Which histories are followed into ours, and for which topics.

[[follow]], announcements, positions in our log -> Follows -> Followed: one conversation each (followed.py)
interest, recorded topics --------------------------^  '- a gateway: once it has handed over, a publisher: at once
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import structlog

from history.log.cursors import FollowedLogs
from storage.runtime import Runtime
from streamer.following.followed import COVERED, Follow, Followed
from streamer.following.not_kept import HISTORIES_SHOWN_MAX
from streamer.following.sorting import Intake
from streamer.reporting import Condition, Reporter, Sample, each
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import PUBLISHERS, OnPlainCopy
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Announcement, FollowedPlaces, Gap
from uprotocol.core.usubscription.wire import Entry, to_uri
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest, Topics

# of a conversation, or that there is none any more; values of a label of the metrics
FOLLOWING_STATES: Final = ("handed_over", "beside_copies", "away", "ended")
ENDED_MAX: Final = 1_000  # positions in histories that are not followed any more, some 600 bytes each
HISTORIES_FOLLOWED_MAX: Final = 4_096  # services: a fleet behind one gateway; each has a task and positions
# of one authority, found by announcements: a vehicle has some publishers with a history of their own
PUBLISHERS_OF_ONE_MAX: Final = 64
# announced publishers that are remembered until somebody wants a topic of theirs; others announce themselves again
IDLE_MAX: Final = 4_096
BEGIN_S_MAX: Final = 2.0  # a Subscribe waits so long for a new history to be followed; its caller waits longer
OTHER_PARTS: Final = "@"  # begins the keys of positions that other parts keep in the log
RUSHED_S: Final = 60.0  # no Subscribe waits for so long after one that waited in vain: all others wait behind it

GATEWAYS: Final = uris.uri(uris.WILDCARD_AUTHORITY, ids.ENTITY, ids.VERSION, ids.ANNOUNCEMENTS)

log = structlog.get_logger()


class Follows(Intake, UListener, Reporter):
    """All followed histories: those in `follows`, and those of publishers and gateways that announce themselves.

    Its state: the histories (`_followed`, with `_by_name` and `_named` to find them); the tasks that follow them
    (`_tasks`), and those to be created once the streamer runs (`_to_run`); histories that were announced and are not
    followed (`_idle`, `_refused`); and the calls that wait for a history (`_waits`).
    """

    def __init__(
        self,
        follows: Sequence[Follow],
        endpoints: Endpoints,
        hosted: HostedTransport,
        local: LocalUriProvider,
        interest: Interest,
        runtime: Runtime,
        on_gap: Callable[[UUri, Gap], None],
        backoff: Callable[[], Backoff],
        on_emptied: Callable[[UUri, str, int], None] = lambda service, endpoint, seq: None,
    ) -> None:
        """`on_gap(service, gap)` is called for records that are lost; `on_emptied(service, endpoint, seq)` if a log of
        ours that is lost had its records up to `seq`."""
        super().__init__(endpoints, hosted, local, runtime, on_gap, backoff, on_emptied)
        self._configured, self._hosted, self._interest = follows, hosted, interest
        self._followed: dict[str, Followed] = {}
        # histories by authority and by its family; and those that may have any topic
        self._by_name: dict[str, list[Followed]] = {}
        self._named: list[Followed] = []
        # publishers that have announced themselves and have no wanted topic; that of the latest announcement last
        self._idle: dict[uris.Key, UUri] = {}
        self._rushed_until = 0.0  # loop time, see RUSHED_S
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_running = self._is_stopped = False
        self._waits = set[asyncio.Timeout]()  # of answers, for the position in a history
        self._to_run: dict[str, Callable[[], Coroutine[None, None, None]]] = {}
        self._refused = 0  # announced histories beyond HISTORIES_FOLLOWED_MAX
        # keys of the positions in histories that are not followed any more, the oldest first
        self._ended: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Follows({list(self._followed)})"

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._followed.values())

    def named_topics(self) -> Iterator[UUri]:
        """Returns the patterns of all [[follow]] topics."""
        return chain.from_iterable(one.topics for one in self._configured)

    def services(self) -> list[UUri]:
        """Returns the services whose histories are followed, in whichever way they were found."""
        return [followed.service for followed in self]

    # -- life

    def load(self) -> None:
        """Find the histories to follow, before any message comes from them, and before anybody subscribes."""
        self._interest.on_change(self._interest_changed)
        for endpoint in self._endpoints:
            self._load(endpoint)
        for key, _ in _of_former_names(self.logs.durable.followed, self._endpoints):
            log.warning("a history was followed at an endpoint that is not configured", service=key)

    def _load(self, endpoint: Endpoint) -> None:
        for follow in self._configured:
            if follow.endpoint is endpoint and not follow.is_wide:
                self._follow(self._address(follow), endpoint, follow)
        known = self.logs.durable.followed
        for key, service in _of_former_names(known, self._endpoints):  # also to end what is not followed any more
            if self._endpoints.owner(uris.parse(service).authority_name) is endpoint:
                _inherit(known, [(key, service)], endpoint.name, service)
        for key in known.positions():
            if key.startswith(f"{endpoint.name}:"):
                self._resume(key, endpoint)

    def add_endpoint(self, endpoint: Endpoint, follows: Iterable[Follow]) -> None:
        """Follow, at a new endpoint, the histories in `follows`, and those that were followed there before."""
        self._configured = [*self._configured, *follows]
        self._load(endpoint)

    async def remove_endpoint(self, endpoint: Endpoint) -> None:
        """Stop following histories at this endpoint. Their positions stay in the log."""
        self._configured = [one for one in self._configured if one.endpoint is not endpoint]
        for followed in [one for one in self if one.endpoint is endpoint]:
            del self._followed[followed.key]
            self.histories = len(self._followed)
            for name in _names_of(followed.service.authority_name):
                self._by_name[name].remove(followed)
                if not self._by_name[name]:
                    del self._by_name[name]
        self._named = [one for one in self._named if one.endpoint is not endpoint]
        keys = [key for key in (*self._tasks, *self._to_run) if key.startswith(f"{endpoint.name}:")]
        for key in keys:
            self._to_run.pop(key, None)
        await end(*[self._tasks.pop(key, None) for key in keys])

    async def start(self) -> None:
        """Start to follow. Raises the error of the hosted transport."""
        await self._rpc.open()
        await self._hosted.register_listener(GATEWAYS, self, self.local.get_source())
        self._interest_changed(None)
        self._is_running = True
        for key, run in self._to_run.items():
            self._tasks[key] = asyncio.create_task(run(), name=f"follow {key}")
        self._to_run.clear()

    async def stop(self) -> None:
        """Stop following. May be called twice."""
        self._is_running = False  # histories that announce themselves now are found after the next start
        self._is_stopped = True
        for limit in self._waits:
            limit.reschedule(asyncio.get_running_loop().time())
        tasks, self._tasks = self._tasks, {}
        await end(*tasks.values())
        await self._frames.close()
        await self._rpc.close()

    def _address(self, follow: Follow) -> UUri:
        address = follow.service.address
        return uris.uri(follow.service.authority, address.ue_id, address.ue_version_major)

    def _resume(self, key: str, endpoint: Endpoint) -> None:
        """Follow a history as before the restart, whether it announces itself or not. If it must not be followed any
        more, ask it to push again."""
        service = uris.parse(key.partition(":")[2])
        follow = self._follow_for(service, endpoint)
        if follow is not None or service.ue_id >> 16:
            self._follow(service, endpoint, follow)
        elif FollowedPlaces.FromString(self.logs.durable.followed.position(key) or b"").ended:
            self._keep_ended(key)
        else:
            self._run(key, functools.partial(self._end, key, service, endpoint))

    async def _end(self, key: str, service: UUri, endpoint: Endpoint) -> None:
        """Ask a history that is not followed any more to push again, until it answers."""
        backoff = self.backoff()
        while True:
            try:
                await Followed(self, service, endpoint, None).end()
                break
            except UStatusError as error:
                if error.code in (UCode.PERMISSION_DENIED, UCode.UNIMPLEMENTED):
                    break
                await backoff.wait()
        self._keep_ended(key)
        log.info("a history is not followed any more: our position in it is kept", service=key)

    def _keep_ended(self, key: str) -> None:
        """Keep the position in a history that is not followed any more, for the day that it is followed again."""
        followed = self.logs.durable.followed
        self._ended[key] = None
        kept = FollowedPlaces.FromString(followed.position(key) or b"")
        kept.ended = True
        followed.keep(key, kept.SerializeToString(), at_once=True)
        followed.keep(COVERED + key, None)
        while len(self._ended) > ENDED_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            followed.keep(oldest, None)

    def _run(self, key: str, run: Callable[[], Coroutine[None, None, None]]) -> None:
        if self._is_running:
            self._tasks[key] = asyncio.create_task(run(), name=f"follow {key}")
        else:
            self._to_run[key] = run

    def _follow_for(self, service: UUri, endpoint: Endpoint) -> Follow | None:
        """Returns the section for this service; one that names it takes precedence over one that names many."""
        found = [one for one in self._configured if one.names(service, endpoint)]
        return min(found, key=lambda one: one.is_wide, default=None)

    def _follow(self, service: UUri, endpoint: Endpoint, follow: Follow | None) -> None:
        known = self.logs.durable.followed
        _inherit(known, _of_former_names(known, self._endpoints), endpoint.name, uris.format(service))
        followed = Followed(self, service, endpoint, follow)
        if followed.key in self._followed:
            return
        if len(self._followed) >= HISTORIES_FOLLOWED_MAX:
            self._refused += 1
            if self._refused == 1:
                log.error("no more histories can be followed", limit=HISTORIES_FOLLOWED_MAX, service=followed.key)
            return
        self._ended.pop(followed.key, None)
        self._followed[followed.key] = followed
        self.histories = len(self._followed)
        for name in _names_of(service.authority_name):
            self._by_name.setdefault(name, []).append(followed)
        if followed.is_named:
            self._named.append(followed)
        self._run(followed.key, followed.run)
        self._ingresses[endpoint.name].forget_verdicts()  # plain copies of its topics are doorbells now

    # -- announcements

    def on_announcement(self, message: EncodedMessage) -> bool:
        """Handle the announcement of a publisher's history; those of gateways come to `on_receive` directly."""
        self.on_receive(message.decoded())
        return False

    def on_receive(self, message: UMessage) -> None:
        """Follow the service that `message` announces. Its address was checked before."""
        try:
            announcement = UPayload.of(message).unpack(Announcement)
        except UStatusError:
            return
        source = message.attributes.source
        service = uris.uri(source.authority_name, source.ue_id, source.ue_version_major)
        endpoint = self._endpoints.owner(source.authority_name)
        if endpoint is None or not self.own_incarnations.isdisjoint(announcement.incarnations):
            return
        follow = self._follow_for(service, endpoint)
        known = self._followed.get(f"{endpoint.name}:{uris.format(service)}")
        if known is not None:
            known.announced()
        elif follow is not None:
            self._follow(service, endpoint, follow)
        elif service.ue_id >> 16:
            self._idle.pop(uris.key(service), None)
            self._idle[uris.key(service)] = service
            self._follow_idle([service])
            if len(self._idle) > IDLE_MAX:
                del self._idle[next(iter(self._idle))]

    def _follow_idle(self, services: Iterable[UUri]) -> None:
        """Follow those of these idle publishers that have a wanted topic."""
        for service in services:
            endpoint = self._endpoints.owner(service.authority_name)
            if endpoint is not None and self._has_room(endpoint, service):
                del self._idle[uris.key(service)]
                self._follow(service, endpoint, None)

    def _idle_with(self, topic: UUri) -> list[UUri]:
        """Returns the idle publishers that may have this topic."""
        if topic.authority_name == uris.WILDCARD_AUTHORITY or topic.ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE:
            return [one for one in self._idle.values() if ids.narrowed(one, topic) is not None]
        service = self._idle.get(uris.key(ids.of_publisher(topic))) if topic.ue_id & 0xFFFF else None
        return [service] if service is not None else []

    def _has_room(self, endpoint: Endpoint, service: UUri) -> bool:
        """True if this publisher has a wanted topic, and its host has fewer than PUBLISHERS_OF_ONE_MAX."""
        authority = service.authority_name
        there = (one for one in self._by_name.get(authority, ()) if one.service.authority_name == authority)
        if sum(not one.is_gateway for one in there) >= PUBLISHERS_OF_ONE_MAX:
            return False
        of_it = (one for one in self._of_names(service.authority_name) if self.is_wanted(endpoint, one))
        return any(ids.narrowed(service, one) is not None for one in chain(self.always_wanted(), of_it))

    # -- interest

    def rules_changed(self) -> None:
        """Follow what the rules, or the topics that are recorded, ask for from now on, and nothing else."""
        if self._is_running:
            self._interest_changed(None)

    def _interest_changed(self, topics: Topics) -> None:
        wants_all = not (self._interest.complete and self._interest.can_list)
        if topics is None:
            self._topics.clear()
            changed = [(topic, True) for topic in self._interest.topics()]
        else:
            changed = [(topic, bool(self._interest.wants_by_name(topic))) for topic in map(to_uri, topics)]
        for topic, is_wanted in changed:
            for name in _names_of(topic.authority_name):
                if is_wanted:
                    self._topics.setdefault(name, {})[uris.key(topic)] = topic
                elif (of_name := self._topics.get(name)) is not None:
                    of_name.pop(uris.key(topic), None)
                    if not of_name:
                        del self._topics[name]
        if topics is None or wants_all != self.wants_all:
            self.wants_all = wants_all
            self._follow_idle(list(self._idle.values()))
            for followed in self._followed.values():
                followed.listen_again()
            return
        for topic, is_wanted in changed:
            self._follow_idle(self._idle_with(topic) if is_wanted and self._idle else ())
            for followed in self._about(topic):
                followed.listen_for(topic)

    async def follow_before_answer(self, changes: Sequence[Entry]) -> None:
        """Wait a little, before the embedded service answers, for our position in a history that has just begun to be
        followed: what is published there later is followed, even if the network or we are away then."""
        now = asyncio.get_running_loop().time()
        begun = (one for one in self if now < one.announced_at + BEGIN_S_MAX and not one.is_gateway)
        new = [one for one in begun if not one.has_position.is_set()]
        is_rushed = now < self._rushed_until or self._is_stopped
        topics = [to_uri(one.topic) for one in changes] if new and not is_rushed else []
        for followed in [one for one in new if any(ids.narrowed(one.service, topic) for topic in topics)]:
            try:
                async with asyncio.timeout_at(followed.announced_at + BEGIN_S_MAX) as limit:
                    self._waits.add(limit)
                    try:
                        await followed.has_position.wait()
                    finally:
                        self._waits.discard(limit)
            except TimeoutError:
                if self._is_stopped:  # nobody asks the history any more
                    return
                self._rushed_until = asyncio.get_running_loop().time() + RUSHED_S
                what = "a subscription is answered though a history is silent: it counts there from when that answers"
                log.info(what, service=followed.key)

    # -- for the ingress

    def of_topic(self, endpoint: Endpoint, source: UUri) -> tuple[bool, OnPlainCopy | None]:
        """Returns whether a history at `endpoint` records this topic even if nobody wants it, and what is called with
        each plain message of it."""
        there = (one for one in self._about(source) if one.endpoint is endpoint and one.speaks_for(source))
        followed = min(there, key=lambda one: one.is_gateway, default=None)
        is_followed = followed is not None and followed.records(source)
        if followed is not None and not followed.is_gateway:
            return is_followed, followed.doorbell.on_doorbell
        return is_followed, self.on_announcement if uris.matches(PUBLISHERS, source) else None

    def _about(self, topic: UUri) -> Iterator[Followed]:
        """Returns the histories that may have this topic, and few others."""
        authority, kinds = topic.authority_name, {topic.ue_id & 0xFFFF, topic.ue_id >> 16}
        names = _names_of(authority) if authority != uris.WILDCARD_AUTHORITY else self._by_name
        found = chain((one for name in names for one in self._by_name.get(name, ())), self._named)
        if uris.WILDCARD_ENTITY_TYPE not in kinds:  # a publisher has topics of its type, and frontiers
            found = chain(one for one in found if one.is_gateway or one.kind in kinds)
        return iter({one.key: one for one in found}.values())

    # -- state

    def samples(self) -> Iterator[Sample]:
        for endpoint in self._endpoints:
            there = [one for one in self if one.endpoint is endpoint]
            states = Counter[str](one.state for one in there)
            states["ended"] = sum(key.startswith(f"{endpoint.name}:") for key in self._ended)
            shown = [state for state in FOLLOWING_STATES if there or states["ended"]]
            yield from each("followed", (endpoint.name,), {state: states[state] for state in shown})
            became = sum((one.counts for one in there), Counter[str]())
            yield from each("followed_records", (endpoint.name,), became)
            if there:
                yield "followed_not_kept", (endpoint.name,), sum(len(one.not_kept.topics) for one in there)

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each history that does not keep what is followed."""
        found = [note for followed in self for note in followed.not_kept.notes()]
        yield from found[:HISTORIES_SHOWN_MAX]
        if len(found) > HISTORIES_SHOWN_MAX:
            yield f"and {len(found) - HISTORIES_SHOWN_MAX} more histories do not keep what is followed of them"

    def conditions(self) -> Iterator[Condition]:
        for followed in self._followed.values():
            if followed.trouble and followed.follow is not None:
                what = f"{uris.format(followed.service)} can't be followed: {followed.trouble}"
                yield Condition(what, followed.endpoint.name)
        if self._refused:
            yield Condition(f"more than {HISTORIES_FOLLOWED_MAX} histories are to be followed, which is the limit")


def _of_former_names(followed: FollowedLogs, endpoints: Endpoints) -> Iterator[tuple[str, str]]:
    """Yields the key and the service of each position at an endpoint that is not configured any more."""
    for key in followed.positions():
        name, _, service = key.partition(":")
        if not key.startswith((COVERED, OTHER_PARTS)) and name not in endpoints:
            yield key, service


def _inherit(followed: FollowedLogs, former: Iterable[tuple[str, str]], endpoint: str, service: str) -> None:
    """What counts is the history, not the endpoint's name: continue where we were under another name, which is not
    configured any more. `former`: as `_of_former_names` yields them."""
    if followed.position(to := f"{endpoint}:{service}") is None:
        for key in [key for key, of in former if of == service][:1]:
            for prefix in ("", COVERED):
                followed.rename(prefix + key, prefix + to)


def _names_of(authority: str) -> set[str]:
    """Returns the names under which histories and topics of an authority are found: its own, and that of its family."""
    return {authority, uris.family_of(authority)} - {""}
