"""The hooks of the conformance suite, and the common parts of its tests.

make_end("alpha") --- the plugin's network --- make_end("beta")      each test gets a fresh, open pair, and closes
     send_batch                                 Sink: collects, and    all ends that it made
                                                wakes the test when enough messages have arrived

Hooks are `async` methods, except `normalise` and `peer_process`. Only `make_end` and `capabilities` are required:
without another hook, the tests that need it are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, NoReturn

import pytest
import pytest_asyncio

from transports.conformance.deadline import close_in_time, in_time, limited
from transports.conformance.messages import ALPHA, BETA, PROBE, example, notification, reply, topic
from transports.conformance.sinks import Changes, Gated, Sink
from uprotocol import uuid as uuids
from uprotocol.status import OK, RETRYABLE, UStatusError, is_nobody_listening
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

Pair = tuple[UTransport, UTransport]

PROBE_EVERY_S: Final = 0.05
SENT_AT_ONCE: Final = 500
EVENTUALLY_EVERY_S: Final = 0.01
TEST_TIMEOUT_S: Final = 120.0  # of a test with its fixtures; also ends one whose loop can't be closed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the marker need not be registered in the plugin's project
    spec = pytest.mark.spec
    _timeout = pytest.mark.timeout(TEST_TIMEOUT_S)


class Ends:
    """Makes the ends of one test, and closes them after it, the last one first."""

    def __init__(self, harness: TransportHarness) -> None:
        self._harness = harness
        self._made = contextlib.AsyncExitStack()

    async def __call__(self, authority: str, **limits: int) -> UTransport:
        """A closed end of `make_end`."""
        return self.keep(await self._harness.make_end(authority, **limits))

    def keep(self, end: UTransport) -> UTransport:
        """Also close `end`, which another hook has made."""
        self._made.push_async_callback(self._close, end)
        return end

    async def pair(self) -> Pair:
        """Two open ends, alpha and beta."""
        alpha, beta = await self(ALPHA), await self(BETA)
        await alpha.open()
        await beta.open()
        return alpha, beta

    async def close(self) -> None:
        """Close all ends, even if one raises, and none for longer than a test may take."""
        await self._made.aclose()

    async def _close(self, end: UTransport) -> None:
        await in_time(end.close(), self._harness.test_deadline_s, f"close of {end!r}")


class TransportHarness:
    """Override `capabilities` and `make_end`. The other attributes describe the network; the other hooks allow more
    tests."""

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.asyncio, _timeout]

    capabilities: Capability
    """What the transport declares; the suite checks that it behaves so."""

    discovery: bool = False
    """True if other ends learn about a filter only a moment after register_listener has returned (Zenoh, DDS). The
    suite then sends probes until one arrives. Leave it False for all other networks."""

    refuses_foreign_source: bool = False
    """True if the network checks that a source is the sender's own: then PERMISSION_DENIED is required."""

    routes_streamed_publish: bool = True
    """False if the network carries a publish with a streamer's sink as one without a sink (Zenoh's keys). Then it
    reaches only listeners whose sink filter has the authority `*`, and a streamer removes that sink before it sends
    (A-11)."""

    deadline_s: float = 10.0
    """How long the suite waits for a message that must arrive."""

    test_deadline_s: float = 60.0
    """How long a test may take in all, at most 100. After that it fails and reports what it was waiting for."""

    settle_s: float = 0.05
    """How much later than a message of another stream a message may arrive; how long the suite waits for one that must
    not arrive."""

    flood_messages: int = 20_000
    """Number of messages for the slow listener: choose more than your transport's queues hold."""

    payload_bytes_max: int = 1 << 20
    """The largest payload that the suite sends."""

    network_drops_too_large: bool = False
    """True if the network knows the largest size and does not deliver larger messages (MQTT): then `dropped` can't
    count them."""

    slows_senders: bool = True
    """False if a broker keeps more than `flood_messages` for a slow end: then the sender is not slowed down."""

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        """A closed transport of that authority, all on one network. `limits` are `listeners_max`,
        `listeners_per_filter_max`, names that the plugin's config should have
        (req~utransport-registerlistener-max-listeners~1).

        Called several times in a test, also for one authority; then the earlier end is closed or never opened. The
        suite closes every end before your fixtures end.
        """
        raise NotImplementedError("make_end: return a closed transport of your plugin")

    async def make_unreachable(self, authority: str) -> UTransport:
        """A closed transport whose network can't be reached; `open` should fail within `deadline_s`. Called once in a
        test."""
        self.lacks_hook("make_unreachable")

    async def make_refused(self, authority: str) -> UTransport:
        """A closed transport that the network does not admit (a wrong password). Called once in a test."""
        self.lacks_hook("make_refused")

    async def make_deaf(self, authority: str) -> UTransport:  # prose: ok
        """A closed transport that may connect but not listen (an access list). Called once in a test."""
        self.lacks_hook("make_deaf")

    async def refuse_filter(self, authority: str, source: UUri, sink: UUri) -> None:
        """From now on the network refuses this pair of filters to all ends of `authority`, also on a new connection,
        and accepts all others (an access list). May be called again after `allow_filters`."""
        self.lacks_hook("refuse_filter")

    async def allow_filters(self, authority: str) -> None:
        """The end of `authority` may listen to anything again."""
        self.lacks_hook("allow_filters")

    async def refuse_address(self, authority: str, source: UUri, sink: UUri | None) -> None:
        """From now on the network refuses messages that the open end of `authority` sends to this address
        (`address_of`), and accepts all others (an access list). Called several times in a test, each time for one more
        address."""
        self.lacks_hook("refuse_address")

    async def allow_addresses(self, authority: str) -> None:
        """The end of `authority` may send to any address again: on its present connection, or after it has connected
        again by itself."""
        self.lacks_hook("allow_addresses")

    async def refuse_messages(self, authority: str) -> None:
        """From now on the network answers all messages of the end of `authority` with an error, without ending the
        connection (its store is full, a stream or a permission is missing). Default: `refuse_address` for the address
        of the test."""
        self.needs_hook("refuse_messages", "refuse_address")
        await self.refuse_address(authority, topic(), reply())

    async def take_messages(self, authority: str) -> None:
        """The network accepts messages of the end of `authority` again. Default: `allow_addresses`."""
        await self.allow_addresses(authority)

    async def nobody(self, source: UUri, sink: UUri | None) -> None:
        """Returns when the network knows that nobody listens at this address, where the suite has unregistered its
        listeners. Default: at once; the suite sends until it gets that answer."""

    def normalise(self, message: UMessage) -> UMessage:
        """The form in which `message` arrives, if your mapping documents that it can't distinguish two forms. May
        change and return `message`.

        Default (A-19): a payload without bytes and without format is no payload. All else must arrive unchanged.
        """
        if not message.payload and not message.attributes.payload_format:
            message.ClearField("payload")
        return message

    async def inject(self, message: UMessage) -> None:
        """Put `message`, which may be invalid or expired, on the network in the plugin's encoding, without the checks
        of `send`. Called several times in a test; each time `beta` is open and listens."""
        self.lacks_hook("inject")

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        """Put malformed PDUs of all kinds that you know on the network, so that a listener for (source, sink) gets
        them. Returns their number. They must be discarded, and counted in `dropped`."""
        self.lacks_hook("inject_malformed")

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        """Put `message`, a valid notification of another authority, on the key or topic of `authority`, for networks
        with an address beside the message. `beta` is open and listens to everything."""
        self.lacks_hook("inject_misplaced")

    async def break_network(self, authority: str) -> None:
        """Cut the connection of that end, open or not, and prevent a new one. May be called again after
        `heal_network`."""
        self.lacks_hook("break_network")

    async def heal_network(self, authority: str) -> None:
        """Allow the end of `authority` to connect again. It must do so by itself."""
        self.lacks_hook("heal_network")

    async def forget_network(self, authority: str) -> None:
        """The network forgets the end of `authority`, which `break_network` has cut off: its session, its filters and
        the messages that wait for it (a broker that is restarted without its store). Do nothing if your network keeps
        nothing of an end that is away."""
        self.lacks_hook("forget_network")

    async def make_returning(self, authority: str) -> UTransport:
        """A closed transport as after a restart of its process: to the network, the second one is the same receiver as
        the first, which is closed. Called twice in a test, with Capability.PERSISTENT_SESSION. Default: `make_end`."""
        return await self.make_end(authority)

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        """("module:PLUGIN", settings) of an end for another process, which joins the network of `make_end`. Called once
        in a test."""
        self.lacks_hook("peer_process")

    # The rest belongs to the suite.

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                setattr(cls, name, limited(test, lambda harness, *_, **__: float(harness.test_deadline_s)))

    @pytest_asyncio.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        """For tests that make their own ends."""
        made = Ends(self)
        yield made
        try:
            await made.close()
        finally:
            close_in_time(asyncio.get_running_loop())

    @pytest_asyncio.fixture
    async def pair(self, ends: Ends) -> Pair:
        """Two open ends, alpha and beta."""
        return await in_time(ends.pair(), self.test_deadline_s, "opening alpha and beta")

    def needs(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            pytest.skip(f"the plugin does not declare {capability}")

    def needs_hook(self, *names: str) -> None:
        """Skip the test, before it prepares anything, if none of these hooks is overridden."""
        if all(getattr(type(self), name) is getattr(TransportHarness, name) for name in names):
            self.lacks_hook(names[0])

    def lacks_hook(self, name: str) -> NoReturn:
        """Skip the test, with the description of the missing hook."""
        text = " ".join((getattr(TransportHarness, name).__doc__ or "").split())
        pytest.skip(f"{type(self).__name__} does not override the hook {name}: {text.partition('. ')[0].rstrip('.')}.")

    async def listen(
        self,
        pair: Sequence[UTransport],
        source: UUri,
        sink: UUri | None = None,
        listener: Sink | None = None,
        *,
        reachable: bool = True,
    ) -> Sink:
        """Register `listener` (default: a Sink) at the second end, and wait until it gets all matching messages of the
        first end. Skips the test without Capability.PUSH."""
        self.needs(Capability.PUSH)
        sender, receiver = pair
        heard = listener if listener is not None else Sink(self.deadline_s)
        await receiver.register_listener(source, heard, sink)
        if self.discovery and reachable:
            await self.reach(sender, heard, example(source, sink))
        return heard

    async def gated(self, pair: Sequence[UTransport], source: UUri | None = None, sink: UUri | None = None) -> Gated:
        """A listener at the second end that takes nothing until its gate opens. Probes have already reached it."""
        heard = Gated(self.deadline_s)
        heard.gate.set()
        await self.listen(pair, source or topic(), sink or reply(), heard)
        heard.gate.clear()
        return heard

    @contextlib.asynccontextmanager
    async def away(self, end: UTransport) -> AsyncIterator[None]:
        """The network of `end`, which is beta, is away in the block and back after it. Waits until `end` reports
        both."""
        changes = Changes(end)
        await self.break_network(BETA)
        await changes.until(False, self.deadline_s)
        yield
        await self.heal_network(BETA)
        await changes.until(True, self.deadline_s)

    async def refusal_of(self, call: Awaitable[object]) -> UCode.ValueType:
        """The code of the UStatusError that `call` must raise in time, with a message."""
        async with asyncio.timeout(self.deadline_s):
            with pytest.raises(UStatusError) as raised:
                await call
        assert raised.value.message
        return raised.value.code

    async def reach(self, sender: UTransport, heard: Sink, message: UMessage) -> None:
        """Send `message` as a probe until it arrives."""
        heard.probes = 0
        for _ in range(int(self.deadline_s / PROBE_EVERY_S)):
            probe = UMessage(attributes=message.attributes, payload=PROBE)
            probe.attributes.id.CopyFrom(uuids.new())
            await sender.send_batch([probe])
            with contextlib.suppress(AssertionError):
                return await heard.until(lambda: heard.probes > 0, "a probe", PROBE_EVERY_S)
        raise AssertionError(f"no probe arrived within {self.deadline_s} s: {message.attributes}")

    async def usable(self, sender: UTransport, heard: Sink, *addresses: UUri) -> None:
        """Returns when the two ends have found each other again. `addresses`: source and sink."""
        await self.reach(sender, heard, notification(PROBE, *addresses))

    async def send_all(self, sender: UTransport, messages: Sequence[UMessage]) -> None:
        """Send all messages. Those that a full network refuses (UNAVAILABLE, while `connected`) are sent again in
        order; fails if none is accepted for `deadline_s`. The answer that nobody listens counts as OK."""
        left, loop = list(messages), asyncio.get_running_loop()
        give_up_at = loop.time() + self.deadline_s
        while left:
            statuses = [OK if is_nobody_listening(one) else one for one in await sender.send_batch(left)]
            assert len(statuses) == len(left)
            refused = [status for status in statuses if status.code]
            may_be_full = sender.connected and all(status.code == UCode.UNAVAILABLE for status in refused)
            assert may_be_full or not refused, refused[:3]
            if len(refused) < len(left):
                give_up_at = loop.time() + self.deadline_s
            assert loop.time() < give_up_at, f"nothing was taken for {self.deadline_s} s: {refused[0]}"
            left = [message for message, status in zip(left, statuses, strict=True) if status.code]
            if left:
                await asyncio.sleep(EVENTUALLY_EVERY_S)

    async def send_until_taken(self, sender: UTransport, messages: Sequence[UMessage], *passing: int) -> None:
        """Send the messages with a retryable answer, or one of the codes `passing`, again in order until all are OK."""
        left = list(messages)
        async with asyncio.timeout(self.deadline_s):
            while left:
                statuses = await sender.send_batch(left)
                left = [message for message, status in zip(left, statuses, strict=True) if status.code]
                assert {status.code for status in statuses} <= {UCode.OK, *RETRYABLE, *passing}, statuses
                if left:
                    await asyncio.sleep(EVENTUALLY_EVERY_S)

    async def send_in_parts(
        self, sender: UTransport, messages: Sequence[UMessage], sent: list[UMessage] | None = None
    ) -> None:
        """Send SENT_AT_ONCE at a time, and append the sent ones to `sent`."""
        for start in range(0, len(messages), SENT_AT_ONCE):
            part = messages[start : start + SENT_AT_ONCE]
            await self.send_all(sender, part)
            if sent is not None:
                sent += part

    def traffic(
        self, count: int, source: UUri | None = None, sink: UUri | None = None, *, first: int = 0, padding: bytes = b""
    ) -> list[UMessage]:
        """`count` notifications, numbered from `first` on in their payload, before the `padding`."""
        return [notification(b"%d" % number + padding, source, sink) for number in range(first, first + count)]

    async def flood(
        self, source: UUri | None = None, sink: UUri | None = None, *, padding: bytes = b""
    ) -> list[UMessage]:
        """`traffic` of `flood_messages`. The event loop runs between the parts: else a proxy on it might forward
        nothing for longer than the lease of a connection."""
        messages: list[UMessage] = []
        while (missing := self.flood_messages - len(messages)) > 0:
            part = min(missing, SENT_AT_ONCE)
            messages += self.traffic(part, source, sink, first=len(messages), padding=padding)
            await asyncio.sleep(0)
        return messages

    async def eventually(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a state without an event, such as a counter."""
        for _ in range(int(self.deadline_s / EVENTUALLY_EVERY_S)):
            if holds():
                return
            await asyncio.sleep(EVENTUALLY_EVERY_S)
        raise AssertionError(f"expected {what} within {self.deadline_s} s")

    _settle_numbers = itertools.count()

    async def settle(
        self, sender: UTransport, heard: Sink, source: UUri | None = None, sink: UUri | None = None
    ) -> list[bytes]:
        """The payloads that `heard` has got, after a last message on (source, sink) has arrived there."""
        mark = b"mark %d" % next(self._settle_numbers)
        await asyncio.sleep(self.settle_s)
        await self.send_all(sender, [notification(mark, source, sink)])
        await heard.expect_payload(mark)
        return [payload for payload in heard.payloads if not payload.startswith(b"mark ")]
