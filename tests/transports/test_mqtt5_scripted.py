"""Broker behaviour that no real broker shows on command: copies for overlapping subscriptions, announcements, refusals.

The broker is tests/transports/mqtt5_scripted.py. tests/brokers tests real brokers of other makes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import seeds
from tests.transports.mqtt5_answering import serving
from tests.transports.mqtt5_scripted import Knobs, Overlap, ScriptedBroker
from tests.transports.test_mqtt5_suspects import send_as_soon_as_connected
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link, session, window
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")
ALL_OF_SENDER = uris.parse("up://sender/FFFFFFFF/FF/FFFF")


def message(number: int, topic: UUri = TOPIC) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))


def notification(number: int) -> UMessage:
    """Each with an address of its own; 9 slashes in-vehicle."""
    source, sink = uris.parse(f"up://sender/10AB/3/{0x9000 + number:X}"), uris.parse("up://receiver/10AB/3/0")
    return UMessageBuilder.notification(source, sink).build_from_upayload(UPayload(b"%d" % number, 6))


def end(broker: ScriptedBroker, authority: str, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=broker.port, **settings), LocalUriProvider(authority, 0x10AB, 3))


class Heard:
    """Counts messages by their number. While `holds` is set none is taken."""

    def __init__(self) -> None:
        self.numbers: Counter[int] = Counter()
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.changed = asyncio.Condition()

    async def on_receive(self, message: UMessage) -> None:
        await self.lets_go.wait()
        self.numbers[int(message.payload)] += 1
        async with self.changed:
            self.changed.notify_all()

    async def until(self, last: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(lambda: last in self.numbers)


@pytest.mark.parametrize("overlap", Overlap)
async def test_each_message_is_heard_once_though_two_filters_match(overlap: Overlap) -> None:
    """By each listener, whatever the broker sends; and every copy is acknowledged."""
    async with (
        serving(ScriptedBroker(Knobs(overlap=overlap))) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver") as receiver,
    ):
        wide, narrow = Heard(), Heard()
        await receiver.register_listener(ALL_OF_SENDER, wide)
        await receiver.register_listener(TOPIC, narrow)
        for number in range(100):
            await sender.send(message(number))
        await asyncio.gather(wide.until(99), narrow.until(99))
        await broker.until(lambda: not broker.unacknowledged)
        assert wide.numbers == narrow.numbers == Counter(range(100))


@pytest.mark.parametrize("overlap", [Overlap.EACH_OWN_ID, Overlap.EACH_NO_ID])
async def test_a_copy_is_acknowledged_after_the_first_one_was_taken(overlap: Overlap) -> None:
    async with (
        serving(ScriptedBroker(Knobs(overlap=overlap))) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver") as receiver,
    ):
        heard = Heard()
        heard.lets_go.clear()
        await receiver.register_listener(ALL_OF_SENDER, heard)
        await receiver.register_listener(TOPIC, heard)
        await sender.send(message(1))
        await sender.send(message(2, uris.parse("up://sender/10AB/3/80CE")))  # behind both copies
        await broker.until(lambda: broker.unacknowledged >= 3)
        await asyncio.sleep(0.05)  # an acknowledgement that comes too early would be here
        assert broker.unacknowledged == 3
        heard.lets_go.set()
        await heard.until(2)
        await broker.until(lambda: not broker.unacknowledged)


async def test_what_was_not_taken_comes_again_on_the_next_connection_and_is_no_copy() -> None:
    async with (
        serving(ScriptedBroker(Knobs(overlap=Overlap.EACH_NO_ID))) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver", client_id="receiver") as receiver,
    ):
        heard = Heard()
        await receiver.register_listener(ALL_OF_SENDER, heard)
        await receiver.register_listener(TOPIC, heard)
        heard.lets_go.clear()
        await sender.send(message(1))
        await broker.until(lambda: broker.unacknowledged >= 2)
        connections = broker.connections
        broker.end_connections()
        await broker.until(lambda: broker.connections >= connections + 2)
        heard.lets_go.set()
        await heard.until(1)
        await broker.until(lambda: not broker.unacknowledged)


async def test_a_copy_of_a_filter_that_was_left_is_still_a_copy() -> None:
    """The broker had queued it before we left the filter."""
    knobs = Knobs(overlap=Overlap.EACH_NO_ID, waits_for_acknowledgements=True)
    async with (
        serving(ScriptedBroker(knobs)) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver") as receiver,
    ):
        heard, other = Heard(), Heard()
        await receiver.register_listener(TOPIC, heard)
        await receiver.register_listener(ALL_OF_SENDER, other)
        heard.lets_go.clear()
        for number in range(10):
            await sender.send(message(number))
        await broker.until(lambda: broker.unacknowledged > 0)
        await receiver.unregister_listener(ALL_OF_SENDER, other)
        heard.lets_go.set()
        await heard.until(9)
        await broker.until(lambda: not broker.unacknowledged)
        assert heard.numbers == Counter(range(10))


@pytest.mark.parametrize("wanted", [[TOPIC, ALL_OF_SENDER], [TOPIC]])
async def test_copies_of_a_resumed_session_are_heard_once(wanted: list[UUri]) -> None:
    """What an earlier process had subscribed to, and its successor subscribes to later, or not at all. What came before
    the second listener is the first one's."""
    async with (
        serving(ScriptedBroker(Knobs(overlap=Overlap.EACH_OWN_ID))) as broker,
        end(broker, "sender") as sender,
    ):
        async with end(broker, "receiver", client_id="receiver") as earlier:
            await earlier.register_listener(ALL_OF_SENDER, Heard())
            await earlier.register_listener(TOPIC, Heard())
        for number in range(20):
            await sender.send(message(number))
        async with end(broker, "receiver", client_id="receiver") as receiver:
            listeners = []
            for filter in wanted:
                listeners.append(Heard())
                await receiver.register_listener(filter, listeners[-1])
            receiver.all_registered()
            await sender.send(message(20))
            for heard in listeners:
                await heard.until(20)
            await broker.until(lambda: not broker.unacknowledged)
            assert listeners[0].numbers == Counter(range(21))
            assert set(listeners[-1].numbers.values()) == {1}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("seed", seeds(200, 4))
