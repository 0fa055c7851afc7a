"""Delivery: complete, in order, as fast as the listener takes it, and acknowledged last; and the pull side.

2,000 in one batch -> 2,000, in order    slow listener -> slow sender, nothing lost     listener fails -> it comes again

Under pressure: large messages, too large ones, too many, and those on their way when their sender closes.

small, large, small -> in order        too large -> refused, or it arrives        flood -> slow listener -> slow sender
owner allows SMALL_MAX --  send [small, exactly, too large, small] -> [OK, OK, INVALID_ARGUMENT, OK]
                      --  arrive  small, exactly, too large, small -> small, exactly, small; counted as too_large
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from transports.conformance.base import SENT_AT_ONCE, Ends, Pair, TransportHarness, spec
from transports.conformance.messages import (
    ALPHA,
    BETA,
    GAMMA,
    PROBE,
    code_of,
    codes,
    notification,
    publish,
    reply,
    request,
    topic,
)
from transports.conformance.sending import expired
from transports.conformance.sinks import BatchSink, Sink
from uprotocol.status import UStatusError
from uprotocol.transport import ENVELOPE_BYTES_MAX, Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

BATCH = 2_000
PROCESS_S_MAX = 60.0  # for an interpreter to start and import the plugin


class Refusing(Sink):
    """Its awaitable fails for the first `failures` messages that are not probes."""

    def __init__(self, deadline_s: float, failures: int) -> None:
        super().__init__(deadline_s)
        self.failures = failures

    async def on_receive(self, message: UMessage) -> None:
        super().on_receive(message)
        if message.payload != PROBE and self.failures:
            self.failures -= 1
            raise UStatusError(UCode.UNAVAILABLE, "not now")


def numbers(heard: Sink) -> list[int]:
    return [int(payload) for payload in heard.payloads if payload.isdigit()]


def firsts(values: list[int]) -> list[int]:
    """Each value once, in the order of its first occurrence."""
    return list(dict.fromkeys(values))


class DeliveryConformance(TransportHarness):
    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_large_batch_arrives_complete_and_in_order(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], self.traffic(BATCH))
        await heard.expect(BATCH)
        assert numbers(heard) == list(range(BATCH))

    async def streams(self, pair: Pair, count: int) -> tuple[list[UUri], BatchSink]:
        """`count` topics, and one listener for all of them."""
        sources, heard = [topic(resource=0x9B00 + number) for number in range(count)], BatchSink(self.deadline_s)
        for source in sources:
            await self.listen(pair, source, reply(), heard)
        return sources, heard

    async def test_each_stream_keeps_its_order(self, pair: Pair) -> None:
        sources, heard = await self.streams(pair, 8)
        messages = [notification(b"%d" % number, sources[number % 8]) for number in range(1_600)]
        await self.send_all(pair[0], messages)
        await heard.expect(1_600)
        for source in sources:
            arrived = [int(m.payload) for m in heard.messages if m.payload != PROBE and m.attributes.source == source]
            assert arrived == sorted(arrived)
            assert len(arrived) == 200

    async def test_batches_sent_at_once_keep_each_their_order(self, pair: Pair) -> None:
        sources, heard = await self.streams(pair, 4)
        await asyncio.gather(*(self.send_all(pair[0], self.traffic(SENT_AT_ONCE, source)) for source in sources))
        await heard.expect(4 * SENT_AT_ONCE)
        for source in sources:
            arrived = [int(m.payload) for m in heard.messages if m.attributes.source == source]
            assert arrived == list(range(SENT_AT_ONCE))

    async def test_batches_of_one_stream_keep_the_order_of_the_calls(self, pair: Pair) -> None:
        """A sender that answers each arriving batch without waiting for its last answer sends like this."""
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        messages = self.traffic(4 * SENT_AT_ONCE)
        parts = [messages[start : start + SENT_AT_ONCE] for start in range(0, len(messages), SENT_AT_ONCE)]
        await asyncio.gather(*(self.send_all(pair[0], part) for part in parts))
        await heard.expect(len(messages))
        assert numbers(heard) == list(range(len(messages)))

    async def test_both_directions_at_once(self, pair: Pair) -> None:
        there = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        back = await self.listen((pair[1], pair[0]), topic("beta"), reply(ALPHA), BatchSink(self.deadline_s))
        await asyncio.gather(
            self.send_all(pair[0], self.traffic(SENT_AT_ONCE)),
            self.send_all(pair[1], self.traffic(SENT_AT_ONCE, topic("beta"), reply(ALPHA))),
        )
        for heard in (there, back):
            await heard.expect(SENT_AT_ONCE)
            assert numbers(heard) == list(range(SENT_AT_ONCE))

    async def test_a_slow_listener_loses_nothing(self, pair: Pair) -> None:
        heard = await self.gated(pair)
        messages = await self.flood()
        sending = asyncio.ensure_future(self.send_in_parts(pair[0], messages))
        await heard.expect(1)
        await asyncio.sleep(self.settle_s)
        heard.gate.set()
        await sending
        await heard.expect(self.flood_messages)
        assert firsts(numbers(heard)) == list(range(self.flood_messages))

    async def test_what_was_not_taken_comes_again(self, pair: Pair) -> None:
        self.needs(Capability.PUSH | Capability.ACK)
        heard = Refusing(self.deadline_s, failures=2)
        await self.listen(pair, topic(), reply(), heard)
        await self.send_all(pair[0], self.traffic(3))
        for number in range(3):
            await heard.expect_payload(b"%d" % number)
        await heard.until(
            lambda: not heard.failures and firsts(numbers(heard)) == [0, 1, 2] and len(numbers(heard)) >= 4,
            "a redelivery",
        )
        assert await self.settle(pair[0], heard)

    async def test_a_listener_may_await_a_message_that_is_behind(self, pair: Pair) -> None:
        """A listener that makes a call while it handles a message does so."""
        heard = await self.gated(pair)
        opener = await self.listen(pair, topic(resource=0x9B00), reply(), Sink(self.deadline_s))
        await self.send_all(pair[0], [notification(b"1"), notification(b"2", topic(resource=0x9B00))])
        await opener.expect(1)
        heard.gate.set()
        assert await self.settle(pair[0], heard) == [b"1"]

    async def test_two_processes(self, pair: Pair) -> None:
        """All messages of alpha to another process come back from there, in order."""
        self.needs(Capability.PUSH)
        plugin, settings = self.peer_process(GAMMA)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = ["-m", "transports.conformance.peer", plugin, GAMMA, json.dumps(settings)]
        peer = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert peer.stdout is not None
        try:
            async with asyncio.timeout(PROCESS_S_MAX):
                assert await peer.stdout.readline() == b"ready\n"
            heard = BatchSink(self.deadline_s)
            await pair[0].register_listener(topic(GAMMA), heard, reply(ALPHA))
            await self.reach(pair[0], heard, notification(PROBE, sink=reply(GAMMA)))
            await self.send_all(pair[0], self.traffic(BATCH, sink=reply(GAMMA)))
            await heard.expect(BATCH)
            assert numbers(heard) == list(range(BATCH))
        finally:
            peer.stdin.close()  # type: ignore[union-attr]
            await peer.wait()

    # The pull side.

    @spec("dsn~utransport-receive-error-unimplemented~1")
    async def test_pull_is_what_is_declared(self, pair: Pair) -> None:
        expected = UCode.NOT_FOUND if Capability.PULL in self.capabilities else UCode.UNIMPLEMENTED
        assert await code_of(pair[1].receive(topic(), reply())) == expected

    @spec("local~l1-receive-result")
    @spec("dsn~utransport-receive-error-notfound~2")
    async def test_receive_answers_the_oldest_that_matches(self, pair: Pair) -> None:
        self.needs(Capability.PULL)
        await self.send_all(pair[0], [*self.traffic(3), request(b"a request")])
        assert [(await self.pulled(pair[1])).payload for _ in range(3)] == [b"0", b"1", b"2"]
        assert await code_of(pair[1].receive(topic(), reply())) == UCode.NOT_FOUND

    @spec("local~l1-receive-result")
    @spec("dsn~up-attributes-ttl-timeout~1")
    async def test_receive_never_answers_what_has_expired(self, pair: Pair) -> None:
        self.needs(Capability.PULL)
        await self.inject(expired())
        await self.send_all(pair[0], [notification(b"fresh")])
        assert (await self.pulled(pair[1])).payload == b"fresh"

    @spec("local~l1-nosink")
    async def test_receive_without_sink_filter_answers_messages_without_sink(self, pair: Pair) -> None:
        self.needs(Capability.PULL | Capability.PUBLISH_WITHOUT_SINK)
        await self.send_all(pair[0], [notification(b"with sink"), publish(b"without")])
        assert (await self.pulled(pair[1], sink=False)).payload == b"without"

    async def test_receive_refuses_filters_that_match_nothing(self, pair: Pair) -> None:
        self.needs(Capability.PULL)
        assert await code_of(pair[1].receive(reply(ALPHA), reply())) == UCode.INVALID_ARGUMENT

    async def pulled(self, end: UTransport, *, sink: bool = True) -> UMessage:
        """Call `receive` until it returns a message."""
        async with asyncio.timeout(self.deadline_s):
            while True:
                try:
                    return await end.receive(topic(), reply() if sink else None)
                except UStatusError as error:
                    if error.code != UCode.NOT_FOUND:
                        raise
                    await asyncio.sleep(0.001)


STALLED_S = 0.5  # without progress for so long, all queues are full
LAST_WORDS = 500
SMALL_MAX: Final = 1 << 16  # of a payload: a limit of an owner
TOO_LARGE: Final = SMALL_MAX + ENVELOPE_BYTES_MAX + 4_096  # more than a network may allow for its own headers
SIZES: Final = (1, SMALL_MAX, TOO_LARGE, 2, TOO_LARGE, 3)
FLOOD_BYTES: Final = 96 << 20  # more than Arrivals can hold
PADDING = b" " * 1_024  # of each message, so that a few thousand are more than the buffers of a socket


class PressureConformance(TransportHarness):
    async def test_a_large_payload_is_not_overtaken(self, pair: Pair) -> None:
        """Not even if it is sent in pieces, compressed, or on its own link."""
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        sizes = [1, self.payload_bytes_max, 2, self.payload_bytes_max // 2, self.payload_bytes_max // 16, 3, 4]
        await self.send_all(pair[0], [notification(bytes(size)) for size in sizes])
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect(len(sizes) + 1)
        assert [len(payload) for payload in heard.payloads] == [*sizes, len(b"end")]

    async def test_what_is_too_large_is_refused_or_arrives(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        large = notification(bytes(self.payload_bytes_max * 4))
        statuses = await pair[0].send_batch([large, notification(b"small")])
        assert statuses[0].code in (UCode.OK, UCode.INVALID_ARGUMENT, UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE)
        if statuses[0].code != UCode.UNAVAILABLE:
            assert statuses[1].code == UCode.OK
        if statuses[1].code == UCode.UNAVAILABLE:
            return  # the connection was lost, and the message was not answered OK
        await heard.expect_payload(b"small")
        arrived = [len(payload) for payload in heard.payloads if payload != b"small"]
        assert arrived == ([len(large.payload)] if statuses[0].code == UCode.OK else []), (
            f"it was answered {statuses[0]}"
        )

    @spec("dsn~utransport-registerlistener-start-invoking-listeners~1")
    async def test_a_slow_listener_is_felt_by_the_sender(self, pair: Pair) -> None:
        """Neither end takes more than its queues hold while a listener takes nothing."""
        heard = await self.gated(pair)
        sent: list[UMessage] = []
        flood = await self.flood(padding=PADDING)
        sending = asyncio.ensure_future(self.send_in_parts(pair[0], flood, sent))
        try:
            handed_over = await _stalled(sending, heard, sent)
            sent_all = sending.done()
        finally:
            heard.gate.set()
        await sending
        assert handed_over < self.flood_messages, (
            "a listener that takes nothing got all messages: limit those that wait for it"
        )
        assert not (sent_all and self.slows_senders), (
            f"all {self.flood_messages} were sent while the listener took none: limit your queues"
        )
        await heard.until(lambda: heard.messages[-1].payload == flood[-1].payload, "the last of the flood")
        assert firsts([int(payload) for payload in heard.payloads]) == list(range(self.flood_messages))

    async def test_what_was_answered_ok_arrives_though_its_sender_closes(self, pair: Pair) -> None:
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        assert codes(await pair[0].send_batch(self.traffic(LAST_WORDS, padding=PADDING))) == [UCode.OK] * LAST_WORDS
        await pair[0].close()
        await heard.expect(LAST_WORDS)
        assert [int(payload) for payload in heard.payloads] == list(range(LAST_WORDS))

    # The size limit of an owner.

    async def limited(self, ends: Ends, authority: str) -> Pair:
        """Open ends; the owner of the end of `authority` allows only small messages."""
        pair = await ends(ALPHA), await ends(BETA)
        pair[authority == BETA].message_bytes_max = SMALL_MAX
        for end in pair:
            await end.open()
        return pair

    @spec("dsn~utransport-send-error-invalid-parameter~1")
    async def test_what_is_larger_than_its_owner_allows_is_not_sent(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        pair = await self.limited(ends, ALPHA)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        statuses = await pair[0].send_batch([notification(bytes(size)) for size in SIZES])
        assert codes(statuses) == [UCode.INVALID_ARGUMENT if size == TOO_LARGE else UCode.OK for size in SIZES]
        assert all(status.message for status in statuses if status.code), (
            "the sender must get the limit in the message of the status"
        )
        await self._only_small_ones_arrived(pair, heard)

    async def test_what_is_larger_than_its_owner_allows_is_not_taken(self, ends: Ends) -> None:
        self.needs(Capability.PUSH)
        pair = await self.limited(ends, BETA)
        heard = await self.listen(pair, topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], [notification(bytes(size)) for size in SIZES])
        await self._only_small_ones_arrived(pair, heard)
        assert pair[1].connected, "a message that is too large must not end the connection"
        dropped = pair[1].dropped
        assert dropped["too_large"] == (0 if self.network_drops_too_large else 2), f"got {dropped}"

    async def _only_small_ones_arrived(self, pair: Pair, heard: Sink) -> None:
        await self.send_all(pair[0], [notification(b"end")])
        await heard.expect_payload(b"end")
        assert [len(payload) for payload in heard.payloads] == [1, SMALL_MAX, 2, 3, len(b"end")]

    async def test_a_slow_listener_of_large_messages_is_not_handed_all_of_them(self, pair: Pair) -> None:
        """A limit in messages alone is not enough: a few thousand large ones fill the memory of a small computer."""
        heard = await self.gated(pair)
        size = self.payload_bytes_max
        count = FLOOD_BYTES // size + 1
        sending = asyncio.ensure_future(self._send_large(pair[0], size, count))
        try:
            handed_over = await _stalled(sending, heard)
        finally:
            heard.gate.set()
        await sending
        assert handed_over < count, (
            f"a listener that takes nothing got {handed_over * size >> 20} MiB: limit waiting messages in bytes, too"
        )
        await heard.until(lambda: len({one.attributes.id.lsb for one in heard.messages}) == count, "all of the flood")

    async def _send_large(self, sender: UTransport, size: int, count: int) -> None:
        """A few at a time, so that the sent messages do not take the memory."""
        payload = bytes(size)
        for start in range(0, count, 8):
            await self.send_all(sender, [notification(payload) for _ in range(min(8, count - start))])


async def _stalled(sending: asyncio.Future[None], heard: BatchSink, sent: Sequence[UMessage] = ()) -> int:
    """The number of messages of `heard`, when neither it nor `sent` has grown for STALLED_S."""
    progress = -1
    while progress != len(sent) + len(heard.messages) or not heard.messages:
        progress = len(sent) + len(heard.messages)
        await asyncio.wait({sending}, timeout=STALLED_S)
        if sending.done():
            await asyncio.sleep(STALLED_S)
    return len(heard.messages)
