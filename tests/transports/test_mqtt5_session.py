"""The filters of the session: those that a broker refuses, disconnects on, or has still though no listener wants them.

A mosquitto behind a proxy that refuses filters as other brokers do: with a code in SUBACK, or by a disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.transports.mqtt5_proxy import RefusingProxy
from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link, reasons, receiving, session
from transports.mqtt5.losses import DROPPED_TOPIC
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = pytest.mark.broker
MakeBroker = Callable[..., Broker]

DEADLINE_S = 20
SESSION = {"client_id": "gateway", "session_expiry_s": 3_600}
TOPICS = [uris.parse(f"up://sender/10AB/3/{0x8001 + number:X}") for number in range(8)]
FILTERS = [f"sender/10AB/0/3/{0x8001 + number:X}" for number in range(8)]
GOOD, BAD = TOPICS[0], TOPICS[1]
GOOD_FILTER, BAD_FILTER = FILTERS[0], FILTERS[1]


def end(port: int, authority: str = "gateway", **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=port, **settings), LocalUriProvider(authority, 0x10AB, 3))


def publish(number: int, topic: UUri = GOOD) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))


class Heard:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_receive(self, message: UMessage) -> None:
        self.numbers.append(int(message.payload))


async def until(holds: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert holds(), what


async def reconnected(one: Mqtt5Transport, proxy: RefusingProxy) -> None:
    before = proxy.connections()
    one._link.drop("a network that fails")
    await until(lambda: proxy.connections() > before and one.connected, "it is back")


async def send(broker: Broker, messages: Sequence[UMessage]) -> None:
    async with end(broker.port, "sender") as sender:
        for status in await sender.send_batch(messages):
            assert not status.code


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconnect is not waited for."""
    monkeypatch.setattr(link, "RECONNECT_MS", (10,))


@asynccontextmanager
async def refusing(broker: Broker) -> AsyncIterator[RefusingProxy]:
    proxy = RefusingProxy(broker.host, broker.port)
    await proxy.start()
    yield proxy
    await proxy.stop()


def refusals(one: Mqtt5Transport) -> list[str]:
    """Its troubles with filters: others may be there after some short connections."""
    return [trouble for trouble in one.troubles if "topic filter" in trouble]


def asked_for(proxy: RefusingProxy) -> list[str]:
    """Since the last connection, but for the count of what the broker drops."""
    last = len(proxy.asked) - proxy.asked[::-1].index("")
    return [topic_filter for topic_filter in proxy.asked[last:] if topic_filter != DROPPED_TOPIC]


# Refused with a code.


