"""The hooks of the conformance suite, and its listeners.

make_end("alpha") --- the plugin's network --- make_end("beta")      each test gets a fresh, open pair, and closes
     send_batch                                 Sink: collects, and    whatever it made
                                                wakes the test when enough has come

Hooks are `async` methods, but for `normalise` and `peer_process`. Only `make_end` and `capabilities` are demanded: a
hook that is left out skips what needs it, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import pytest
import pytest_asyncio

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import OK, UStatusError, is_nobody_listening
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from uprotocol.v1.uuid_pb2 import UUID

Pair = tuple[UTransport, UTransport]

ALPHA: Final = "alpha"
BETA: Final = "beta"
ENTITY: Final = 0x0003_10AB  # instance 3 of type 10AB
VERSION: Final = 4
TTL_MS: Final = 60_000
RAW: Final = UPayloadFormat.UPAYLOAD_FORMAT_RAW
PROBE: Final = b"conformance probe"
PROBE_EVERY_S: Final = 0.05
SENT_AT_ONCE: Final = 500
EVENTUALLY_EVERY_S: Final = 0.01

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the marker need not be registered in the plugin's project
    spec = pytest.mark.spec


def topic(authority: str = ALPHA, resource: int = 0x9A01, entity: int = ENTITY, version: int = VERSION) -> UUri:
    return uris.uri(authority, entity, version, resource)


def reply(authority: str = BETA, entity: int = ENTITY, version: int = VERSION) -> UUri:
    return uris.uri(authority, entity, version, 0)


def method(authority: str = BETA, resource: int = 0x0B18, entity: int = ENTITY, version: int = VERSION) -> UUri:
    return uris.uri(authority, entity, version, resource)


def raw(data: bytes) -> UPayload:
    return UPayload(data, RAW)


def publish(payload: bytes = b"", source: UUri | None = None) -> UMessage:
    return UMessageBuilder.publish(source or topic()).build_from_upayload(raw(payload))


def streamed(payload: bytes = b"", source: UUri | None = None, authority: str = BETA) -> UMessage:
    """A publish with the sink that only a streamer sets."""
    message = UMessageBuilder(attrs.PUBLISH, source or topic(), attrs.streamer_sink(authority))
    return message.build_from_upayload(raw(payload))


def notification(payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None) -> UMessage:
    return UMessageBuilder.notification(source or topic(), sink or reply()).build_from_upayload(raw(payload))


def request(payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None) -> UMessage:
    return UMessageBuilder.request(source or reply(ALPHA), sink or method(), TTL_MS).build_from_upayload(raw(payload))


def response(
    payload: bytes = b"", source: UUri | None = None, sink: UUri | None = None, request_id: UUID | None = None
) -> UMessage:
    builder = UMessageBuilder.response(source or method(ALPHA), sink or reply(), request_id or UMessageBuilder.new_id())
    return builder.with_ttl(TTL_MS).build_from_upayload(raw(payload))


def example(source_filter: UUri, sink_filter: UUri | None, payload: bytes) -> UMessage:
    """A message that the filters let through, from alpha and to beta where they leave it open."""
    source, sink = UUri(), UUri()
    source.CopyFrom(source_filter)
    _fill(source, ALPHA, 0x9A01 if sink_filter is None or not uris.is_method(sink_filter) else 0)
    if sink_filter is None:
        return publish(payload, source)
    sink.CopyFrom(sink_filter)
    _fill(sink, BETA, 0)
    if uris.is_topic(source):
        return notification(payload, source, sink)
    return request(payload, source, sink) if uris.is_method(sink) else response(payload, source, sink)


def _fill(address: UUri, authority: str, resource: int) -> None:
    address.authority_name = authority if address.authority_name in ("", "*") else address.authority_name
    if address.ue_id & 0xFFFF == 0xFFFF:
        address.ue_id = address.ue_id & 0xFFFF_0000 | ENTITY & 0xFFFF
    if address.ue_id >> 16 == 0xFFFF:
        address.ue_id = address.ue_id & 0xFFFF | ENTITY & 0xFFFF_0000
    if address.ue_version_major == uris.WILDCARD_VERSION:
        address.ue_version_major = VERSION
    if address.resource_id == uris.WILDCARD_RESOURCE:
        address.resource_id = resource


def codes(statuses: Sequence[UStatus]) -> list[int]:
    return [status.code for status in statuses]


async def code_of(call: Awaitable[object]) -> int:
    """OK, or the code of the UStatusError that it raised; anything else that it raises fails the test."""
    try:
        await call
    except UStatusError as error:
        return int(error.code)
    return UCode.OK


def payloads(messages: Sequence[UMessage]) -> list[bytes]:
    return [message.payload for message in messages]


class Sink:
    """A listener that collects, and knows how to wait. It must be called on the thread that made it. Probes are counted
    apart."""

    def __init__(self, deadline_s: float) -> None:
        self.messages: list[UMessage] = []
        self.probes = 0
        self.strange_threads: set[str] = set()  # those that have called it, and are not the loop's
        self._deadline_s = deadline_s
        self._changed = asyncio.Event()
        self._thread = threading.get_ident()
        self._waiting_on: asyncio.AbstractEventLoop | None = None

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        if message.payload == PROBE:
            self.probes += 1
        else:
            self.messages.append(message)
        if threading.get_ident() == self._thread:
            self._changed.set()
        else:
            self._called_by_a_stranger()
        return None

    def _called_by_a_stranger(self) -> None:
        self.strange_threads.add(threading.current_thread().name)
        if self._waiting_on is None:
            self._changed.set()
        else:
            self._waiting_on.call_soon_threadsafe(self._changed.set)

    @property
    def payloads(self) -> list[bytes]:
        return payloads(self.messages)

    async def expect(self, count: int) -> list[UMessage]:
        """The first `count` messages; fails if they don't come in time."""
        await self.until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages[:count]

    async def expect_payload(self, payload: bytes) -> None:
        await self.until(
            lambda: any(message.payload == payload for message in self.messages), f"the payload {payload!r}"
        )

    async def probed(self, within_s: float) -> bool:
        """True if a probe has come, or comes in time."""
        try:
            await self._until(lambda: self.probes > 0, "a probe", within_s)
        except AssertionError:
            return False
        return True

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Returns when `holds`, which is asked after each message; fails if that does not come in time."""
        await self._until(holds, what, self._deadline_s)

    async def _until(self, holds: Callable[[], bool], what: str, deadline_s: float) -> None:
        self._waiting_on = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"expected {what} within {deadline_s} s, got {len(self.messages)} messages") from None
        assert not self.strange_threads, f"listeners run on the event loop's thread only, not on {self.strange_threads}"


class BatchSink(Sink):
    """The same, for transports that hand over batches."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.batches: list[int] = []

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None:
        self.batches.append(len(messages))
        for message in messages:
            self.on_receive(message)
        return None