async def test_each_message_is_heard_whatever_comes_between(
    seed: int, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listeners come and go and are slow, in any order; the broker sends copies in any way. Once, unless a connection
    is lost."""
    rng = random.Random(seed)
    knobs = Knobs(overlap=rng.choice(list(Overlap)), waits_for_acknowledgements=rng.random() < 0.5)
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda *_: 1)
    async with (
        serving(ScriptedBroker(knobs)) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver", client_id="receiver") as receiver,
    ):
        heard, sometimes, sent = Heard(), Heard(), list[int]()
        is_listening = False
        await receiver.register_listener(TOPIC, heard)
        for number in range(60):
            choice = rng.random()
            if choice < 0.6:
                await send_as_soon_as_connected(sender, [message(number)])
                sent.append(number)
            elif choice < 0.75:
                turn = receiver.unregister_listener if is_listening else receiver.register_listener
                await turn(ALL_OF_SENDER, sometimes)
                is_listening = not is_listening
            elif choice < 0.8 and cuts:
                broker.end_connections()
            elif choice < 0.9:
                heard.lets_go.clear()
            else:
                heard.lets_go.set()
        heard.lets_go.set()
        await broker.until(lambda: not broker.unacknowledged and not broker.queued)
        assert set(heard.numbers) >= {number for number in sent if broker.heard_payloads[b"%d" % number]}
        if not cuts:
            assert heard.numbers == Counter(sent)


def test_what_is_known_of_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "COPIES_MAX", 3)
    copies = session.Copies()
    encoded = [message(number).attributes.SerializeToString() for number in range(4)]
    assert [copies.is_copy(one) for one in (*encoded, *encoded[1:])] == [False] * 4 + [True] * 3
    assert not copies.is_copy(encoded[0])  # the oldest was forgotten
    copies.new_connection(is_present=True)
    assert not copies.is_copy(encoded[3])


def test_one_id_of_two_sources_is_no_copy() -> None:
    copies, one = session.Copies(), message(1)
    other = UMessage()
    other.CopyFrom(one)
    other.attributes.source.resource_id += 1
    assert not copies.is_copy(one.attributes.SerializeToString())
    assert not copies.is_copy(other.attributes.SerializeToString())


def test_copies_are_looked_for_where_filters_overlap_or_an_earlier_process_has_left_some() -> None:
    copies = session.Copies()
    subscriptions = copies.subscriptions
    assert copies["a/b"] == 0
    subscriptions.add("a/b")
    subscriptions.add("c/d")
    assert copies["a/b"] == copies["c/d"] == 1
    wide = subscriptions.add("a/+")
    assert copies["a/b"] == 2
    subscriptions.remove(wide)
    assert copies["a/b"] == 2
    assert copies["c/d"] == 1
    copies.has_unknown_filters(10.0)
    assert copies["c/d"] == 2
    assert copies["e/f"] == 0
    copies.tick(10.0 + session.LEFT_S - 1)
    assert copies["c/d"] == 2
    copies.tick(10.0 + session.LEFT_S)
    assert copies["c/d"] == 1
    for number in range(session.LEFT_MAX):
        subscriptions.remove(subscriptions.add(f"e/{number}"))
    assert copies["a/b"] == 1, "the oldest was forgotten"
    subscriptions.remove(subscriptions.add("+/b"))
    copies.new_connection(is_present=True)
    assert copies["a/b"] == 2
    copies.new_connection(is_present=False)
    assert copies["a/b"] == 1


# What a broker announces.


async def test_a_session_that_is_kept_for_less_time_is_noted() -> None:
    async with serving(ScriptedBroker(Knobs(session_expiry_max_s=60))) as broker, end(broker, "one") as one:
        (note,) = one.notes
        assert "keeps our session for 60 s, and session_expiry_s asks for 300" in note
        assert not one.troubles
        broker.knobs.session_expiry_max_s = None
        await broker.until(lambda: len(broker.subscribed) == 1)  # to $SYS, on each connection
        broker.end_connections()
        await broker.until(lambda: len(broker.subscribed) == 2)
        assert not one.notes


async def test_a_broker_that_keeps_no_session_is_a_trouble() -> None:
    knobs = Knobs(session_expiry_max_s=0)
    async with serving(ScriptedBroker(knobs)) as broker, end(broker, "one", client_id="one") as one:
        await one.register_listener(TOPIC, Heard())
        (trouble,) = one.troubles
        assert "keeps no session" in trouble
        losses: list[str] = []
        one.on_loss(lambda text, _: losses.append(text))
        broker.end_connections()
        await broker.until(lambda: broker.subscribed.count("sender/10AB/0/3/80CD") == 2)
        assert not losses, "it was known that nothing would be kept"


async def test_a_subscription_of_qos_0_is_a_trouble_and_is_heard_all_the_same() -> None:
    async with (
        serving(ScriptedBroker(Knobs(granted_qos=0))) as broker,
        end(broker, "sender") as sender,
        end(broker, "receiver") as receiver,
    ):
        heard = Heard()
        await receiver.register_listener(TOPIC, heard)
        (trouble,) = receiver.troubles
        assert trouble.startswith("the broker grants QoS 0 only to 1 of our subscriptions (sender/10AB/0/3/80CD")
        await sender.send(message(1))
        await heard.until(1)
        await receiver.unregister_listener(TOPIC, heard)
        assert not receiver.troubles


async def test_a_broker_without_wildcards_is_not_asked_for_them() -> None:
    knobs = Knobs(announces={"WildcardSubscriptionAvailable": 0})
    async with serving(ScriptedBroker(knobs)) as broker, end(broker, "one") as one:
        with pytest.raises(UStatusError, match="the broker has no subscriptions with wildcards") as no:
            await one.register_listener(ALL_OF_SENDER, Heard())
        assert no.value.code == UCode.UNIMPLEMENTED
        await one.register_listener(TOPIC, Heard())
        assert not one.troubles
        assert not any("+" in topic_filter for topic_filter in broker.subscribed)


async def test_a_login_that_names_another_server_says_so() -> None:
    knobs = Knobs(connack=(0x9D, "we have moved"), announces={"ServerReference": "other.example:8883"})
    async with serving(ScriptedBroker(knobs)) as broker:
        with pytest.raises(UStatusError) as no:
            await end(broker, "one").open()
        assert "Server moved (we have moved; the broker names other.example:8883 instead" in no.value.message
        assert no.value.code == UCode.UNAVAILABLE


async def test_a_broker_that_sends_us_elsewhere_later_is_asked_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda attempt, _: waits.append(attempt) or 1)
    async with serving(ScriptedBroker()) as broker, end(broker, "one") as one:
        await one.register_listener(TOPIC, Heard())
        for number, reason in enumerate((0x9C, 0x97, 0x8E), 1):
            await broker.until(lambda: broker.subscribed.count("sender/10AB/0/3/80CD") == number)  # noqa: B023
            broker.end_connections(reason, {"ServerReference": "other.example"})
            broker.forget()
        await broker.until(lambda: broker.subscribed.count("sender/10AB/0/3/80CD") == 4)
        assert waits == [1, 2, 3]
        assert any("logs in" in trouble for trouble in one.troubles)


async def test_the_reason_why_a_subscription_or_a_message_is_refused_is_reported() -> None:
    knobs = Knobs(suback=lambda one: (0x97, "50 are enough"), puback=lambda one: (0x87, "not for you"))
    async with serving(ScriptedBroker(knobs)) as broker, end(broker, "one", sys_topics=False) as one:
        await one.register_listener(TOPIC, Heard())
        (trouble,) = one.troubles
        assert trouble.endswith("Quota exceeded (50 are enough)")
        (status,) = await one.send_batch([message(1)])
        assert status.message == "the broker refuses the message: Not authorized (not for you)"


@pytest.mark.parametrize(("answers", "why"), [(False, "does not answer in time"), (True, "ends it")])
async def test_a_broker_that_knows_no_mqtt_5(answers: bool, why: str) -> None:
    """amqtt takes the connection and never answers; others disconnect."""

    async def disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.close()

    broker = ScriptedBroker(Knobs(answers_connect=False))
    if answers:
        broker.serve = disconnect  # type: ignore[method-assign]
    async with serving(broker):
        with pytest.raises(UStatusError, match="does it speak MQTT 5") as no:
            await end(broker, "one", connect_timeout_ms=200).open()
        assert why in no.value.message
        assert no.value.code == UCode.UNAVAILABLE


async def test_a_broker_that_takes_its_own_packet_identifiers_for_ours_is_asked_with_others() -> None:
    """mochi does, while a resumed session has messages in flight."""
    async with serving(ScriptedBroker(Knobs(confuses_identifiers=True))) as broker, end(broker, "sender") as sender:
        async with end(broker, "receiver", client_id="receiver") as earlier:
            await earlier.register_listener(TOPIC, Heard())
        for number in range(30):
            await sender.send(message(number))
        async with end(broker, "receiver", client_id="receiver") as receiver:
            held, other = Heard(), Heard()
            held.lets_go.clear()
            await receiver.register_listener(TOPIC, held)
            await receiver.register_listener(uris.parse("up://sender/10AB/3/80CE"), other)
            assert not receiver.troubles
            await sender.send(message(30, uris.parse("up://sender/10AB/3/80CE")))
            held.lets_go.set()
            await asyncio.gather(held.until(29), other.until(30))
        assert broker.subscribed.count("sender/10AB/0/3/80CD") == 3, "twice by the second process"


# A broker that disconnects.


async def test_sys_topics_on_which_the_broker_disconnects_are_not_requested_again(tmp_path: Path) -> None:
    """Neither on the next connection nor by the next process (rumqttd)."""
    async with serving(ScriptedBroker(Knobs(disconnects_on="$SYS"))) as broker:
        for connections in (2, 3):
            one = end(broker, "one", client_id="one")
            one.remember_in(str(tmp_path / "one"))
            async with one:
                await one.register_listener(TOPIC, Heard())
                await broker.until(lambda: broker.connections == connections)  # noqa: B023
                await one.register_listener(ALL_OF_SENDER, Heard())
            assert broker.connections == connections
        assert broker.subscribed.count("$SYS/broker/publish/messages/dropped") == 1


async def test_a_broker_is_not_asked_for_sys_topics_where_the_settings_say_so() -> None:
    async with serving(ScriptedBroker()) as broker, end(broker, "one", sys_topics=False) as one:
        await one.register_listener(TOPIC, Heard())
        assert broker.subscribed == ["sender/10AB/0/3/80CD"]


async def test_topics_that_a_broker_finds_invalid_cost_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS IoT Core ends the connection over a topic with more than 7 slashes. After three of them no more are tried."""
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda *_: 1)
    async with serving(ScriptedBroker(Knobs(slashes_max=7))) as broker, end(broker, "sender") as one:
        batch = [notification(number) if number % 2 else message(number) for number in range(40)]
        done: dict[int, int] = {}
        while len(done) < len(batch):
            left = [number for number in range(len(batch)) if number not in done]
            statuses = await send_as_soon_as_connected(one, [batch[number] for number in left])
            answered = zip(left, (status.code for status in statuses), strict=True)
            done.update((number, code) for number, code in answered if code != UCode.UNAVAILABLE)
        assert done == {number: UCode.PERMISSION_DENIED if number % 2 else UCode.OK for number in range(40)}
        # each of them with others in flight, perhaps, and then alone
        assert broker.connections <= 1 + 2 * window.TOPICS_MIN
        assert any("over topics with 9 slashes" in trouble for trouble in one.troubles)


