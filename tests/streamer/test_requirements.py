"""The specification's requirements on a dispatcher, one by one: dead letters, retries, and attributes of calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.letters import dead_letter
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Backoff
from uprotocol.transport import Capability
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription_client.client import USubscriptionClient

SPEED = uris.parse("//vehicle1/8001/1/8001")
METHOD = uris.parse("//vehicle1/8001/1/7")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
TO_MCU = {"//vehicle1/8001/1/8001": ["//mcu1/9001/1/0"]}
TO_CLOUD = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}

MakeWorld = Any
Publish = Callable[..., UMessage]


class Picky:
    """Stands before an endpoint's transport: `verdicts` are answered for a payload, one for each try, instead of or
    after sending it."""

    def __init__(
        self, transport: Any, monkeypatch: pytest.MonkeyPatch, verdicts: dict[bytes, list[int]], *, sends: bool = False
    ) -> None:
        self._send_batch, self._verdicts, self._sends = transport.send_batch, verdicts, sends
        self.tried: list[UMessage] = []
        monkeypatch.setattr(transport, "send_batch", self.send_batch)

    def tries(self, payload: bytes) -> list[UMessage]:
        return [message for message in self.tried if message.payload == payload]

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = []
        for message in messages:
            self.tried.append(message)
            left = self._verdicts.get(message.payload)
            code = left.pop(0) if left else UCode.OK
            if code == UCode.OK or self._sends:
                (status,) = await self._send_batch([message])
                assert status.code == UCode.OK
            statuses.append(
                UStatus(code=UCode.ValueType(code), message="" if code == UCode.OK else "as the test wants it")
            )
        return statuses


@pytest.mark.spec("local~disp-dlt-subscribe")
@pytest.mark.spec("local~disp-dlt")
async def test_an_entity_elsewhere_subscribes_to_the_dead_letter_topic(make_world: MakeWorld, publish: Publish) -> None:
    """Not by listening on the gateway's own network only: like to any topic, and until it unsubscribes."""
    world = await make_world(subscriptions=TO_MCU)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    letters = ids.at("vehicle1", ids.DEAD_LETTERS)
    heard, published = await world.hear(cloud, letters), await world.hear(vehicle, letters)
    world.assembly.endpoints["mcu"].transport.disconnect()

    async def doom(name: str) -> UMessage:
        doomed = publish(SPEED, name, ttl=50)
        before = len(published.messages)
        await vehicle.send(doomed)
        await published.expect(before + 1)
        return doomed

    await doom("before anybody subscribed")
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(letters)
        wanted = await doom("wanted")
        letter = DeadLetter.FromString((await heard.expect(1))[0].payload)
        assert (letter.message, letter.code, letter.endpoint) == (wanted, UCode.DEADLINE_EXCEEDED, "mcu")
        await client.unsubscribe(letters)
        await world.until(lambda: not world.assembly.interest.wants(letters))
        await doom("after")
        await client.subscribe(SPEED)
        await vehicle.send(publish(SPEED, "a last one"))
        last = await world.hear(cloud, SPEED)
        await vehicle.send(publish(SPEED, "so that all else has come"))
        await last.expect(1)
    assert len(heard.messages) == 1


async def retention_rests(world: Any, log: Any) -> None:
    """Until the log's writer has looked twice and found nothing to delete."""
    storage, looks = log._storage, 0
    heard = storage._on_written

    def hear(written: Any) -> None:
        nonlocal looks
        looks = 0 if written.chunks or written.losses else looks + 1
        heard(written)

    storage._on_written = hear
    await world.until(lambda: looks >= 2)
    storage._on_written = heard