class Gated(BatchSink):
    """Takes nothing until its gate opens."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.gate = asyncio.Event()

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None]:
        super().on_receive_batch(messages)
        return self._take()

    async def _take(self) -> None:
        await self.gate.wait()


class Changes:
    """Follows on_connection."""

    def __init__(self, end: UTransport) -> None:
        self.seen: list[bool] = []
        self.true_to_the_facts = True  # whatever was told, `connected` said it, too
        self._end = end
        self._changed = asyncio.Event()
        end.on_connection(self._on_change)

    def _on_change(self, connected: bool) -> None:
        self.seen.append(connected)
        self.true_to_the_facts &= bool(self._end.connected) is connected
        self._changed.set()

    async def until(self, connected: bool, deadline_s: float) -> None:
        async with asyncio.timeout(deadline_s):
            while self.seen[-1:] != [connected]:
                self._changed.clear()
                await self._changed.wait()


class Ends:
    """Makes the ends of one test, and closes them after it, the last one first."""

    def __init__(self, harness: TransportHarness) -> None:
        self._harness = harness
        self._made = contextlib.AsyncExitStack()

    async def __call__(self, authority: str, **limits: int) -> UTransport:
        """A closed end of `make_end`."""
        return self.keep(await self._harness.make_end(authority, **limits))

    def keep(self, end: UTransport) -> UTransport:
        """Close this one too: it is of another hook."""
        self._made.push_async_callback(end.close)
        return end

    async def pair(self) -> Pair:
        """Two open ends, alpha and beta."""
        alpha, beta = await self(ALPHA), await self(BETA)
        await alpha.open()
        await beta.open()
        return alpha, beta

    async def close(self) -> None:
        """All of them, whatever one of them raises."""
        await self._made.aclose()


class TransportHarness:
    """Override `capabilities` and `make_end`; the others make more tests possible, or describe the network."""

    pytestmark = pytest.mark.asyncio

    capabilities: Capability
    """What the transport declares; the suite checks that it is what it does."""

    discovery: bool = False
    """True if the network needs a moment, after register_listener has returned, until other ends know of it (Zenoh,
    DDS). The suite then sends probes until one arrives; a network that can do without must."""

    refuses_foreign_source: bool = False
    """True if the network sees at once that a source is not the sender's own: then PERMISSION_DENIED is demanded."""

    routes_streamed_publish: bool = True
    """False if the network carries a publish with a streamer's sink as one without (Zenoh's keys): then it reaches only
    listeners whose sink filter has the authority `*`, and a streamer takes that sink away before it sends into such a
    network (A-11)."""

    deadline_s: float = 10.0
    """How long the suite waits for what must come."""

    settle_s: float = 0.05
    """How much later than a message of another stream something may arrive; how long the suite waits for what must not
    come."""

    flood_messages: int = 20_000
    """What the slow listener is sent: choose more than your transport's queues hold."""

    payload_bytes_max: int = 1 << 20
    """The largest payload that the suite sends."""

    network_drops_too_large: bool = False
    """True if the network is told how large messages may be, and keeps larger ones from us (MQTT): then `dropped` can't
    count them."""

    slows_senders: bool = True
    """False if a broker keeps more for a slow end than `flood_messages`: then its sender feels nothing."""

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        """A closed transport of that authority, all on one network. `limits` are `listeners_max`,
        `listeners_per_filter_max`, names that the plugin's config should have
        (req~utransport-registerlistener-max-listeners~1).

        Called several times in a test, also for one authority: a later one comes when the one before it is closed, or
        will never be opened. The suite closes every end that it made, before fixtures of yours end.
        """
        raise NotImplementedError("make_end: return a closed transport of your plugin")

    async def make_unreachable(self, authority: str) -> UTransport:
        """A closed transport whose network can't be reached; `open` should give up within `deadline_s`. Called once in
        a test."""
        pytest.skip("this plugin's class has no make_unreachable hook")

    async def make_refused(self, authority: str) -> UTransport:
        """A closed transport that the network won't let in (a wrong password). Called once in a test."""
        pytest.skip("this plugin's class has no make_refused hook")

    async def make_deaf(self, authority: str) -> UTransport:
        """A closed transport that the network lets in, but not listen (an access list). Called once in a test."""
        pytest.skip("this plugin's class has no make_deaf hook")

    def normalise(self, message: UMessage) -> UMessage:
        """What of `message` arrives, where your mapping, as its document says, can't tell two forms apart. May change
        and return it.

        Default (A-19): a payload without bytes and without format is no payload. Everything else must arrive as it was
        sent.
        """
        if not message.payload and not message.attributes.payload_format:
            message.ClearField("payload")
        return message

    async def inject(self, message: UMessage) -> None:
        """Put `message` on the network in the plugin's encoding, past all checks of `send`: it may be invalid or
        expired.

        Called several times in a test; each time `beta` is open and listens."""
        pytest.skip("this plugin's class has no inject hook")

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        """Put on the network, where a listener for (source, sink) gets them, all PDUs that you know that are no message
        at all.

        Answers how many there were. They must be discarded, and counted in `dropped`.
        """
        pytest.skip("this plugin's class has no inject_malformed hook")

    async def break_network(self, authority: str) -> None:
        """Cut the connection of that end, open or not, and keep it from coming back. May be called again after
        `heal_network`."""
        pytest.skip("this plugin's class has no break_network hook")

    async def heal_network(self, authority: str) -> None:
        """Allow the end of `authority` to connect again. It must do so by itself."""
        pytest.skip("this plugin's class has no heal_network hook")

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        """("module:PLUGIN", settings) of an end for another process, which joins the network of `make_end`. Called once
        in a test."""
        pytest.skip("this plugin's class has no peer_process hook")

    # What follows is the suite's own.

    @pytest_asyncio.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        """For tests that make ends by themselves."""
        made = Ends(self)
        yield made
        await made.close()

    @pytest_asyncio.fixture
    async def pair(self, ends: Ends) -> Pair:
        """Two open ends, alpha and beta."""
        return await ends.pair()

    def needs(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            pytest.skip(f"the plugin does not declare {capability}")

    def needs_hook(self, name: str) -> None:
        """For tests that would prepare a lot before they skip."""
        if getattr(type(self), name) is getattr(TransportHarness, name):
            pytest.skip(f"this plugin's class has no {name} hook")

    async def listen(
        self,
        pair: Sequence[UTransport],
        source: UUri,
        sink: UUri | None = None,
        listener: Sink | None = None,
        *,
        reachable: bool = True,
    ) -> Sink:
        """A Sink at the second end, for what the first one sends; when this returns, nothing that matches is missed.
        Skips the test where there is no Capability.PUSH."""
        self.needs(Capability.PUSH)
        sender, receiver = pair
        heard = listener if listener is not None else Sink(self.deadline_s)
        await receiver.register_listener(source, heard, sink)
        if self.discovery and reachable:
            await self.reach(sender, heard, example(source, sink, PROBE))
        return heard

    async def gated(self, pair: Sequence[UTransport], source: UUri | None = None, sink: UUri | None = None) -> Gated:
        """A listener at the second end that takes nothing until its gate opens; it has been reached already."""
        heard = Gated(self.deadline_s)
        heard.gate.set()
        await self.listen(pair, source or topic(), sink or reply(), heard)
        heard.gate.clear()
        return heard

    @contextlib.asynccontextmanager
    async def away(self, end: UTransport) -> AsyncIterator[None]:
        """In the block the network of `end`, which is beta, is away, and behind it back; `end` knows it each time."""
        changes = Changes(end)
        await self.break_network(BETA)
        await changes.until(False, self.deadline_s)
        yield
        await self.heal_network(BETA)
        await changes.until(True, self.deadline_s)

    async def refusal_of(self, call: Awaitable[object]) -> UCode.ValueType:
        """The code of the UStatusError that it raises in time, with words that say why."""
        async with asyncio.timeout(self.deadline_s):
            with pytest.raises(UStatusError) as raised:
                await call
        assert raised.value.message
        return raised.value.code

    async def reach(self, sender: UTransport, heard: Sink, probe: UMessage) -> None:
        """Send `probe` until it arrives."""
        heard.probes = 0
        for _ in range(int(self.deadline_s / PROBE_EVERY_S)):
            fresh = UMessage()
            fresh.CopyFrom(probe)
            fresh.attributes.id.CopyFrom(UMessageBuilder.new_id())
            await sender.send_batch([fresh])
            if await heard.probed(PROBE_EVERY_S):
                return
        raise AssertionError(f"no probe arrived within {self.deadline_s} s: {probe.attributes}")

    async def usable(
        self, sender: UTransport, heard: Sink, source: UUri | None = None, sink: UUri | None = None
    ) -> None:
        """Both ends have found each other again, which each notices in its own time."""
        heard.probes = 0
        async with asyncio.timeout(self.deadline_s):
            while True:
                await sender.send_batch([notification(PROBE, source, sink)])
                if await heard.probed(PROBE_EVERY_S):
                    return

    async def send_all(self, sender: UTransport, messages: Sequence[UMessage]) -> None:
        """All are taken; that nobody is there to take a request may be told."""
        statuses = [OK if is_nobody_listening(status) else status for status in await sender.send_batch(messages)]
        assert codes(statuses) == [UCode.OK] * len(messages), [status for status in statuses if status.code][:3]

    async def send_in_parts(
        self, sender: UTransport, messages: Sequence[UMessage], sent: list[UMessage] | None = None
    ) -> None:
        """SENT_AT_ONCE at a time; `sent` is told what has been."""
        for start in range(0, len(messages), SENT_AT_ONCE):
            part = messages[start : start + SENT_AT_ONCE]
            await self.send_all(sender, part)
            if sent is not None:
                sent += part

    def traffic(self, count: int, source: UUri | None = None, sink: UUri | None = None) -> list[UMessage]:
        """`count` notifications, numbered in their payload."""
        return [notification(b"%d" % number, source, sink) for number in range(count)]

    async def eventually(self, holds: Callable[[], bool], what: str) -> None:
        """For what no event tells of, such as a counter."""
        for _ in range(int(self.deadline_s / EVENTUALLY_EVERY_S)):
            if holds():
                return
            await asyncio.sleep(EVENTUALLY_EVERY_S)
        raise AssertionError(f"expected {what} within {self.deadline_s} s")

    _settle_numbers = itertools.count()

    async def settle(
        self, sender: UTransport, heard: Sink, source: UUri | None = None, sink: UUri | None = None
    ) -> list[bytes]:
        """What has arrived after everything sent before has had its chance: a last message on (source, sink) marks the
        end."""
        mark = b"mark %d" % next(self._settle_numbers)
        await asyncio.sleep(self.settle_s)
        await self.send_all(sender, [notification(mark, source, sink)])
        await heard.expect_payload(mark)
        return [payload for payload in heard.payloads if not payload.startswith(b"mark ")]