async def test_a_message_over_which_a_broker_ends_the_connection_is_answered_with_its_reason() -> None:
    async with serving(ScriptedBroker(Knobs(payload_bytes_max=10))) as broker, end(broker, "sender") as one:
        large = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(bytes(11), 6))
        (status,) = await one.send_batch([large])
        assert status.code == UCode.INVALID_ARGUMENT
        assert "Packet too large" in status.message
        (status,) = await send_as_soon_as_connected(one, [message(1)])
        assert not status.code
        assert broker.connections == 2


def test_the_slashes_of_topics_that_are_taken_are_not_refused() -> None:
    found, stream, one = window.Suspects(), (b"stream", b"", 1), message(1)
    denied = UStatusError(UCode.PERMISSION_DENIED, "invalid").status
    for number in range(window.TOPICS_MIN):
        assert found.skip_reason((b"other", b"", 1), 0.0, 9) is None
        found.lost_with((b"%d" % number, b"", 1), one, 0.0, denied, 9)
    refused = found.skip_reason((b"other", b"", 1), 0.0, 9)
    assert refused is not None
    assert refused.code == UCode.PERMISSION_DENIED
    assert found.skip_reason(stream, 0.0, 4) is None
    assert found.skip_reason((b"other", b"", 1), window.SKIPPED_S_MIN, 9) is None, "one is tried again ..."
    assert found.is_suspect((b"other", b"", 1), 9), "... alone"
    found.answered((b"other", b"", 1), 9)
    assert found.skip_reason((b"another", b"", 1), 0.0, 9) is None


