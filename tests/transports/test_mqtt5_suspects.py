"""Brokers that disconnect on a message instead of refusing it: the other messages must get past it, and none is
lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.transports.mqtt5_answering import serving
from tests.transports.test_mqtt5_connection import DEADLINE_S, FakeBroker, end
from transports.base import NOT_TRIED
from transports.mqtt5 import Mqtt5Transport, link, packets, window, wire
from transports.mqtt5.connection import TakenOver
from transports.mqtt5.window import LOSSES_MIN, Suspects
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISH = wire.PUBLISH_BITS | wire.QOS1
FORBIDDEN, ALLOWED = uris.parse("up://sender/10AB/3/8001"), uris.parse("up://sender/10AB/3/8002")


def message(topic: UUri, number: int) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))


class Strict(FakeBroker):
    """Hangs up on a message of a topic that is forbidden."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = self.answers | {PUBLISH}
        self.forbidden = b"sender/10AB/0/3/8001"
        self.taken: list[bytes] = []
        self.hung_up = 0
        self.is_silent = False  # it answers nothing instead

    def _answer(self, first: int, body: bytes) -> bytes:
        if first != PUBLISH:
            return super()._answer(first, body)
        publish = wire.read_publish(first, body)
        if publish.topic == self.forbidden:
            if self.is_silent:
                return b""
            self.hung_up += 1
            raise ConnectionResetError
        self.taken.append(publish.payload)
        return wire.pubacks([publish.packet_id])


async def send_as_soon_as_connected(one: Mqtt5Transport, messages: Sequence[UMessage]) -> list[UStatus]:
    async with asyncio.timeout(DEADLINE_S):
        while not one.connected:  # noqa: ASYNC110  # a callback could come too late to be registered here
            await asyncio.sleep(0.001)
        return await one.send_batch(messages)


def let_time_pass(one: Mqtt5Transport) -> None:
    """Until all that was passed over is to be tried again."""
    known = one._window.suspects.by_stream
    known.update({stream: suspect._replace(try_at_s=0.0) for stream, suspect in known.items()})


async def test_others_get_past_a_message_on_which_a_broker_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda *_: 1)
    batch = [message(FORBIDDEN, 0), message(ALLOWED, 1), message(FORBIDDEN, 2), message(ALLOWED, 3)]
    async with serving(Strict()) as broker, end(broker) as one:
        for _ in range(LOSSES_MIN):
            statuses = await send_as_soon_as_connected(one, batch)
            assert {status.code for status in statuses} == {UCode.UNAVAILABLE}
        assert not broker.taken
        statuses = await send_as_soon_as_connected(one, batch)
        assert [status.code for status in statuses] == [UCode.UNAVAILABLE, UCode.OK, UCode.UNAVAILABLE, UCode.OK]
        assert "Does the broker take it?" in statuses[0].message
        assert statuses[2].message == NOT_TRIED, "what is behind it in its stream does not overtake it"
        assert broker.taken == [b"1", b"3"]
        assert "messages of 1 streams" in one.troubles[0]

        let_time_pass(one)  # it is tried again, alone: what is in front of it is not lost with it
        statuses = await send_as_soon_as_connected(one, [message(ALLOWED, 4), *batch[:2]])
        assert [status.code for status in statuses] == [UCode.OK, UCode.UNAVAILABLE, UCode.UNAVAILABLE]
        assert broker.hung_up == LOSSES_MIN + 1
        assert broker.taken == [b"1", b"3", b"4"]

        broker.forbidden = b""  # the access rule is mended
        let_time_pass(one)
        statuses = await send_as_soon_as_connected(one, [batch[0], batch[2]])
        assert {status.code for status in statuses} == {UCode.OK}
        assert "streams" not in "".join(one.troubles)


async def test_a_message_without_any_answer_does_not_wait_for_ever_while_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VerneMQ answered nothing where a topic is forbidden."""
    monkeypatch.setattr(window, "PUBACK_MS_MAX", 200)
    monkeypatch.setattr(link, "TICK_MS", 20)
    async with serving(Strict()) as broker, end(broker) as one:
        broker.is_silent = True
        waiting = asyncio.create_task(one.send_batch([message(FORBIDDEN, 0)]))
        async with asyncio.timeout(DEADLINE_S):
            while not waiting.done():
                await one.send_batch([message(ALLOWED, 1)])
                await asyncio.sleep(0)
        (status,) = waiting.result()
        assert status.code == UCode.UNAVAILABLE
        assert broker.taken


async def test_one_that_was_lost_with_others_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them it was nobody can tell, and after a new connection the first one is alone."""
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda *_: 1)
    many = [message(ALLOWED, number) for number in range(32)]
    async with serving(Strict()) as broker, end(broker) as one:
        await send_as_soon_as_connected(one, many)  # so that several may be in flight
        statuses = await send_as_soon_as_connected(one, [message(FORBIDDEN, 0), *many])
        assert {status.code for status in statuses} == {UCode.UNAVAILABLE}
        assert not one._window.suspects.by_stream


@pytest.mark.parametrize("why", [TimeoutError("silent"), TakenOver(packets.Answer(0x8E, {}))])
async def test_a_lost_network_makes_no_message_a_suspect(why: OSError) -> None:
    async with serving(Strict()) as broker, end(broker) as one:
        broker.is_silent = True
        sending = asyncio.create_task(one.send_batch([message(FORBIDDEN, 0)]))
        await broker.expect(PUBLISH)
        assert one._link.connection is not None
        one._link.connection.drop(why)
        await sending
        assert not one._window.suspects.by_stream


def test_a_stream_is_passed_over_for_longer_each_time() -> None:
    suspects, stream, one = Suspects(), (b"stream", b"", 1), message(FORBIDDEN, 0)
    waits = []
    for _ in range(LOSSES_MIN + 7):
        suspects.lost_with(stream, one, 1_000.0)
        waits.append(next(wait for wait in range(400) if suspects.skip_reason(stream, 1_000.0 + wait, 4) is None))
    assert waits == [0] * (LOSSES_MIN - 1) + [5, 10, 20, 40, 80, 160, 300, 300]
    suspects.answered(stream, 4)
    assert not suspects.by_stream
    suspects.lost_with(stream, one, 1_000.0)
    assert suspects.skip_reason(stream, 1_000.0, 4) is None, "the count starts again"


def test_suspects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.mqtt5.window.SUSPECTS_MAX", 3)
    suspects = Suspects()
    streams = [(b"%d" % number, b"", 1) for number in range(4)]
    for stream in streams:
        suspects.lost_with(stream, message(FORBIDDEN, 0), 0.0)
    assert [suspects.is_suspect(stream, 4) for stream in streams] == [False, True, True, True]
