"""The in-process transport: the conformance suite, and its faults."""

from __future__ import annotations

import asyncio

import pytest

from campaigns.simulation.network import Faults, FaultyNetwork
from transports import plugin
from transports.arrivals import BATCH_MAX
from transports.conformance import ALPHA, BETA, Sink, TransportConformance
from transports.conformance.connection import ConnectionConformance
from transports.conformance.messages import notification, publish, reply, topic
from transports.local import PULL_MESSAGES_MAX, LocalConfig, LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri


class TestLocal(TransportConformance):
    capabilities = (
        Capability.PUSH
        | Capability.PULL
        | Capability.ACK
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ABSENCE
    )

    @pytest.fixture(autouse=True)
    def _network(self) -> None:
        self.network = FaultyNetwork()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return LocalTransport(LocalConfig(**limits), LocalUriProvider(authority, 0x10AB, 3), self.network)

    async def refuse_address(self, authority: str, source: UUri, sink: UUri | None) -> None:
        self.network.refuse(address_of(source, sink), authority)

    async def allow_addresses(self, authority: str) -> None:
        self.network.allow(sender=authority)

    def normalise(self, message: UMessage) -> UMessage:
        return message

    async def inject(self, message: UMessage) -> None:
        self.network.inject(message)

    async def break_network(self, authority: str) -> None:
        self.network.cut(authority)

    async def heal_network(self, authority: str) -> None:
        self.network.mend(authority)

    async def forget_network(self, authority: str) -> None:
        """A network remembers nothing of a member without a session."""

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        self.network.inject(UMessage())
        return 1


class TestLocalSession(ConnectionConformance):
    """A member with a name."""

    capabilities = TestLocal.capabilities | Capability.PERSISTENT_SESSION
    network: FaultyNetwork

    _network = TestLocal._network

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        config = LocalConfig(session=authority, **limits)
        return LocalTransport(config, LocalUriProvider(authority, 0x10AB, 3), self.network)

    async def break_network(self, authority: str) -> None:
        self.network.cut(authority)

    async def heal_network(self, authority: str) -> None:
        self.network.mend(authority)


# Faults.


def address_of(source: UUri, sink: UUri | None = None) -> str:
    return LocalTransport.on(LocalNetwork(), LocalUriProvider(ALPHA, 0x10AB, 3)).address_of(source, sink)


def pair_on(network: LocalNetwork) -> tuple[LocalTransport, LocalTransport]:
    return tuple(LocalTransport.on(network, LocalUriProvider(authority, 0x10AB, 3)) for authority in (ALPHA, BETA))  # type: ignore[return-value]


async def sent_with(faults: Faults | None, count: int = 300) -> tuple[list[int], list[bytes]]:
    """The codes of `count` single sends over two streams, and what arrived."""
    network = FaultyNetwork(faults=faults)
    alpha, beta = pair_on(network)
    heard = Sink(10)
    async with alpha, beta:
        await beta.register_listener(uris.ANY, heard, reply())
        sent = []
        for number in range(count):
            (status,) = await alpha.send_batch([notification(b"%d" % number, topic(resource=0x8000 + number % 2))])
            sent.append(int(status.code))
        network.set_faults(None)
        alpha.reconnect()
        await alpha.send(notification(b"end"))
        await alpha.send(notification(b"end", topic(resource=0x8000)))
        await alpha.send(notification(b"end", topic(resource=0x8001)))
        await heard.until(lambda: heard.payloads.count(b"end") == 3, "the end of each stream")
    return sent, [payload for payload in heard.payloads if payload != b"end"]


async def test_the_same_seed_makes_the_same_faults() -> None:
    faults = Faults(seed=7, fail_send=0.1, unsure_send=0.1, refuse=0.1, duplicate=0.1)
    once, again = await sent_with(faults), await sent_with(faults)
    assert once == again
    assert once != await sent_with(Faults(seed=8, fail_send=0.1, unsure_send=0.1, refuse=0.1, duplicate=0.1))
    assert set(once[0]) == {UCode.OK, UCode.UNAVAILABLE, UCode.PERMISSION_DENIED}


async def test_what_was_said_to_be_sent_arrives_whatever_goes_wrong() -> None:
    codes, arrived = await sent_with(Faults(seed=3, fail_send=0.2, unsure_send=0.2, refuse=0.1, duplicate=0.2))
    assert {b"%d" % number for number, code in enumerate(codes) if code == UCode.OK} <= set(arrived)
    assert len(arrived) > len(set(arrived)), "duplicates were asked for"


