"""Which false claims of a service, or of an impostor, a streamer accepts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription_client import ServiceInterest, Status, Subscription, Want, sources
from usubscription_client.interest import InterestSource, merge

LOCAL = LocalUriProvider("dev1", 0x99, 1)
MINE = "//dev1/20/1/8001"
THEIRS = "//elsewhere/20/1/8001"


def sub(topic: str, subscriber: str, status: Status = Status.SUBSCRIBED) -> Subscription:
    return Subscription(uris.parse(topic), uris.parse(subscriber), status)


def listed(*listed_changes: Subscription) -> v4.FetchSubscriptionsResponse:
    return v4.FetchSubscriptionsResponse(
        subscriptions=[
            v4.Subscription(topic=one.topic, subscriber=one.subscriber, status=one.status + 1) for one in listed_changes
        ]
    )


class Liar:
    """A service of version 4 of dev1 that sends anything."""

    def __init__(self, transport: Any, *listed_changes: Subscription) -> None:
        self.listed_changes, self.asked, self._transport = listed_changes, 0, transport
        self._server = InMemoryRpcServer(transport, LocalUriProvider("dev1", 0, 4), drain_ms_max=0)

    async def open(self) -> Liar:
        await self._server.register_request_handler(3, self._list)
        await self._server.register_request_handler(4, lambda _: v4.NotificationsResponse())
        return self

    def _list(self, _: UMessage) -> v4.FetchSubscriptionsResponse:
        self.asked += 1
        return listed(*self.listed_changes)

    async def notify(self, listed_changes: v4.Subscription) -> None:
        message = UMessageBuilder.notification(uris.uri("dev1", 0, 4, 0x8000), LOCAL.get_source()).build_from_upayload(
            UPayload.pack(listed_changes)
        )
        await self._transport.send(message)

    async def close(self) -> None:
        await self._server.close()


async def test_a_service_has_nothing_to_say_about_others_topics_for_others_clients(world: Any) -> None:
    listed_changes = (
        sub(MINE, "//cloud/0/4/0"),  # one of its topics
        sub("//elsewhere/20/1/8002", "//dev1/10/1/0"),  # a client of its own
        sub(THEIRS, "//cloud/0/4/0"),
        sub("//*/20/1/8001", "//dev1/10/1/0"),
        sub("//elsewhere/FFFF/1/8001", "//dev1/10/1/0"),
        sub("//elsewhere/20/1/FFFF", "//dev1/10/1/0"),
        sub("//elsewhere/20/1/1", "//dev1/10/1/0"),
    )
    liar = await Liar(await world.transport("dev1", 0, 4), *listed_changes).open()
    source = ServiceInterest(
        await world.transport("dev1", 0x99), LOCAL, "dev1", lives_there=lambda authority: authority == "dev1"
    )
    await source.start()
    known = {uris.format(one.topic) for one in source.subscriptions()}
    assert known == {f"up:{MINE}", "up://elsewhere/20/1/8002"}
    assert source.ignored == 4, "and the last one means nothing at all"
    for one in (sub(THEIRS, "//cloud/0/4/0"), sub(MINE, "//third/0/4/0")):
        await liar.notify(v4.Subscription(topic=one.topic, subscriber=one.subscriber, status=v4.STATUS_SUBSCRIBED))
    async with asyncio.timeout(20):
        while "third" not in source.wants(uris.parse(MINE)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert source.wants(uris.parse(THEIRS)) == {}
    await source.stop()
    await liar.close()


async def test_one_that_lists_without_end_is_not_followed_and_the_last_known_serves(world: Any) -> None:
    liar = await Liar(await world.transport("dev1", 0, 4), sub(MINE, "//cloud/0/4/0")).open()
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "dev1", subscriptions_max=10)
    await source.start()
    assert source.healthy
    liar.listed_changes = tuple(sub(f"//dev1/20/1/{0x8000 + number:X}", "//cloud/0/4/0") for number in range(11))
    await source.refresh()
    assert not source.healthy
    assert source.wants(uris.parse(MINE)) == {"cloud": Want(None)}
    await source.stop()
    await liar.close()


async def test_notifications_that_say_nothing_make_nobody_fetch_all_the_time(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notification without a topic follows a Reset: the client fetches again, but not once for each of them."""
    liar = await Liar(await world.transport("dev1", 0, 4)).open()
    monkeypatch.setattr(sources, "FETCH_RETRY_FIRST_MS", 60_000)
    source = ServiceInterest(await world.transport("dev1", 0x99), LOCAL, "dev1")
    await source.start()
    before = liar.asked
    for _ in range(200):
        await liar.notify(v4.Subscription(subscriber=LOCAL.get_source(), status=v4.STATUS_UNSUBSCRIBED))
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert liar.asked == before
    await source.stop()
    await liar.close()


TOPICS = st.builds(
    uris.uri,
    st.sampled_from(["a", "*"]),
    st.sampled_from([0x20, 0x10020, 0xFFFF0020, 0xFFFF, 0xFFFFFFFF]),
    st.sampled_from([1, 2, 0xFF]),
    st.sampled_from([0x8001, 0xFFFF]),
)


@given(st.lists(st.tuples(TOPICS, st.sampled_from("bcd"), st.booleans()), max_size=20), TOPICS)
def test_a_lookup_finds_what_a_look_at_all_patterns_would(steps: list[tuple[Any, str, bool]], asked: Any) -> None:
    table = InterestSource("test")
    for topic, authority, wanting in steps:
        status = Status.SUBSCRIBED if wanting else Status.UNSUBSCRIBED
        table.put(Subscription(topic, uris.uri(authority, 1, 1, 0), status))
    every = list(table.subscriptions())
    assert table.count == len(every)
    expected = merge([{one.subscriber.authority_name: Want(None)} for one in every if uris.matches(one.topic, asked)])
    assert table.wants(asked) == expected
    again = InterestSource("test")
    again.replace(every)
    assert (again.wants(asked), again.count) == (expected, len(every))


def test_a_lookup_looks_at_few_of_many_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    table = InterestSource("test")
    for number in range(1_000):
        table.put(
            Subscription(uris.uri("a", 0xFFFF0000 + number, 1, 0x8001), uris.uri("b", 1, 1, 0), Status.SUBSCRIBED)
        )
    looks: list[Any] = []
    monkeypatch.setattr(uris, "matches", lambda *each: looks.append(each) or True)
    assert table.wants(uris.uri("a", 0x20, 1, 0x8001)) == {"b": Want(None)}
    assert not looks


def test_a_full_table_takes_what_it_knows_and_nothing_more() -> None:
    table = InterestSource("test", subscriptions_max=2)
    assert table.put(sub("//a/1/1/8001", "//b/1/1/0"))
    assert table.put(sub("//a/1/1/8001", "//c/1/1/0"))
    assert not table.put(sub("//a/1/1/8002", "//b/1/1/0"))
    assert table.put(Subscription(uris.parse("//a/1/1/8001"), uris.parse("//b/1/1/0"), Status.SUBSCRIBED, None, 5))
    assert table.put(sub("//a/1/1/8001", "//b/1/1/0", Status.UNSUBSCRIBED))
    assert table.put(sub("//a/1/1/8002", "//b/1/1/0"))
    assert table.count == 2