@pytest.mark.spec("local~disp-dlt")
@pytest.mark.spec("local~disp-dlt-reason")
@pytest.mark.spec("local~disp-no-discard")
async def test_what_the_log_must_delete_before_a_peer_is_back_is_a_dead_letter(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of a durable peer is the log, and full when its megabytes are. One by one while they are few, then as a
    range."""
    # what one step of retention hands over begins with what waits in memory still
    for limit in ("RECORDS_MAX", "BYTES_MAX"):
        monkeypatch.setattr(f"history.records.chunk.PASSED_{limit}", 64 << 20)
    world = await make_world(subscriptions=TO_MCU, more="[history]\nretention_mib = 1\n")
    vehicle, mcu = await world.node("vehicle", "vehicle1"), await world.node("mcu", "mcu1", 0x9001)
    heard = await world.hear(mcu, SPEED)
    endpoint = world.assembly.endpoints["mcu"]
    endpoint.transport.disconnect()
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "mcu" and pump.log.durable)
    draw = random.Random(7)
    # not to be compressed much
    sent = [publish(SPEED, f"{number} {draw.randbytes(2_000).hex()}") for number in range(3_000)]
    for begin in range(0, len(sent), 500):
        await vehicle.send_batch(sent[begin : begin + 500])
    await world.until(lambda: pump.log.newest_seq == len(sent))
    await retention_rests(world, pump.log)  # what it took once the peer is back would be told one by one again
    await world.until(lambda: world.assembly.dead_letters.total >= 100 and pump.losses.gaps > 0)
    endpoint.transport.reconnect()
    await heard.until(lambda: heard.messages[-1:] == sent[-1:], "the last one")
    assert world.assembly.dead_letters.by_code == {"RESOURCE_EXHAUSTED": 100}
    await world.stop()
    stored = [
        one.message for one in dead_letter.open_read_only(world.config.streamer.data_dir / "dead-letters.db").read()
    ]
    arrived, letters = (
        [int(message.payload.split()[0]) for message in messages] for messages in (heard.messages, stored)
    )
    missing = sorted(set(range(len(sent))) - set(arrived))
    assert arrived == sorted(arrived)
    assert letters == missing[:100], "the oldest of what is lost, in order; what had been read ahead is not lost"
    assert stored == [sent[number] for number in letters], "whole"
    assert pump.losses.gaps >= len(missing) - 100, "the others are counted"


@pytest.mark.spec("local~disp-no-discard")
@pytest.mark.spec("local~disp-retry")
@pytest.mark.spec("local~l1-send-unsure")
async def test_what_the_network_does_not_take_now_is_sent_again_unchanged_until_it_does(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure does not prove that nothing was sent: the message is sent again with the same id, so a receiver
    recognises it."""
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    transport = world.assembly.endpoints["cloud"].transport
    picky = Picky(transport, monkeypatch, {b"unsure": [UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED] * 10}, sends=True)
    sent = publish(SPEED, "unsure")
    await vehicle.send(sent)
    await heard.expect(21)
    assert [message.attributes.id for message in heard.messages] == [sent.attributes.id] * 21
    assert picky.tries(b"unsure") == [sent] * 21
    assert world.assembly.dead_letters.total == 0


@pytest.mark.spec("local~l1-send-unsure")
@pytest.mark.spec("local~disp-dlt")
@pytest.mark.parametrize("code", [UCode.INVALID_ARGUMENT, UCode.INTERNAL], ids=UCode.Name)
async def test_what_is_refused_for_good_is_never_sent_again(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard, letters = await world.hear(cloud, SPEED), await world.hear(vehicle, ids.at("vehicle1", ids.DEAD_LETTERS))
    picky = Picky(world.assembly.endpoints["cloud"].transport, monkeypatch, {b"bad": [code, UCode.OK]})
    await vehicle.send_batch([publish(SPEED, "bad"), publish(SPEED, "good")])
    await heard.expect(1)
    letter = DeadLetter.FromString((await letters.expect(1))[0].payload)
    assert (letter.message.payload, letter.code, letter.reason) == (b"bad", code, "as the test wants it")
    await vehicle.send(publish(SPEED, "later"))
    await heard.expect(2)
    assert heard.texts == ["good", "later"]
    assert len(picky.tries(b"bad")) == 1


@pytest.mark.spec("local~l1-send-unsure")
@given(st.integers(1, 1_000), st.integers(0, 60_000), st.integers(1, 40))
def test_the_pause_before_the_next_try_doubles_up_to_its_limit_and_is_reset_by_a_success(
    min_ms: int, more: int, tries: int
) -> None:
    class Longest:
        def randint(self, low: int, high: int) -> int:
            assert low == min_ms, "never shorter"
            return high

    backoff = Backoff(min_ms, min_ms + more, Longest())  # type: ignore[arg-type]
    expected = [min(min_ms << number, min_ms + more) for number in range(tries)]
    assert [backoff.next_ms() for _ in range(tries)] == expected
    assert backoff.attempt == tries + 1
    backoff.reset()
    assert backoff.attempt == 1
    assert backoff.next_ms() == min_ms


TWO_BEHIND_ONE = """
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
settings = {{ network = "{n}-vehicle" }}
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud", "backup"]
usubscription = "none"
settings = {{ network = "{n}-cloud" }}
[[endpoint]]
name = "mcu"
transport = "local"
authorities = ["mcu1"]
usubscription = "none"
settings = {{ network = "{n}-mcu" }}
"""


@pytest.mark.spec("dsn~up-attributes-publish-sink~2")
async def test_a_network_whose_topics_need_a_sink_gets_one_for_each_authority_that_subscribed(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other sender gets one, and none arrives for a message that was not reported."""
    wanted = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//cloud/9002/1/0", "//backup/1/1/0", "//mcu1/9001/1/0"]}
    world = await make_world(TWO_BEHIND_ONE, wanted)
    transport = world.assembly.endpoints["cloud"].transport
    monkeypatch.setattr(transport, "capabilities", transport.capabilities & ~Capability.PUBLISH_WITHOUT_SINK)
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    in_cloud, at_mcu = await world.hear(cloud, uris.ANY, uris.ANY), await world.hear(mcu, SPEED)
    sent = publish(SPEED, "fast")
    await vehicle.send_batch([publish(uris.parse("//vehicle1/8001/1/8002"), "nobody wants it"), sent])
    heard = await in_cloud.expect(2)
    assert {uris.format(message.attributes.sink) for message in heard} == {
        "up://cloud/FFFFFFFF/FF/FFFF",
        "up://backup/FFFFFFFF/FF/FFFF",
    }
    for message in heard:
        message.attributes.ClearField("sink")
    assert heard == [sent, sent], "all else is as it was"
    assert await at_mcu.expect(1) == [sent]
    await vehicle.send(publish(SPEED, "again"))
    await in_cloud.expect(4)
    assert [message.payload for message in in_cloud.messages[2:]] == [b"again", b"again"], (
        "one for an authority, however many subscribed"
    )


@pytest.mark.spec("local~cap-carry")
@pytest.mark.spec("local~tap-token")
@pytest.mark.spec("local~disp-attributes")
async def test_a_call_crosses_the_dispatcher_with_its_permission_level_and_its_token(make_world: MakeWorld) -> None:
    """And so do all its other attributes, and those of the response, there and back."""
    world = await make_world()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    asked = await world.hear(vehicle, uris.pattern(resource=0), METHOD)
    answered = await world.hear(cloud, METHOD, CLOUD_APP)
    builder = UMessageBuilder.request(CLOUD_APP, METHOD, 60_000).with_priority(UPriority.UPRIORITY_CS6)
    builder.with_permission_level(5).with_token("a token of any form, ünicode too").with_traceparent(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    )
    requests = [builder.build_from_upayload(UPayload(b"\x00", UPayloadFormat.UPAYLOAD_FORMAT_RAW))]
    requests.append(UMessageBuilder.request(CLOUD_APP, METHOD, 60_000).with_permission_level(0).build())  # said to be 0
    requests.append(UMessageBuilder.request(CLOUD_APP, METHOD, 60_000).build())  # not said
    for request in requests:
        await cloud.send(request)
    assert await asyncio.wait_for(asked.expect(3), 20) == requests
    assert [request.attributes.HasField("permission_level") for request in asked.messages] == [True, True, False]
    response = UMessageBuilder.response_for_request(requests[0].attributes).with_commstatus(UCode.NOT_FOUND).build()
    await vehicle.send(response)
    assert await answered.expect(1) == [response]
