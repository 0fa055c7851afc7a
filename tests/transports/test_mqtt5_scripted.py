"""What brokers do that no broker here does on command: copies for overlapping subscriptions, announcements, refusals.

The broker is tests/transports/mqtt5_scripted.py. tests/brokers tries real brokers of other makes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.transports.mqtt5_answering import serving
from tests.transports.mqtt5_scripted import Knobs, Overlap, ScriptedBroker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, subscriptions
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")
ALL_OF_SENDER = uris.parse("up://sender/FFFFFFFF/FF/FFFF")


def message(number: int, topic: UUri = TOPIC) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))


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


def test_what_is_known_of_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "COPIES_MAX", 3)
    copies = subscriptions.Copies()
    encoded = [message(number).attributes.SerializeToString() for number in range(4)]
    assert [copies.is_copy(one) for one in (*encoded, *encoded[1:])] == [False] * 4 + [True] * 3
    assert not copies.is_copy(encoded[0])  # the oldest was forgotten
    copies.new_connection()
    assert not copies.is_copy(encoded[3])


def test_one_id_of_two_sources_is_no_copy() -> None:
    copies, one = subscriptions.Copies(), message(1)
    other = UMessage()
    other.CopyFrom(one)
    other.attributes.source.resource_id += 1
    assert not copies.is_copy(one.attributes.SerializeToString())
    assert not copies.is_copy(other.attributes.SerializeToString())


def test_copies_are_looked_for_where_filters_overlap_or_an_earlier_process_has_left_some() -> None:
    copies = subscriptions.Copies()
    assert not copies.may_come("a/b", 1)
    assert copies.may_come("a/b", 2)
    assert copies.may_come("a/b", 1)  # one of the two was left since
    assert not copies.may_come("c/d", 1)
    copies.left_filters(10.0)
    assert copies.may_come("c/d", 1)
    copies.tick(10.0 + subscriptions.LEFT_S - 1)
    assert copies.may_come("c/d", 1)
    copies.tick(10.0 + subscriptions.LEFT_S)
    assert not copies.may_come("c/d", 1)
    copies.new_connection()
    assert not copies.may_come("a/b", 1)