async def test_what_a_resumed_session_brings_waits_for_the_listener_that_wants_it() -> None:
    """Off-vehicle all that one authority sends to another has one topic."""
    sink = uris.parse("up://receiver/10AB/3/0")
    sources = [uris.parse(f"up://sender/10AB/3/{resource:X}") for resource in (0x9001, 0x9002)]
    async with (
        serving(ScriptedBroker()) as broker,
        end(broker, "sender", mode="off-vehicle") as sender,
    ):
        settings = {"client_id": "receiver", "mode": "off-vehicle"}
        async with end(broker, "receiver", **settings) as earlier:
            for source in sources:
                await earlier.register_listener(source, Heard(), sink)
        for number, source in enumerate(sources):
            builder = UMessageBuilder.notification(source, sink)
            await sender.send(builder.build_from_upayload(UPayload(b"%d" % number, 6)))
        async with end(broker, "receiver", **settings) as receiver:
            for number, source in enumerate(sources):
                heard = Heard()
                await receiver.register_listener(source, heard, sink)
                await heard.until(number)
                assert heard.numbers == {number: 1}
            await broker.until(lambda: not broker.unacknowledged)


# A listener that calls.


class Service:
    """Answers requests on the transport that it is given."""

    def __init__(self, transport: Mqtt5Transport) -> None:
        self._transport, self.served = transport, 0

    async def on_receive(self, request: UMessage) -> None:
        self.served += 1
        response = UMessageBuilder.response_for_request(request.attributes)
        await self._transport.send(response.build_from_upayload(UPayload(request.payload, 6)))