@pytest.mark.spec("dsn~utransport-receive-error-notfound~2")
async def test_receive_passes_over_what_is_no_valid_message() -> None:
    network = FaultyNetwork()
    alpha, beta = pair_on(network)
    invalid = notification(b"no id")
    invalid.attributes.ClearField("id")
    async with alpha, beta:
        with pytest.raises(UStatusError) as nothing:
            await beta.receive(topic(), reply())
        assert nothing.value.code == UCode.NOT_FOUND
        for message in (invalid, UMessage(), notification(b"valid")):
            network.inject(message)
        async with asyncio.timeout(10):
            while True:
                try:
                    assert (await beta.receive(topic(), reply())).payload == b"valid"
                    break
                except UStatusError as error:
                    if error.code != UCode.NOT_FOUND:
                        raise
                    await asyncio.sleep(0)
        with pytest.raises(UStatusError) as nothing:
            await beta.receive(topic(), reply())
        assert nothing.value.code == UCode.NOT_FOUND
        assert beta.dropped["invalid"] == 2


async def test_delays_let_streams_overtake_but_keep_each_in_order() -> None:
    codes, arrived = await sent_with(Faults(seed=5, delay_ms_max=20))
    numbers = [int(payload) for payload in arrived]
    assert set(codes) == {UCode.OK}
    assert numbers != sorted(numbers)
    for parity in (0, 1):
        assert [number for number in numbers if number % 2 == parity] == list(range(parity, 300, 2))


async def test_a_dropped_connection_comes_back_by_itself() -> None:
    network = FaultyNetwork(faults=Faults(seed=1, drop_connection=1.0, away_ms=1))
    alpha, beta = pair_on(network)
    back = asyncio.Event()
    async with alpha, beta:
        alpha.on_connection(lambda connected: back.set() if connected else None)
        (status,) = await alpha.send_batch([notification()])
        assert status.code == UCode.UNAVAILABLE
        await asyncio.wait_for(back.wait(), 10)
        assert alpha.connected


async def test_networks_are_found_by_name() -> None:
    one = LocalTransport(LocalConfig(network="garage"), LocalUriProvider("one", 1, 1))
    two = LocalTransport(LocalConfig(network="garage"), LocalUriProvider("two", 1, 1))
    other = LocalTransport(LocalConfig(network="street"), LocalUriProvider("two", 1, 1))
    assert one.network is two.network
    assert one.network is not other.network


async def test_messages_are_handed_over_as_they_are() -> None:
    network = LocalNetwork()
    alpha, beta = pair_on(network)
    heard = Sink(10)
    async with alpha, beta:
        await beta.register_listener(topic(), heard, reply())
        message = notification(b"the very one")
        await alpha.send(message)
        assert (await heard.expect(1))[0] is message


