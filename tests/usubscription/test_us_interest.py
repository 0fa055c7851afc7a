"""Which authorities want which topics: the table, the sources, the union."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.wire import WANTING
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client import (
    EmbeddedInterest,
    Interest,
    ServiceInterest,
    StaticFile,
    Status,
    Subscription,
    Want,
    interest,
    sources,
)
from usubscription_client.interest import InterestSource, merge
from usubscription_client.sources import REFRESH_MS

TOPIC = uris.parse("//dev1/20/1/8001")
OTHER = uris.parse("//dev1/20/1/8002")
LOCAL = LocalUriProvider("dev1", 0x99, 1)


class Changed:
    """Counts changes; waits until a condition is true."""

    def __init__(self, source: Any) -> None:
        self.count = 0
        self._news = asyncio.Event()
        source.on_change(self._changed)

    def _changed(self, _: Any) -> None:
        self.count += 1
        self._news.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


def sub(topic: str, subscriber: str, status: Status = Status.SUBSCRIBED, period: int | None = None) -> Subscription:
    return Subscription(uris.parse(topic), uris.parse(subscriber), status, None, period)


# -- the table
# --------------------------------------------------------------------------------------------------------------------


def test_both_pending_and_subscribed_want_and_the_smallest_period_wins() -> None:
    table = InterestSource("test")
    table.put(sub("//a/1/1/8001", "//b/1/1/0", period=500))
    table.put(sub("//a/1/1/8001", "//b/2/1/0", Status.SUBSCRIBE_PENDING, period=200))
    table.put(sub("//a/1/1/8001", "//c/1/1/0"))
    topic = uris.parse("//a/1/1/8001")
    assert table.wants(topic) == {"b": Want(200), "c": Want(None)}
    table.put(sub("//a/1/1/8001", "//b/3/1/0"))
    assert table.wants(topic)["b"] == Want(None)
    table.put(sub("//a/1/1/8001", "//b/3/1/0", Status.UNSUBSCRIBED))
    table.put(sub("//a/1/1/8001", "//b/2/1/0", Status.UNSUBSCRIBE_PENDING))
    assert table.wants(topic)["b"] == Want(500)
    assert table.wants(uris.parse("//a/1/1/8002")) == {}


def test_wildcard_topics_match_beside_exact_ones() -> None:
    table = InterestSource("test")
    table.put(sub("//a/FFFF0001/1/8001", "//b/1/1/0", period=100))
    table.put(sub("//a/1/1/8001", "//b/2/1/0", period=50))
    assert table.wants(uris.parse("//a/1/1/8001")) == {"b": Want(50)}
    assert table.wants(uris.parse("//a/70001/1/8001")) == {"b": Want(100)}
    assert {uris.format(topic) for topic in table.topics()} == {"up://a/FFFF0001/1/8001", "up://a/1/1/8001"}


SUBSCRIPTIONS = st.builds(
    Subscription,
    st.sampled_from([TOPIC, OTHER, uris.parse("//dev1/FFFF0020/1/8001")]),
    st.sampled_from([uris.parse(f"//{authority}/{ue}/1/0") for authority in "abc" for ue in (1, 2)]),
    st.sampled_from(Status),
    st.none(),
    st.none() | st.integers(1, 3),
)


@given(st.lists(SUBSCRIPTIONS), st.lists(SUBSCRIPTIONS))
def test_whatever_came_before_the_table_is_what_was_put_last(
    before: list[Subscription], after: list[Subscription]
) -> None:
    table, fresh = InterestSource("test"), InterestSource("test")
    for one in before:
        table.put(one)
        table.wants(TOPIC)  # fills the cache
    table.replace([])
    for one in after:
        changed = table.put(one)
        assert not table.put(one), "putting it again changes nothing"
        fresh.put(one)
        assert changed <= {uris.key(one.topic)}
    last = {(uris.key(one.topic), uris.key(one.subscriber)): one for one in after}
    for topic in (TOPIC, OTHER, uris.parse("//dev1/50020/1/8001")):
        wanted: dict[str, int | None] = {}
        for one in last.values():
            if one.status in WANTING and uris.matches(one.topic, topic):
                name, period = one.subscriber.authority_name, one.sample_period_ms
                known = wanted.get(name, period)
                wanted[name] = None if known is None or period is None else min(known, period)
        assert {name: want.sample_period_ms for name, want in table.wants(topic).items()} == wanted
        assert table.wants(topic) == fresh.wants(topic)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.builds(Want, st.none() | st.integers(1, 9)))))
def test_merging_is_the_same_in_any_order(parts: list[dict[str, Want]]) -> None:
    assert merge(parts) == merge(parts[::-1])


# -- a service
# --------------------------------------------------------------------------------------------------------------------


async def test_service_interest_fetches_and_follows(world: Any) -> None:
    await world.service()
    client = await world.client()
    await client.subscribe(TOPIC, sample_period_ms=100)
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "dev1")
    changed = Changed(source)
    await source.start()
    assert source.healthy
    assert source.can_list
    assert source.wants(TOPIC) == {"dev1": Want(100)}
    await client.subscribe(OTHER)
    await changed.until(lambda: source.wants(OTHER) == {"dev1": Want(None)})
    await client.subscribe(TOPIC)
    await changed.until(lambda: source.wants(TOPIC) == {"dev1": Want(None)})
    await client.unsubscribe(TOPIC)
    await changed.until(lambda: not source.wants(TOPIC))
    assert [uris.format(topic) for topic in source.topics()] == ["up://dev1/20/1/8002"]
    await source.ask(TOPIC)  # nothing to do
    await source.stop()


async def test_service_interest_serves_on_and_says_so_while_the_service_is_away(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FETCH_RETRY_FIRST_MS", 20)
    await world.service()
    client = await world.client()
    await client.subscribe(TOPIC)
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "dev1", refresh_ms=50, call_ms=100)
    changed = Changed(source)
    await source.start()
    await world.stop()
    await source.refresh()
    assert not source.healthy
    assert source.wants(TOPIC) == {"dev1": Want(None)}
    await world.service()
    await client.subscribe(OTHER)
    await changed.until(lambda: bool(source.wants(OTHER)))
    await source.refresh()
    assert source.healthy
    await source.stop()


async def test_service_interest_refetches_what_it_missed_when_the_connection_returns(world: Any) -> None:
    await world.service()
    client = await world.client()
    transport = await world.transport("dev1", 0x99)
    source = ServiceInterest(transport, LOCAL, "dev1", refresh_ms=REFRESH_MS)
    changed = Changed(source)
    await source.start()
    transport.disconnect()
    assert not source.healthy
    await client.subscribe(TOPIC)
    await client.subscribe(OTHER)
    await client.unsubscribe(OTHER)
    assert source.wants(TOPIC) == {}
    transport.reconnect()
    await changed.until(lambda: bool(source.wants(TOPIC)))
    assert source.wants(OTHER) == {}
    await source.stop()


async def test_service_interest_begins_again_after_a_reset(world: Any) -> None:
    await world.service(reset="all")
    client, reset = await world.client(), await world.raw("dev1", 0, 9)
    await client.subscribe(TOPIC)
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "dev1")
    changed = Changed(source)
    await source.start()
    await reset.call(4, 6)
    await changed.until(lambda: not source.wants(TOPIC))
    await source.refresh()
    await client.subscribe(OTHER)
    await changed.until(lambda: bool(source.wants(OTHER)))
    await source.stop()


class OldService:
    """A foreign version 3 service: only FetchSubscribers and RegisterForNotifications."""

    def __init__(self, transport: Any) -> None:
        self.subscribers: dict[tuple[str, int, int, int], list[UUri]] = {}
        self.registered: list[UUri] = []
        self.fetched: list[UUri] = []
        self._transport = transport
        self._server = InMemoryRpcServer(transport, LocalUriProvider("old", 0, 3), drain_ms_max=0)

    async def open(self) -> None:
        await self._server.register_request_handler(8, self._fetch)
        await self._server.register_request_handler(6, self._register)
        await self._server.register_request_handler(7, self._unregister)

    async def close(self) -> None:
        await self._server.close()

    def _fetch(self, request: UMessage) -> v3.FetchSubscribersResponse:
        topic = UPayload.of(request).unpack(v3.FetchSubscribersRequest).topic
        self.fetched.append(topic)
        found = self.subscribers.get(uris.key(topic), [])
        return v3.FetchSubscribersResponse(subscribers=[v3.SubscriberInfo(uri=one) for one in found])

    def _register(self, request: UMessage) -> v3.NotificationsResponse:
        self.registered.append(UPayload.of(request).unpack(v3.NotificationsRequest).topic)
        return v3.NotificationsResponse()

    def _unregister(self, _: UMessage) -> v3.NotificationsResponse:
        return v3.NotificationsResponse()

    async def tell(self, topic: UUri, subscriber: UUri, state: int) -> None:
        update = v3.Update(topic=topic, subscriber=v3.SubscriberInfo(uri=subscriber))
        update.status.state = v3.SubscriptionStatus.State.ValueType(state)
        await self._transport.send(
            UMessageBuilder.notification(uris.uri("old", 0, 3, 0x8000), uris.uri("dev1", 0x99, 1, 0)).pack(update)
        )


async def test_a_foreign_v3_service_is_asked_topic_by_topic_once_and_followed(world: Any) -> None:
    old = OldService(await world.transport("old", 0, 3))
    await old.open()
    topic, app = uris.parse("//old/20/1/8001"), uris.parse("//dev1/10/1/0")
    old.subscribers[uris.key(topic)] = [app]
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "old", call_ms=300)
    changed = Changed(source)
    await source.start()
    assert source.healthy
    assert not source.can_list
    assert source.wants(topic) == {}
    union = Interest([source])
    await asyncio.gather(*(union.ask(topic) for _ in range(5)))
    assert source.wants(topic) == {"dev1": Want(None)} == union.wants(topic)
    assert [uris.key(one) for one in old.registered] == [uris.key(topic)]
    assert union.version == 1
    await old.tell(topic, uris.parse("//third/10/1/0"), 1)
    await changed.until(lambda: set(source.wants(topic)) == {"dev1", "third"})
    await old.tell(topic, app, 0)
    await changed.until(lambda: set(source.wants(topic)) == {"third"})
    old.subscribers[uris.key(topic)] = [app]
    await source.refresh()
    assert set(source.wants(topic)) == {"dev1"}
    await source.stop()
    await old.close()


async def test_a_foreign_v3_service_that_went_away_is_asked_again_when_it_returns(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FETCH_RETRY_FIRST_MS", 20)
    old = OldService(await world.transport("old", 0, 3))
    await old.open()
    topic = uris.parse("//old/20/1/8001")
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "old", call_ms=100, refresh_ms=20)
    changed = Changed(source)
    await source.start()
    await old.close()
    await source.ask(topic)
    assert not source.healthy
    again = OldService(await world.transport("old", 0, 3))
    again.subscribers[uris.key(topic)] = [uris.parse("//dev1/10/1/0")]
    await again.open()
    await changed.until(lambda: bool(source.wants(topic)))
    await source.refresh()
    assert source.healthy
    await source.stop()
    await again.close()


async def test_topics_that_somebody_makes_up_keep_out_no_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (interest, sources):
        monkeypatch.setattr(module, "AUTHORITY_TOPICS_ASKED_MAX", 20)
        monkeypatch.setattr(module, "ASKS_AT_ONCE", 2)
    old = OldService(await world.transport("old", 0, 3))
    await old.open()
    real, honest = uris.parse("//dev1/20/1/8001"), uris.parse("//dev2/20/1/8001")
    old.subscribers = {uris.key(topic): [uris.parse("//third/10/1/0")] for topic in (real, honest)}
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "old", call_ms=5_000)
    changed = Changed(source)
    await source.start()
    union = Interest([source])
    await union.ask(real)
    for number in range(1_000):
        union.undecided(uris.uri("dev1", 0x66, 1, 0x8000 + number))
    union.undecided(honest)
    await changed.until(lambda: source.decided(honest))
    assert len(old.registered) <= 8, "it did not wait for those that were made up"
    while union._asking:
        await asyncio.wait(list(union._asking.values()))
    for number in range(1_000):
        await union.ask(uris.uri("dev1", 0x67, 1, 0x8000 + number))
    assert sum(map(len, source._asked.values())) == 20 + 1
    assert len(source._asked.answered) == 20 + 1
    assert source.decided(real), "what somebody wants stays"
    await source.stop()
    await old.close()


# -- embedded, static file, union
# -----------------------------------------------------------------------------------------------------


async def test_embedded_interest_is_fresh_before_the_subscriber_has_its_answer(world: Any) -> None:
    service = await world.service(reset="all")
    client, far = await world.client(), await world.client("dev2")
    await client.subscribe(OTHER)
    source = EmbeddedInterest(service)
    assert not source.healthy
    await source.start()
    assert source.healthy
    assert source.wants(OTHER) == {"dev1": Want(None)}
    await client.subscribe(TOPIC, sample_period_ms=9)
    assert source.wants(TOPIC) == {"dev1": Want(9)}
    await client.unsubscribe(TOPIC)
    assert source.wants(TOPIC) == {}
    assert far.version is None
    reset = await world.raw("dev1", 0, 9)
    await reset.call(4, 6)
    assert source.topics() == []


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


async def test_static_file_reads_what_the_rust_streamer_reads(tmp_path: Path) -> None:
    content = {
        "//authority-b/3039/1/8001": ["//authority-a/5678/1/1234"],
        "up://authority-a/5BA0/1/8001": ["//authority-b/5678/1/1234"],
    }
    source = StaticFile(write(tmp_path / "subscriptions.json", content))
    changed = Changed(source)
    await source.start()
    assert source.healthy
    assert source.can_list
    assert source.wants(uris.parse("//authority-b/3039/1/8001")) == {"authority-a": Want(None)}
    assert len(source.topics()) == 2
    write(tmp_path / "subscriptions.json", {})
    await source.refresh()
    assert (source.topics(), changed.count) == ([], 2)
    write(tmp_path / "subscriptions.json", "{")
    await source.refresh()
    assert not source.healthy


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not the JSON"),
        ("[]", "expected an object"),
        ('{"//a/1/1/8001": "x"}', "expected a list of subscriber URIs for topic '//a/1/1/8001', got a string"),
        ('{"//a/1/1/8001": [1]}', "expected a subscriber URI as a string, got a number"),
        ('{"//A/1/1/8001": []}', "lower-case"),
        ('{"//a/1/1/1": []}', "8000 to FFFE"),
        ('{"//a/1/1/8001": ["//*/1/1/0"]}', "has an authority and no wildcards"),
        ('{"//a/1/1/8001": ["/1/1/0"]}', "has an authority and no wildcards"),
        ('{"//a/1/1/8001": [], "//a/1/1/8001": []}', "listed twice"),
    ],
)
async def test_static_file_says_what_is_wrong(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UStatusError) as error:
        await StaticFile(write(tmp_path / "subscriptions.json", content)).start()
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert words in error.value.message


async def test_static_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UStatusError) as error:
        await StaticFile(tmp_path / "none.json").start()
    assert error.value.code == UCode.NOT_FOUND


async def test_the_union_of_several_sources(world: Any, tmp_path: Path) -> None:
    service = await world.service()
    client = await world.client()
    embedded = EmbeddedInterest(service)
    static = StaticFile(write(tmp_path / "subscriptions.json", {"//dev1/20/1/8001": ["//far/1/1/0"]}))
    absent = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "nobody", call_ms=50)
    union = Interest([embedded, static, absent])
    changed = Changed(union)
    await union.start()
    before = union.version
    assert union.wants(TOPIC) == {"far": Want(None)}
    assert union.unhealthy == ["nobody"]
    await client.subscribe(TOPIC, sample_period_ms=10)
    assert union.version > before
    assert changed.count == union.version
    assert union.wants(TOPIC) == {"far": Want(None), "dev1": Want(10)}
    assert len(union.topics()) == 1
    await union.stop()


# -- what has changed
# --------------------------------------------------------------------------------------------------------------------


class FakeSource(InterestSource):
    """Knows the subscriptions that the test puts."""

    def take(self, *subscriptions: Subscription) -> None:
        self._take(subscriptions)


def test_interest_says_of_which_topics_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest, "JOURNAL_TOPICS_MAX", 3)
    source = FakeSource("a")
    union = Interest([source])
    heard: list[Any] = []
    union.on_change(heard.append)
    one, two, three, four = (uris.uri("a", 1, 1, 0x8000 + number) for number in range(4))
    source.take(sub(uris.format(one), "//b/1/1/0"), sub(uris.format(two), "//b/1/1/0"))
    source.take(sub(uris.format(one), "//b/1/1/0"))
    assert heard == [{uris.key(one), uris.key(two)}], "what is known already is no change"
    assert union.version == 1
    source.take(sub(uris.format(three), "//b/1/1/0"))
    assert union.changed_since(0) == {uris.key(each) for each in (one, two, three)}
    assert union.changed_since(1) == {uris.key(three)}
    assert union.changed_since(2) == frozenset()
    source.take(sub(uris.format(four), "//b/1/1/0"))
    assert union.changed_since(0) is None, "the journal's capacity is smaller than all changes"
    assert union.changed_since(1) == {uris.key(three), uris.key(four)}
    source.take(*(sub(uris.format(each), "//b/1/1/0", Status.UNSUBSCRIBED) for each in (one, two, three, four)))
    assert union.changed_since(3) is None
    assert union.changed_since(4) == frozenset()


def test_a_filter_of_a_topic_goes_by_who_has_subscribed_to_just_that() -> None:
    source = FakeSource("a")
    source.take(sub("//a/1/1/8001", "//b/1/1/0"), sub("//a/FFFF0001/1/8001", "//c/1/1/0"))
    union, topic = Interest([source]), uris.parse("//a/1/1/8001")
    assert {*union.wants(topic)} == {"b", "c"}
    assert {*union.wants_by_name(topic)} == {"b"}
    assert {*union.wants_by_name(uris.parse("//a/FFFF0001/1/8001"))} == {"c"}


async def test_a_topic_that_found_no_room_among_those_to_be_asked_is_looked_at_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (interest, sources):
        monkeypatch.setattr(module, "AUTHORITY_TOPICS_ASKED_MAX", 3)
        monkeypatch.setattr(module, "ASKS_AT_ONCE", 1)
    old = OldService(await world.transport("old", 0, 3))
    await old.open()
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "old", call_ms=5_000)
    await source.start()
    union = Interest([source])
    changes: list[Any] = []
    union.on_change(changes.append)
    changed = Changed(union)
    topics = [uris.uri("dev1", 0x66, 1, 0x8000 + number) for number in range(6)]
    for topic in topics:
        union.undecided(topic)
    await changed.until(lambda: None in changes)  # some were answered, and none is waiting
    for topic in topics:
        union.undecided(topic)
    await changed.until(lambda: sum(map(source.decided, topics)) >= 3)
    await source.stop()
    await old.close()


async def test_a_source_that_has_moved_lists_what_the_one_before_could_until_it_knows(world: Any) -> None:
    """Else the streamer would listen only to known topics of a service that has to be asked about each."""
    await world.service()
    before, after = [ServiceInterest(await world.transport("dev1", 0x99 + one), LOCAL, "dev1") for one in range(2)]
    before.put(Subscription(TOPIC, uris.parse("//dev1/99/1/0"), Status.SUBSCRIBED))
    before._client.version = 3
    after.continue_from(before)
    assert not after.can_list
    assert after.wants(TOPIC) == before.wants(TOPIC) != {}
    after._client.version = 4
    assert after.can_list
