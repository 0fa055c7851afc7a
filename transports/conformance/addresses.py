"""Addresses of the network: nobody listens at one, or the network refuses one, and the others still work.

publish -> nobody listens -> nobody_listens, delivered to nobody -> a listener comes -> sent again: OK, once, in order
batch   -> the network answers with an error -> no OK, delivered to nobody -> it accepts them: sent again: OK, in order
batch   -> its address is refused -> PERMISSION_DENIED or UNAUTHENTICATED; messages to other addresses arrive
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Final

import pytest

from transports.conformance.base import EVENTUALLY_EVERY_S, Ends, Pair, TransportHarness, spec
from transports.conformance.messages import (
    ALPHA,
    BETA,
    GAMMA,
    OTHER_ID,
    codes,
    method,
    notification,
    publish,
    reply,
    request,
    streamed,
    topic,
)
from transports.conformance.sinks import Sink
from uprotocol import uri as uris
from uprotocol.attributes import streamer_sink
from uprotocol.status import is_nobody_listening
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

REFUSED_CODES: Final = (UCode.PERMISSION_DENIED, UCode.UNAUTHENTICATED)
ADDRESS_CHARACTERS_MAX: Final = 1_024


class AddressConformance(TransportHarness):
    """Tests of how a transport maps addresses and filters."""

    def publication(self, payload: bytes, resource: int = 0x9A01, authority: str = BETA) -> UMessage:
        """A publish of alpha, with the sink of a streamer of `authority` if the network needs one."""
        source = topic(resource=resource)
        if Capability.PUBLISH_WITHOUT_SINK in self.capabilities:
            return publish(payload, source)
        return streamed(payload, source, authority)

    def publications(self, *payloads: bytes, resource: int = 0x9A01) -> list[UMessage]:
        """Publishes of alpha, one for each payload."""
        return [self.publication(payload, resource) for payload in payloads]

    def filters(self, resource: int = 0x9A01, authority: str = BETA) -> tuple[UUri, UUri | None]:
        """The pair of filters that matches `publication`."""
        if Capability.PUBLISH_WITHOUT_SINK in self.capabilities:
            return topic(resource=resource), None
        return uris.pattern(ALPHA), uris.pattern(authority)

    async def unheard(self, sender: UTransport, *payloads: bytes, resource: int = 0x9A01) -> list[UMessage]:
        """Publishes that have just been answered `nobody_listens`. Others are sent until the network gives this answer
        to all of a batch."""
        messages, statuses = self.publications(*payloads, resource=resource), list[UStatus]()
        await self.nobody(messages[0].attributes.source, _sink(messages[0]))
        async with asyncio.timeout(self.deadline_s):
            while not statuses or not all(map(is_nobody_listening, statuses)):
                assert set(codes(statuses)) <= {UCode.OK, UCode.UNAVAILABLE}, statuses
                await asyncio.sleep(EVENTUALLY_EVERY_S if statuses else 0)
                messages = self.publications(*payloads, resource=resource)
                statuses = await sender.send_batch(messages)
        assert codes(statuses) == [UCode.UNAVAILABLE] * len(payloads)
        assert all(status.message for status in statuses)
        return messages

    # The name of an address.

    async def test_an_address_has_a_name_that_tells_it_from_others(self, pair: Pair) -> None:
        longest = topic("a" * 128, entity=0xFFFE_FFFE, version=0xFE, resource=0xFFFE)
        pairs: list[tuple[UUri, UUri | None]] = [
            (topic(), streamer_sink(BETA)),
            (topic(resource=OTHER_ID), streamer_sink(GAMMA)),
            (topic(), reply()),
            (longest, reply("b" * 128)),
        ]
        if Capability.PUBLISH_WITHOUT_SINK in self.capabilities:
            pairs += [(topic(), None), (topic(resource=OTHER_ID), None), (longest, None)]
        copies = copy.deepcopy(pairs)
        named = [pair[0].address_of(source, sink) for source, sink in pairs]
        assert [pair[0].address_of(source, sink) for source, sink in pairs] == named
        assert pairs == copies, "address_of must not change the addresses of its caller"
        for name in named:
            assert isinstance(name, str)
            assert 0 < len(name) <= ADDRESS_CHARACTERS_MAX
        assert named[0] != named[1]
        assert len(set(named[4:])) == len(named[4:]), "publishes of two topics without a sink have two addresses"

    # Nobody listens.

    async def test_a_publish_that_nobody_hears_is_reported_and_waits_for_its_sender(self, pair: Pair) -> None:
        """It does not arrive later by itself. Sent again, when somebody listens, it arrives once and in order."""
        self.needs(Capability.ABSENCE)
        sender, reported = pair[0], list[Sequence[str] | None]()
        sender.on_heard(reported.append)
        sender.tells_absence = True
        messages = await self.unheard(sender, b"1", b"2", b"3")
        heard = await self.listen(pair, *self.filters())
        await self.listen(pair, topic(), reply(), heard)
        assert await self.settle(sender, heard) == []
        await self.send_until_taken(sender, messages)
        await heard.expect_payload(b"3")
        assert await self.settle(sender, heard) == [b"1", b"2", b"3"]
        attributes = messages[0].attributes
        address = sender.address_of(attributes.source, _sink(messages[0]))
        assert not reported or any(addresses is None or address in addresses for addresses in reported), (
            address,
            reported,
        )

    async def test_a_publish_is_taken_while_somebody_listens_and_no_longer(self, pair: Pair) -> None:
        self.needs(Capability.ABSENCE)
        sender, (source, sink) = pair[0], self.filters()
        sender.tells_absence = True
        for round in (b"once", b"again"):
            heard = await self.listen(pair, source, sink)
            await self.send_until_taken(sender, self.publications(round))
            assert codes(await sender.send_batch(self.publications(round + b" more"))) == [UCode.OK]
            await heard.expect_payload(round + b" more")
            assert heard.payloads == [round, round + b" more"]
            await pair[1].unregister_listener(source, heard, sink)
            await self.unheard(sender, b"nobody")

    @spec("dsn~utransport-unregisterlistener-stop-invoking-listeners~1")
    async def test_a_wildcard_that_is_unregistered_listens_no_more(self, pair: Pair) -> None:
        """The network must know it even if another listener stays: nobody gets what only the wildcard matched."""
        self.needs(Capability.ABSENCE)
        sender, (source, sink) = pair[0], self.filters()
        sender.tells_absence = True
        everything = uris.pattern("*"), None if sink is None else uris.pattern("*")
        if sink is None and Capability.WILDCARD_SOURCE not in self.capabilities:
            pytest.skip("the plugin does not declare Capability.WILDCARD_SOURCE")
        wide, narrow = await self.listen(pair, *everything), await self.listen(pair, source, sink)
        await pair[1].unregister_listener(everything[0], wide, everything[1])
        if Capability.PUBLISH_WITHOUT_SINK in self.capabilities:  # else the narrow one gets all of alpha's
            await self.unheard(sender, b"nobody", resource=OTHER_ID)
        await self.send_until_taken(sender, self.publications(b"for the narrow one"))
        await narrow.expect_payload(b"for the narrow one")
        assert wide.payloads == []

    async def test_a_request_to_which_nobody_listens_is_reported_and_sent_to_who_listens_later(
        self, pair: Pair
    ) -> None:
        self.needs(Capability.ABSENCE)
        sender, statuses = pair[0], list[UStatus]()
        sender.tells_absence = True
        await self.nobody(reply(ALPHA), method())
        async with asyncio.timeout(self.deadline_s):
            while not statuses or not is_nobody_listening(statuses[0]):
                assert set(codes(statuses)) <= {UCode.OK, UCode.UNAVAILABLE}, statuses
                await asyncio.sleep(EVENTUALLY_EVERY_S if statuses else 0)
                statuses = await sender.send_batch([request(b"nobody")])
        heard = await self.listen(pair, reply(ALPHA), method())
        await self.send_until_taken(sender, [request(b"call")])
        await heard.expect_payload(b"call")
        assert heard.payloads == [b"call"]

    async def test_only_a_publish_or_request_needs_somebody_who_listens(self, pair: Pair) -> None:
        """A notification that nobody hears is answered OK; so is a publish, unless its owner asks for absence."""
        sender = pair[0]
        sender.tells_absence = True
        assert codes(await sender.send_batch([notification(b"unheard")])) == [UCode.OK]
        if Capability.ABSENCE in self.capabilities:
            await self.unheard(sender, b"unheard")
            sender.tells_absence = False
        assert codes(await sender.send_batch(self.publications(b"unheard", b"unheard"))) == [UCode.OK] * 2

    # The network refuses.

    async def test_what_the_network_answers_with_an_error_is_not_sent(self, pair: Pair) -> None:
        """No error is answered OK, and the messages of a later attempt are the first that arrive."""
        self.needs_hook("refuse_messages", "refuse_address")
        sender, heard = pair[0], await self.listen(pair, topic(), reply())
        await self.send_all(sender, [notification(b"before")])
        await self.refuse_messages(ALPHA)
        messages = self.traffic(3)
        for status in await sender.send_batch(messages):
            assert status.code != UCode.OK, "the network answered with an error, so the message is not sent"
            assert status.message
        await self.take_messages(ALPHA)
        await self.send_until_taken(sender, messages, *REFUSED_CODES)
        assert await self.settle(sender, heard) == [b"before", b"0", b"1", b"2"]

    async def test_an_address_that_is_refused_costs_no_other(self, ends: Ends, pair: Pair) -> None:
        """Not even in the same batch; and messages to it are accepted when the network allows it."""
        self.needs_hook("refuse_address")
        self.needs(Capability.PUSH)
        sender, gamma = pair[0], await ends(GAMMA)
        await gamma.open()
        heard = await self.listen(pair, topic(), reply())
        await self.listen(pair, *self.filters(), heard)
        for_gamma = Sink(self.deadline_s)
        await self.listen((sender, gamma), topic(), reply(GAMMA), for_gamma)
        await self.listen((sender, gamma), *self.filters(OTHER_ID, GAMMA), for_gamma)
        forbidden = [self.publication(b"publish", OTHER_ID, GAMMA), notification(b"notification", sink=reply(GAMMA))]
        for message in forbidden:
            await self.refuse_address(ALPHA, message.attributes.source, _sink(message))
        allowed = [notification(b"1"), self.publication(b"2"), notification(b"3")]
        statuses = await sender.send_batch([allowed[0], forbidden[0], allowed[1], forbidden[1], allowed[2]])
        assert codes(statuses[::2]) == [UCode.OK] * 3
        for status in statuses[1::2]:
            assert status.code in REFUSED_CODES, status
            assert status.message
        assert sorted(await self.settle(sender, heard)) == [b"1", b"2", b"3"]
        await self.allow_addresses(ALPHA)
        await self.send_until_taken(sender, forbidden, *REFUSED_CODES)
        await for_gamma.expect(2)
        await self.settle(sender, for_gamma, sink=reply(GAMMA))
        assert sorted(one for one in for_gamma.payloads if not one.startswith(b"mark")) == [b"notification", b"publish"]


def _sink(message: UMessage) -> UUri | None:
    return message.attributes.sink if message.attributes.HasField("sink") else None