METHOD = uris.parse("up://service/20AB/1/7")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
@pytest.mark.parametrize("kind", ["notification", "request"])
async def test_a_listener_calls_and_waits_for_the_answer(kind: str, mode: str, waits: bool) -> None:
    """Twice, one after the other, and each answer is heard once. HiveMQ sends nothing more until the message that the
    listener takes is acknowledged, and that waits for the listener."""
    async with (
        serving(ScriptedBroker(Knobs(waits_for_acknowledgements=waits))) as broker,
        end(broker, "service", mode=mode) as service,
        end(broker, "sender", mode=mode) as sender,
        end(broker, "caller", mode=mode) as caller,
        InMemoryRpcClient(caller, LocalUriProvider("caller", 0x10AB, 3)) as client,
    ):
        await service.register_listener(uris.parse("up://caller/10AB/3/0"), Service(service), METHOD)
        answers: list[bytes] = []
        done = asyncio.Event()

        class Calling:
            async def on_receive(self, message: UMessage) -> None:
                for _ in range(2):
                    answer = await client.invoke_method(METHOD, UPayload(b"call", 6))
                    answers.append(answer.data)
                done.set()

        own = uris.parse(f"up://caller/10AB/3/{'0' if kind == 'notification' else '5'}")
        source = uris.parse("up://sender/10AB/3/9001") if kind == "notification" else uris.parse("up://sender/10AB/3/0")
        await caller.register_listener(source, Calling(), own)
        builder = (
            UMessageBuilder.notification(source, own)
            if kind == "notification"
            else UMessageBuilder.request(source, own, 10_000)
        )
        await sender.send(builder.build_from_upayload(UPayload(b"go", 6)))
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        await broker.until(lambda: not broker.unacknowledged)
        assert answers == [b"call"] * 2
        assert broker.connections == 4, "one more, for the answers"
        assert not caller.troubles