async def test_what_nobody_pulls_is_bounded() -> None:
    network = LocalNetwork()
    alpha, beta = pair_on(network)
    async with alpha, beta:
        for _ in range(PULL_MESSAGES_MAX // BATCH_MAX + 1):
            await alpha.send_batch([notification(b"x") for _ in range(BATCH_MAX)])
            await asyncio.sleep(0)
        await asyncio.wait_for(beta.arrivals.drained(), 10)
        assert len(beta._for_pull) == PULL_MESSAGES_MAX


def test_the_reference_transport_is_a_plugin() -> None:
    made = plugin.create("local", {}, LocalUriProvider("one", 1, 1))
    assert isinstance(made, LocalTransport)


# Sessions.


def named(network: LocalNetwork, authority: str) -> LocalTransport:
    return LocalTransport(LocalConfig(session=f"of {authority}"), LocalUriProvider(authority, 0x10AB, 3), network)


def numbered(count: int, first: int = 0) -> list[UMessage]:
    messages = [notification() for _ in range(count)]
    for number, message in enumerate(messages, first):
        message.payload = str(number).encode()
    return messages


@pytest.mark.parametrize("leave", ["close", "abandon", "disconnect"])
async def test_a_session_keeps_what_its_listeners_want_until_they_are_back(leave: str) -> None:
    network = LocalNetwork()
    alpha, beta = LocalTransport.on(network, LocalUriProvider(ALPHA, 0x10AB, 3)), named(network, BETA)
    assert Capability.PERSISTENT_SESSION in beta.capabilities
    assert Capability.PERSISTENT_SESSION not in alpha.capabilities
    heard = Sink(10)
    async with alpha:
        await beta.open()
        await beta.register_listener(uris.ANY, heard, reply())
        if leave == "close":
            await beta.close()
        else:
            getattr(beta, leave)()
        for message in numbered(5):
            await alpha.send(message)
        if leave == "disconnect":
            beta.reconnect()
        else:
            beta = named(network, BETA)
            await beta.open()
            for message in numbered(2, 5):  # before its listener has come
                await alpha.send(message)
            await beta.register_listener(uris.ANY, heard, reply())
        await heard.expect(5 if leave == "disconnect" else 7)
        assert [int(message.payload) for message in heard.messages] == list(range(len(heard.messages)))
        await beta.close()


@pytest.mark.parametrize("closes", [False, True], ids=["open", "while it closes"])
async def test_a_member_that_is_abandoned_gets_again_what_it_had_not_taken(closes: bool) -> None:
    network = LocalNetwork()
    alpha, beta = LocalTransport.on(network, LocalUriProvider(ALPHA, 0x10AB, 3)), named(network, BETA)

    class Stuck:
        def __init__(self) -> None:
            self.called = asyncio.Event()

        async def on_receive_batch(self, messages: list[UMessage]) -> None:
            self.called.set()
            await asyncio.Event().wait()

    stuck, heard = Stuck(), Sink(10)
    async with alpha:
        await beta.open()
        await beta.register_listener(uris.ANY, stuck, reply())  # type: ignore[arg-type]
        for message in numbered(3):
            await alpha.send(message)
        await asyncio.wait_for(stuck.called.wait(), 10)
        closing = asyncio.ensure_future(beta.close()) if closes else None
        await asyncio.sleep(0)  # it begins to close
        beta.abandon()
        again = named(network, BETA)
        await again.open()
        await again.register_listener(uris.ANY, heard, reply())
        await heard.expect(3)
        assert [int(message.payload) for message in heard.messages] == [0, 1, 2]
        await again.close()
        if closing is not None:
            await closing


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leave", ["close", "abandon"])
async def test_a_session_gets_delayed_messages_in_order(leave: str, seed: int) -> None:
    network = FaultyNetwork(faults=Faults(seed, delay_ms_max=50))
    alpha, beta = LocalTransport.on(network, LocalUriProvider(ALPHA, 0x10AB, 3)), named(network, BETA)
    heard, messages = Sink(10), numbered(30)
    async with alpha:
        await beta.open()
        await beta.register_listener(uris.ANY, heard, reply())
        await alpha.send_batch(messages[:10])
        if leave == "close":
            await beta.close()
        else:
            beta.abandon()
        await alpha.send_batch(messages[10:20])
        again = named(network, BETA)
        await again.open()
        await again.register_listener(uris.ANY, heard, reply())
        await alpha.send_batch(messages[20:])
        await heard.expect(30)
        assert [int(message.payload) for message in heard.messages] == list(range(30))
        await again.close()


async def test_what_comes_while_a_member_closes_is_kept_by_its_session() -> None:
    network = LocalNetwork()
    alpha, beta = LocalTransport.on(network, LocalUriProvider(ALPHA, 0x10AB, 3)), named(network, BETA)
    going_on, called, heard = asyncio.Event(), asyncio.Event(), Sink(10)

    class Slow:
        async def on_receive_batch(self, messages: list[UMessage]) -> None:
            called.set()
            await going_on.wait()

    async with alpha:
        await beta.open()
        await beta.register_listener(uris.ANY, Slow(), reply())  # type: ignore[arg-type]
        first, second = numbered(2)
        await alpha.send(first)
        await asyncio.wait_for(called.wait(), 10)
        closing = asyncio.ensure_future(beta.close())
        await asyncio.sleep(0)
        await alpha.send(second)
        going_on.set()
        await closing
        again = named(network, BETA)
        await again.open()
        await again.register_listener(uris.ANY, heard, reply())
        await heard.expect(1)
        assert [int(message.payload) for message in heard.messages] == [1]
        await again.close()


# Addresses: nobody listens, or the network refuses.


async def absent(sender: LocalTransport, *payloads: bytes) -> list[bool]:
    """Of each publish, whether nobody listens."""
    return [is_nobody_listening(status) for status in await sender.send_batch([publish(one) for one in payloads])]


async def test_a_sender_that_nobody_heard_is_notified_once_when_a_listener_comes() -> None:
    network = FaultyNetwork()
    alpha, beta = pair_on(network)
    notified: list[object] = []
    alpha.on_heard(notified.append)
    alpha.tells_absence = True
    async with alpha, beta:
        await beta.register_listener(topic(resource=0x8001), Sink(10))
        assert notified == [], "nothing was asked for yet"
        assert await absent(alpha, b"1") == [True]
        await alpha.register_listener(topic(), Sink(10))
        assert await absent(alpha, b"1") == [True], "nobody hears himself"
        assert notified == []
        await beta.register_listener(topic(), Sink(10))
        await beta.register_listener(topic(resource=0x8002), Sink(10))
        assert notified == [None]
        assert await absent(alpha, b"1") == [False]
        network.cut(BETA)
        assert await absent(alpha, b"2") == [True], "what is sent now beta misses"
        network.mend(BETA)
        assert notified == [None, None]
        assert await absent(alpha, b"2") == [False]


async def test_a_member_that_joins_with_its_listeners_is_heard_of() -> None:
    network = LocalNetwork()
    alpha, beta = pair_on(network)
    notified: list[object] = []
    alpha.on_heard(notified.append)
    alpha.tells_absence = True
    beta.register_before_open([(topic(), None)], Sink(10))
    async with alpha:
        assert await absent(alpha, b"1") == [True]
        async with beta:
            assert notified
            assert await absent(alpha, b"1") == [False]


@pytest.mark.parametrize("leave", ["close", "abandon", "disconnect"])
async def test_a_session_listens_while_its_owner_is_away(leave: str) -> None:
    network = LocalNetwork()
    alpha, beta = LocalTransport.on(network, LocalUriProvider(ALPHA, 0x10AB, 3)), named(network, BETA)
    alpha.tells_absence = True
    async with alpha:
        await beta.open()
        await beta.register_listener(topic(), Sink(10))
        if leave == "close":
            await beta.close()
        else:
            getattr(beta, leave)()
        assert await absent(alpha, b"1") == [False]
        async with named(network, BETA) as again:
            assert await absent(alpha, b"2") == [False], "its listener has not come back yet"
            heard = Sink(10)
            await again.register_listener(topic(), heard)
            await heard.expect_payload(b"2")
        await beta.close()


async def test_what_nobody_hears_is_not_kept_for_receive_either() -> None:
    """Otherwise it would arrive twice: its sender sends it again."""
    network = LocalNetwork()
    alpha, beta = pair_on(network)
    alpha.tells_absence = True
    async with alpha, beta:
        assert await absent(alpha, b"1", b"2") == [True, True]
        with pytest.raises(UStatusError):
            await beta.receive(topic())


async def test_a_call_that_is_behind_an_unheard_one_does_not_overtake_it() -> None:
    """In a network that is far away: the second leaves before the first has its answer."""
    network = FaultyNetwork()
    network.answer_s = 0.01
    alpha, beta = pair_on(network)
    alpha.tells_absence = True
    heard = Sink(10)
    async with alpha, beta:
        first = asyncio.create_task(absent(alpha, b"1"))
        await asyncio.sleep(0)
        await beta.register_listener(topic(), heard)
        second = asyncio.create_task(absent(alpha, b"2"))
        assert await first == await second == [True]
        assert await absent(alpha, b"1", b"2") == [False, False]
        await heard.expect(2)
        assert heard.payloads == [b"1", b"2"]


async def test_what_leaves_before_a_refusal_is_answered_does_not_overtake_the_refused_message() -> None:
    """In a network that is far away: the rule ends before the sender knows of it."""
    network = FaultyNetwork()
    network.answer_s = 0.01
    alpha, beta = pair_on(network)
    heard = Sink(10)

    async def refused(*messages: UMessage) -> list[bool]:
        return [status.code == UCode.PERMISSION_DENIED for status in await alpha.send_batch(messages)]

    async with alpha, beta:
        await beta.register_listener(topic(), heard)
        network.refuse(address_of(topic()))
        first = asyncio.create_task(refused(publish(b"1")))
        await asyncio.sleep(0)
        network.allow()
        second = asyncio.create_task(refused(publish(b"2"), publish(b"other", topic(resource=0x8001))))
        assert await first == [True]
        assert await second == [True, False]
        assert await refused(publish(b"1"), publish(b"2")) == [False, False]
        await heard.expect(2)
        assert heard.payloads == [b"1", b"2"]


async def test_addresses_are_refused_by_pattern_and_by_sender() -> None:
    network = FaultyNetwork()
    alpha, beta = pair_on(network)
    every_kind = [publish(), notification(), notification(source=topic(resource=0x8001))]

    async def refused() -> list[bool]:
        return [status.code == UCode.PERMISSION_DENIED for status in await alpha.send_batch(every_kind)]

    async with alpha, beta:
        network.refuse(address_of(topic()))
        assert await refused() == [True, False, False]
        network.refuse(f"* {uris.format(reply())}", ALPHA)
        assert await refused() == [True, True, True]
        (status,) = await beta.send_batch([notification(source=topic(BETA))])
        assert status.code == UCode.OK, "the rule is of alpha"
        network.allow(address_of(topic()))
        assert await refused() == [False, True, True]
        network.allow(sender=ALPHA)
        assert await refused() == [False, False, False]