@pytest.mark.parametrize("reason", [0x80, 0x83, 0x91, 0x97, 0x89, 0xFF])
async def test_what_a_broker_refuses_for_now_is_noted_and_named(
    broker: Broker, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asked for again, until it is granted; no other filter notices, also on a new connection."""
    monkeypatch.setattr(link, "TICK_MS", 20)
    bad, good = Heard(), Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        proxy.refused[BAD_FILTER] = reason
        await one.register_listener(BAD, bad)
        await one.register_listener(GOOD, good)
        (trouble,) = refusals(one)
        assert BAD_FILTER in trouble
        assert reasons.name_of(reason) in trouble
        for number in range(2):
            await send(broker, [publish(number), publish(99, BAD)])
            await until(lambda last=number: good.numbers[-1:] == [last], "the other one goes on")  # type: ignore[misc]
            assert one.connected
            assert refusals(one) == [trouble]
            await reconnected(one, proxy)
        monkeypatch.setattr(session, "REFUSED_MS", (1, 1))
        await reconnected(one, proxy)
        connections = proxy.connections()
        asked = proxy.asked.count(BAD_FILTER)
        await until(lambda: proxy.asked.count(BAD_FILTER) > asked + 2, "it is asked for again and again")
        assert proxy.connections() == connections
        proxy.refused.clear()
        await until(lambda: not refusals(one), "it is granted")
        await send(broker, [publish(7, BAD)])
        await until(lambda: bad.numbers == [7], "it is heard")


@pytest.mark.parametrize(
    ("reason", "code"),
    [(0x87, UCode.PERMISSION_DENIED), (0x8F, UCode.INVALID_ARGUMENT), (0xA2, UCode.UNIMPLEMENTED)],
)
async def test_what_a_broker_refuses_for_good_is_not_registered(broker: Broker, reason: int, code: int) -> None:
    good = Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        await one.register_listener(GOOD, good)
        proxy.refused[BAD_FILTER] = reason
        for _ in range(2):
            with pytest.raises(UStatusError, match=BAD_FILTER) as no:
                await one.register_listener(BAD, good)
            assert no.value.code == code
        assert refusals(one) == []
        assert BAD_FILTER not in proxy.unsubscribed
        await reconnected(one, proxy)
        assert asked_for(proxy) == [GOOD_FILTER]
        assert one._session.filters == (GOOD_FILTER,)


async def test_what_a_broker_refuses_when_we_are_back_is_a_trouble_until_it_is_left(broker: Broker) -> None:
    bad, good = Heard(), Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        await one.register_listener(BAD, bad)
        await one.register_listener(GOOD, good)
        for reason in (0x87, 0x97):
            proxy.refused[BAD_FILTER] = reason
            await reconnected(one, proxy)
            assert [BAD_FILTER in trouble for trouble in refusals(one)] == [True]
            await send(broker, [publish(reason)])
            await until(lambda last=reason: good.numbers[-1:] == [last], "the other one goes on")  # type: ignore[misc]
        await one.unregister_listener(BAD, bad)
        assert refusals(one) == []


async def test_open_succeeds_without_a_filter_on_which_the_broker_disconnects(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    async with refusing(broker) as proxy:
        proxy.disconnects_on.add(BAD_FILTER)
        one = end(proxy.port)
        statuses = one.register_before_open([(topic, None) for topic in TOPICS], heard)
        assert not any(status.code for status in statuses)
        with pytest.raises(UStatusError) as no:
            await one.open()
        assert no.value.code == UCode.UNAVAILABLE
        async with one:  # as its owner tries again
            await until(lambda: refusals(one) and one.connected, "the culprit is known")
            assert BAD_FILTER in refusals(one)[0]
            await until(lambda: sum(sub.known for sub in one._session.subscriptions.values()) == len(TOPICS) - 1, "all")
            asked = len(proxy.asked)
            await one.register_listener(BAD, heard)
            assert BAD_FILTER not in proxy.asked[asked:], "to ask would cost the connection"


async def test_many_that_are_refused_are_counted(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REFUSED_NAMED_MAX", 2)
    async with refusing(broker) as proxy, end(proxy.port) as one:
        proxy.refused = dict.fromkeys(FILTERS, 0x97)
        statuses = await one.register_listeners([(topic, None) for topic in TOPICS], Heard())
        assert not any(status.code for status in statuses)
        *named, rest = refusals(one)
        assert [topic_filter in trouble for topic_filter, trouble in zip(FILTERS, named, strict=False)] == [True] * 2
        assert "6 more" in rest


# Refused by hanging up.


@pytest.mark.parametrize("hung", [False, True])
async def test_the_filter_on_which_a_broker_disconnects_is_found_and_left_out(
    broker: Broker, hung: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ disconnects on a forbidden SUBSCRIBE. `hung`: a broker that does not answer it at all."""
    monkeypatch.setattr(session, "RECONNECT_PAUSE_MS", (1, 1))
    monkeypatch.setattr(link, "TICK_MS", 20)
    if hung:
        monkeypatch.setattr(link.Connection.ask, "__defaults__", (0.2,))
    heard = Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        await one.register_listener(GOOD, heard)
        (proxy.silent_about if hung else proxy.disconnects_on).add(BAD_FILTER)
        statuses = await one.register_listeners([(topic, None) for topic in TOPICS], heard)
        assert not any(status.code for status in statuses), "they are noted"
        await until(lambda: refusals(one) and one.connected, "the culprit is known")
        (trouble,) = refusals(one)
        assert BAD_FILTER in trouble
        assert "lost 2 times" in trouble
        connections = 3  # one more for each of the two disconnects
        await until(lambda: proxy.connections() == connections and one.connected, "it is back for good")
        await until(lambda: sum(sub.known for sub in one._session.subscriptions.values()) == len(TOPICS) - 1, "all")
        numbers = [number for number in range(len(TOPICS)) if number != 1]
        await send(broker, [publish(number, TOPICS[number]) for number in numbers])
        await until(lambda: heard.numbers == numbers, "all others are heard")
        await reconnected(one, proxy)
        assert set(asked_for(proxy)) == {FILTERS[number] for number in numbers}, "it is not asked for with each of them"
        assert [BAD_FILTER in trouble for trouble in refusals(one)] == [True]
        assert proxy.connections() == connections + 1


async def test_a_filter_on_which_the_broker_disconnects_is_requested_again_later_and_granted(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HANG_UP_MS", (1, 1))
    monkeypatch.setattr(session, "RECONNECT_PAUSE_MS", (1, 1))
    monkeypatch.setattr(link, "TICK_MS", 20)
    heard = Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        proxy.disconnects_on.add(BAD_FILTER)
        await one.register_listener(BAD, heard)
        await until(lambda: any("lost 3 times" in trouble for trouble in refusals(one)), "it is asked for again")
        proxy.disconnects_on.clear()
        await until(lambda: not refusals(one), "it is granted")
        await send(broker, [publish(3, BAD)])
        await until(lambda: heard.numbers == [3], "it is heard")


async def test_one_filter_too_many_costs_only_itself(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 6 for each connection, one of which is the count of what the broker drops."""
    monkeypatch.setattr(session, "RECONNECT_PAUSE_MS", (1, 1))
    monkeypatch.setattr(link, "TICK_MS", 20)
    heard = Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        proxy.subscriptions_max = 6
        for topic in TOPICS:
            await one.register_listener(topic, heard)
        await until(lambda: len(refusals(one)) == 3 and one.connected, "three are too many")
        await until(lambda: not one._session._suspects or one.connected, "it is back")
        await send(broker, [publish(number, topic) for number, topic in enumerate(TOPICS)])
        await until(lambda: len(heard.numbers) >= 5, "the others are heard")
        assert one.connected


async def test_a_network_that_fails_while_filters_have_no_answer_leaves_no_trouble(broker: Broker) -> None:
    heard = Heard()
    async with refusing(broker) as proxy, end(proxy.port) as one:
        await until(lambda: DROPPED_TOPIC in proxy.asked, "it is up")
        proxy.stall()
        registering = asyncio.ensure_future(one.register_listeners([(topic, None) for topic in TOPICS], heard))
        await until(lambda: len(one._session._asking) == len(TOPICS), "they are asked for")
        await asyncio.sleep(0)
        one._link.drop("a network that fails")
        proxy.mend()
        assert not any(status.code for status in await registering)
        await until(lambda: all(sub.known for sub in one._session.subscriptions.values()), "one by one")
        assert refusals(one) == []
        assert not one._session._suspects


# Filters that nobody wants any more.


async def test_what_is_unsubscribed_while_the_broker_is_away_is_not_sent_any_more(own_broker: Broker) -> None:
    heard = Heard()
    async with refusing(own_broker) as proxy, end(proxy.port, **SESSION) as one:
        await one.register_listener(GOOD, heard)
        await one.register_listener(BAD, heard)
        proxy.cut()
        await until(lambda: not one.connected, "it is away")
        await one.unregister_listener(BAD, heard)
        proxy.mend()
        await until(lambda: proxy.unsubscribed == [BAD_FILTER], "it is unsubscribed")
        await until(lambda: one._session.filters == (GOOD_FILTER,), "the broker has said so")
        await send(own_broker, [publish(n, BAD) for n in range(50)] + [publish(1)])
        await until(lambda: heard.numbers == [1], "the other one is heard")
        assert not one.dropped["unwanted"]


async def test_what_the_next_process_does_not_want_is_unsubscribed(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as its owner says that all listeners are there, or after a while; what is wanted waits for neither."""
    monkeypatch.setattr(link, "TICK_MS", 20)
    file = str(tmp_path / "transport.json")
    heard = Heard()

    async def run(topics: Sequence[UUri], *, says_so: bool) -> Mqtt5Transport:
        one = end(own_broker.port, **SESSION, receive_maximum=20)
        one.remember_in(file)
        await one.open()
        for topic in topics:
            await one.register_listener(topic, heard)
        if says_so:
            one.all_registered()
        return one

    first = await run(TOPICS, says_so=True)
    await first.close()
    await send(own_broker, [publish(n, BAD) for n in range(100)] + [publish(100)])
    second = await run([GOOD, TOPICS[2]], says_so=True)
    await until(lambda: heard.numbers == [100], "what is wanted does not wait for what is not")
    assert second.dropped["unwanted"] == 100
    await until(lambda: set(second._session.filters) == {GOOD_FILTER, FILTERS[2]}, "unsubscribed")
    await send(own_broker, [publish(n, BAD) for n in range(50)] + [publish(101)])
    await until(lambda: heard.numbers == [100, 101], "heard")
    assert second.dropped["unwanted"] == 100, "the broker no longer sends it"
    await second.close()
    monkeypatch.setattr(receiving, "UNCLAIMED_MS_MAX", 100)
    third = await run([GOOD], says_so=False)
    await until(lambda: third._session.filters == (GOOD_FILTER,), "after a while")
    await third.close()


async def test_a_topic_that_an_unknown_process_has_left_in_the_session_is_unsubscribed_when_it_is_heard(
    own_broker: Broker,
) -> None:
    """One without a file, or killed before it was written."""
    heard = Heard()
    first = end(own_broker.port, **SESSION)
    async with first:
        await first.register_listener(BAD, heard)
    await send(own_broker, [publish(number, BAD) for number in range(3)])
    async with refusing(own_broker) as proxy, end(proxy.port, **SESSION) as second:
        await until(lambda: len(second._receiver.unclaimed) == 3, "they wait for a listener")
        second.all_registered()
        await until(lambda: proxy.unsubscribed == [BAD_FILTER], "once")
        await until(lambda: second._session.filters == (), "the broker has said so")
        await send(own_broker, [publish(number, BAD) for number in range(3)])
        await second.register_listener(GOOD, heard)
        await send(own_broker, [publish(9)])
        await until(lambda: heard.numbers == [9], "heard")
        assert second.dropped["unwanted"] == 3


async def test_a_filter_that_is_wanted_late_is_not_unsubscribed(own_broker: Broker, tmp_path: Path) -> None:
    """Listeners have time, as long as nobody says that they are all there."""
    file, heard = str(tmp_path / "transport.json"), Heard()
    async with refusing(own_broker) as proxy:
        for messages in ([publish(5, BAD)], []):
            one = end(proxy.port, **SESSION)
            one.remember_in(file)
            async with one:
                await one.register_listener(BAD, heard)
                if not messages:
                    one.all_registered()
                    await until(lambda: heard.numbers == [5], "what had come meanwhile")
            await send(own_broker, messages)
        assert proxy.unsubscribed == []


async def test_a_killed_process_has_left_its_filters_in_the_file(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "TICK_MS", 20)
    file = tmp_path / "transport.json"
    first = end(own_broker.port, **SESSION)
    first.remember_in(str(file))
    await first.open()
    await first.register_listener(GOOD, Heard())
    await first.register_listener(BAD, Heard())
    await until(lambda: file.exists() and BAD_FILTER in file.read_text(), "it is written while we run")
    left = file.read_text()
    for task in first._link._tasks:  # as a kill would: it does not come back
        task.cancel()
    first._link.drop("as a kill would")
    second = end(own_broker.port, **SESSION)
    second.remember_in(str(file))
    async with second:
        second.all_registered()
        await until(lambda: second._session.filters == (), "unsubscribed")
    file.write_text(left)
    async with refusing(own_broker) as proxy:
        third = end(proxy.port, client_id="another", session_expiry_s=3_600)
        third.remember_in(str(file))
        async with third:
            third.all_registered()
            assert third._session.filters == (), "of another session"
            assert proxy.unsubscribed == []
    await first.close()


@pytest.mark.parametrize("text", ['{"session": 1, "dropped": 2, "filters": 3}', '{"session": "x", "dropped": 2}', "{"])
async def test_a_file_that_says_nothing_of_filters(broker: Broker, tmp_path: Path, text: str) -> None:
    file = tmp_path / "transport.json"
    file.write_text(text)
    one = end(broker.port, **SESSION)
    one.remember_in(str(file))
    async with one:
        one.all_registered()
        assert one._session.filters == ()