async def test_where_there_is_no_connection_for_answers_calls_go_on_without_it() -> None:
    """A note says so. It comes back by itself, and with it what it had subscribed to."""
    async with (
        serving(ScriptedBroker()) as broker,
        end(broker, "service") as service,
        end(broker, "caller", client_id="caller") as caller,
        InMemoryRpcClient(caller, LocalUriProvider("caller", 0x10AB, 3)) as client,
    ):
        await service.register_listener(uris.parse("up://caller/10AB/3/0"), Service(service), METHOD)
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        class Calling:
            async def on_receive(self, message: UMessage) -> None:
                answers.put_nowait((await client.invoke_method(METHOD, UPayload(message.payload, 6))).data)

        await caller.register_listener(TOPIC, Calling())
        broker.knobs.connack = (0x97, "one connection is enough")
        await service.send(message(1, uris.parse("up://service/10AB/3/80CD")))
        await caller.register_listener(uris.parse("up://service/10AB/3/80CD"), Calling())
        await service.send(message(2, uris.parse("up://service/10AB/3/80CD")))
        assert await asyncio.wait_for(answers.get(), DEADLINE_S) == b"2"
        (note,) = caller.notes
        assert "one connection is enough" in note

        broker.knobs.connack = (0, "")
        caller._receiver.answers._retry_at_s = 0.0
        await service.send(message(3, uris.parse("up://service/10AB/3/80CD")))
        assert await asyncio.wait_for(answers.get(), DEADLINE_S) == b"3"
        assert not caller.notes
        (own,) = [name for name in broker.sessions if name.startswith(b"caller-answers-")]
        answer_topic = "service/20AB/0/1/7/caller/10AB/0/3/0"
        assert list(broker.sessions[own].filters) == [answer_topic]
        connections = broker.connections
        broker.forget()
        await broker.until(lambda: broker.connections >= connections + 3)
        await broker.until(lambda: any(answer_topic in session.filters for session in broker.sessions.values()))


async def test_nothing_overtakes_what_is_forbidden_when_the_rule_is_mended_in_between() -> None:
    """Of one call of `send_batch`, and of several: what was not sent yet is answered as what is in front of it."""
    asked = 0

    def mended_after_one(topic: str) -> tuple[int, str]:
        nonlocal asked
        asked += topic.endswith("80CD")
        return (0x87 if topic.endswith("80CD") and asked <= 1 else 0), ""

    other = uris.parse("up://sender/10AB/3/80CE")
    async with serving(ScriptedBroker(Knobs(puback=mended_after_one))) as broker, end(broker, "sender") as sender:
        messages = [message(number // 2, other if number % 2 else TOPIC) for number in range(40)]
        statuses = await asyncio.gather(sender.send_batch(messages[:20]), sender.send_batch(messages[20:]))
        codes = [status.code for status in (*statuses[0], *statuses[1])]
        assert codes[0::2] == [UCode.PERMISSION_DENIED] * 20
        assert codes[1::2] == [UCode.OK] * 20
        assert broker.heard["sender/10AB/0/3/80CD"] == 1
        (status,) = await sender.send_batch([message(0)])
        assert not status.code, "it is tried again"
