"""The path of a message through a whole streamer, on in-process networks."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from history.log.log import Log
from streamer.letters import dead_letter
from streamer.operating import metrics
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter, PollRequest
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

SPEED = uris.parse("//vehicle1/8001/1/8001")
DOOR = uris.parse("//vehicle1/8001/1/8002")
RPM = uris.parse("//mcu1/8001/1/8003")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}
METHOD = uris.parse("//vehicle1/8001/1/7")

MakeWorld = Any
CLOUD_SERVICE = {"vehicle": "", "cloud": "remote"}
Publish = Callable[..., UMessage]


async def test_only_what_is_subscribed_is_forwarded(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    for number in range(10):
        await vehicle.send(publish(DOOR, f"door {number}"))
        await vehicle.send(publish(SPEED, f"speed {number}"))
    await heard.expect(10)
    assert heard.texts == [f"speed {number}" for number in range(10)]
    assert world.assembly.home.dropped == {}


@pytest.mark.spec("local~disp-attributes")
async def test_a_message_arrives_as_it_was_sent(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    sent = (
        UMessageBuilder.publish(SPEED)
        .with_priority(UPriority.UPRIORITY_CS5)
        .with_ttl(60_000)
        .with_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .build_from_upayload(UPayload(b"\x00\x01", UPayloadFormat.UPAYLOAD_FORMAT_RAW))
    )
    await vehicle.send(sent)
    assert (await heard.expect(1))[0] == sent


async def test_a_notification_goes_where_its_sink_lives(make_world: MakeWorld) -> None:
    world = await make_world()
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    heard = await world.hear(cloud, uris.ANY, CLOUD_APP)
    other = await world.hear(mcu, uris.ANY, uris.ANY)
    await vehicle.send(UMessageBuilder.notification(SPEED, CLOUD_APP).build())
    assert uris.format((await heard.expect(1))[0].attributes.source) == uris.format(SPEED)
    assert other.messages == []


async def test_a_request_is_answered_across_networks(make_world: MakeWorld) -> None:
    world = await make_world()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    server = InMemoryRpcServer(vehicle, vehicle.local)
    await server.register_request_handler(
        7, lambda request: UPayload(request.payload[::-1], UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    )
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        answer = await client.invoke_method(METHOD, UPayload(b"abc", UPayloadFormat.UPAYLOAD_FORMAT_RAW))
    assert answer.data == b"cba"
    await server.close()


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_that_no_rule_allows_is_answered_with_permission_denied(make_world: MakeWorld) -> None:
    world = await make_world(
        more='[[rule]]\nfrom = "cloud"\nto = "vehicle"\ndeny = ["//vehicle1/8001/1/7"]\n[[rule]]\nfrom = '
        '"vehicle"\nto = "cloud"\n'
    )
    cloud = await world.node("cloud", "cloud", 0x9001)
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        with pytest.raises(UStatusError) as caught:
            await client.invoke_method(METHOD, UPayload())
    assert caught.value.code == UCode.PERMISSION_DENIED
    assert "no rule" in caught.value.message
    assert world.assembly.endpoints["cloud"].dropped["denied"] == 1


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_that_finds_nobody_in_time_is_answered_with_deadline_exceeded(make_world: MakeWorld) -> None:
    world = await make_world()
    cloud = await world.node("cloud", "cloud", 0x9001)
    world.assembly.home.transport.disconnect()
    heard = await world.hear(cloud, uris.ANY, CLOUD_APP)
    request = UMessageBuilder.request(CLOUD_APP, METHOD, 150).build()
    await cloud.send(request)
    response = (await heard.expect(1))[0]
    assert response.attributes.type == UMessageType.UMESSAGE_TYPE_RESPONSE
    assert response.attributes.commstatus == UCode.DEADLINE_EXCEEDED
    assert response.attributes.reqid == request.attributes.id
    assert response.attributes.ttl == request.attributes.ttl
    assert response.attributes.source == METHOD
    await world.until(lambda: world.assembly.dead_letters.total == 1)


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_full_express_lane_answers_resource_exhausted(make_world: MakeWorld) -> None:
    world = await make_world(more="[express]\nmessages_max = 5\n")
    cloud = await world.node("cloud", "cloud", 0x9001)
    world.assembly.home.transport.disconnect()
    heard = await world.hear(cloud, uris.ANY, CLOUD_APP)
    await cloud.send_batch([UMessageBuilder.request(CLOUD_APP, METHOD, 60_000).build() for _ in range(8)])
    responses = await heard.expect(7)  # one caller has a quarter of the lane, and at least one message
    assert {response.attributes.commstatus for response in responses} == {UCode.RESOURCE_EXHAUSTED}


@pytest.mark.spec("req~utransport-send-prevent-address-spoofing~1")
async def test_a_claimed_authority_is_dropped_and_the_rest_goes_on(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={**SUBSCRIBED, "//mcu1/8001/1/8003": ["//cloud/9001/1/0"]})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    forged = await world.hear(cloud, uris.pattern("mcu1"))
    await vehicle.send(UMessageBuilder.notification(RPM, CLOUD_APP).build())  # mcu1 does not live on this network
    await vehicle.send(UMessageBuilder.notification(uris.parse("//cloud/1/1/8000"), CLOUD_APP).build())
    await vehicle.send(publish(SPEED, "true"))
    await heard.expect(1)
    assert forged.messages == []
    assert world.assembly.home.dropped["spoofed"] == 2


@pytest.mark.spec("local~l1-idempotent")
async def test_an_id_is_forwarded_once(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    twice = publish(SPEED, "twice")
    await vehicle.send_batch([twice, twice, publish(SPEED, "once")])
    await heard.expect(2)
    await world.restart()
    await vehicle.send_batch([twice, publish(SPEED, "after")])
    await heard.expect(3)
    assert heard.texts == ["twice", "once", "after"]


@pytest.mark.spec("dsn~up-attributes-ttl-timeout~1")
async def test_what_is_invalid_or_expired_is_dropped_and_the_rest_goes_on(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    old = UMessage(attributes=UAttributes(type=UMessageType.UMESSAGE_TYPE_PUBLISH, source=SPEED, ttl=1))
    old.attributes.id.CopyFrom(uuids.new())
    old.attributes.id.msb -= 5_000 << 16
    world.networks["vehicle"].inject(old)
    world.networks["vehicle"].inject(UMessage())
    world.networks["vehicle"].inject(
        UMessage(attributes=UAttributes(type=UMessageType.UMESSAGE_TYPE_PUBLISH, source=SPEED))
    )
    await vehicle.send(publish(SPEED, "good"))
    await heard.expect(1)
    assert heard.texts == ["good"]
    dropped = world.assembly.home.all_dropped
    assert dropped["expired"] >= 1
    assert dropped["invalid"] >= 1


@pytest.mark.spec("dsn~up-attributes-traceparent~1")
async def test_a_traceparent_that_is_none_is_not_passed_on_and_the_message_is(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    messages = [publish(SPEED, str(number)) for number in range(3)]
    for message in messages:
        message.attributes.traceparent = "my trace 17"
        world.networks["vehicle"].inject(message)
    assert [message.attributes.id for message in await heard.expect(3)] == [
        message.attributes.id for message in messages
    ]
    assert not any(message.attributes.traceparent for message in heard.messages)
    text = metrics.expose(world.parts.samples).decode()
    assert 'up_streamer_mended_total{endpoint="vehicle",field="traceparent"} 3.0' in text
    assert world.assembly.home.all_dropped == {}


@pytest.mark.spec("local~disp-at-least-once")
@pytest.mark.spec("local~disp-queue")
@pytest.mark.spec("local~disp-retry")
@pytest.mark.spec("local~disp-order")
async def test_what_a_peer_missed_comes_in_order_and_nobody_else_notices(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//mcu1/9/1/0"]})
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1", 9),
    )
    heard, neighbour = await world.hear(cloud, SPEED), await world.hear(mcu, SPEED)
    world.assembly.endpoints["cloud"].transport.disconnect()
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(3_000)])
    await neighbour.expect(3_000)
    assert heard.messages == []
    assert any("cloud" in problem for problem in world.parts.problems())
    world.assembly.endpoints["cloud"].transport.reconnect()
    await heard.expect(3_000)
    assert heard.texts == [str(number) for number in range(3_000)]
    await world.until(lambda: not world.parts.problems())


async def test_a_restart_goes_on_where_the_peer_was(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(100)])
    await heard.expect(100)
    world.assembly.endpoints["cloud"].transport.disconnect()
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(100, 200)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 200)
    await world.restart()
    await heard.expect(200)
    assert heard.texts == [str(number) for number in range(200)]


@pytest.mark.spec("local~disp-priority")
@pytest.mark.spec("dsn~up-attributes-priority~1")
async def test_higher_classes_leave_first(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    world.assembly.endpoints["cloud"].transport.disconnect()
    classes = [
        UPriority.UPRIORITY_CS0,
        UPriority.UPRIORITY_UNSPECIFIED,
        UPriority.UPRIORITY_CS6,
        UPriority.UPRIORITY_CS3,
    ]
    await vehicle.send_batch(
        [publish(SPEED, f"{number % 4} {number}", priority=classes[number % 4]) for number in range(40)]
    )
    pump = next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable)
    await world.until(lambda: pump.retries >= 2 and pump.log.newest_seq == 40)
    world.assembly.endpoints["cloud"].transport.reconnect()
    await heard.expect(40)
    by_class = {kind: [int(text.split()[1]) for text in heard.texts if text[0] == kind] for kind in "0123"}
    assert all(numbers == sorted(numbers) for numbers in by_class.values())
    assert heard.texts[-1].startswith("0 ")  # bulk last
    assert heard.texts.index("2 38") < heard.texts.index("3 39") < heard.texts.index("1 37") < heard.texts.index("0 36")


@pytest.mark.spec("local~disp-sample-period")
async def test_a_sample_period_thins_a_topic(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={})
    service = InMemoryRpcClient(world.assembly.hosted, world.assembly.local)
    from usubscription_client.client import USubscriptionClient

    cloud = await world.node("cloud", "cloud", 0x9001)
    vehicle = await world.node("vehicle", "vehicle1")
    heard = await world.hear(cloud, SPEED)
    client = USubscriptionClient(cloud, cloud.local, "vehicle1")
    async with client:
        await client.subscribe(SPEED, sample_period_ms=100)
        begin = uuids.now_ms()
        for number in range(50):
            message = UMessageBuilder.publish(SPEED).build()
            message.attributes.id.msb = (begin + number * 10) << 16 | 0x7000
            await vehicle.send(message)
        await vehicle.send(_at(SPEED, begin + 10_000))
        await heard.expect(6)
    times = [uuids.time_ms(message.attributes.id) - begin for message in heard.messages]
    assert times == [0, 100, 200, 300, 400, 10_000]
    await service.close()


def _at(topic: UUri, time_ms: int) -> UMessage:
    message = UMessageBuilder.publish(topic).build()
    message.attributes.id.msb = time_ms << 16 | 0x7000
    return message


async def test_the_embedded_usubscription_serves_the_own_network_and_the_others(
    make_world: MakeWorld, publish: Publish
) -> None:
    from usubscription_client.client import USubscriptionClient

    world = await make_world()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1", 0x8001))
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await vehicle.send(publish(SPEED, "too early"))
        await world.taken("vehicle")
        await client.subscribe(SPEED)
        await vehicle.send(publish(SPEED, "now"))  # at once: the gateway listened before it answered
        await heard.expect(1)
        await client.unsubscribe(SPEED)
        await world.until(lambda: not world.assembly.interest.wants(SPEED))
        await vehicle.send(publish(SPEED, "too late"))
        await world.taken("vehicle")
        await client.subscribe(DOOR)
        await vehicle.send(publish(DOOR, "door"))
        await heard.expect(2)
    assert heard.texts == ["now", "door"]


async def test_volatile_topics_never_touch_the_disk(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(
        subscriptions={**SUBSCRIBED, "//vehicle1/8001/1/8002": ["//cloud/9001/1/0"]},
        more='[history]\nvolatile = ["//*/FFFFFFFF/FF/8001"]\n',
    )
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    await vehicle.send_batch([publish(SPEED, "volatile") for _ in range(5)] + [publish(DOOR, "durable")])
    await heard.expect(6)
    assert world.assembly.logs.durable.newest_seq == 1
    assert world.assembly.logs.volatile.newest_seq == 5


@pytest.mark.spec("local~disp-dlt")
@pytest.mark.spec("local~disp-dlt-header")
@pytest.mark.spec("local~disp-dlt-full")
@pytest.mark.spec("local~disp-dlt-reason")
async def test_what_expires_on_the_way_is_a_dead_letter(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle = await world.node("vehicle", "vehicle1")
    heard = await world.hear(vehicle, ids.at("vehicle1", ids.DEAD_LETTERS))
    world.assembly.endpoints["cloud"].transport.disconnect()
    doomed = publish(SPEED, "doomed", ttl=100)
    await vehicle.send(doomed)
    letter = DeadLetter.FromString((await heard.expect(1))[0].payload)
    assert letter.message == doomed
    assert letter.code == UCode.DEADLINE_EXCEEDED
    assert letter.endpoint == "cloud"
    await world.stop()
    stored = dead_letter.open_read_only(world.config.streamer.data_dir / "dead-letters.db").read()
    assert [one.message for one in stored] == [doomed]
    assert stored[0].as_dict()["code"] == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("type", ["publish", "notification", "request"])
async def test_a_message_is_forwarded_until_its_ttl_ends(make_world: MakeWorld, publish: Publish, type: str) -> None:
    """More than half of it has passed when it arrives; it leaves with the same ttl, which counts from its id's time."""
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.pattern("vehicle1"), uris.pattern("cloud") if type != "publish" else None)
    waited = {
        "publish": publish(SPEED, "waited", ttl=60_000),
        "notification": UMessageBuilder.notification(SPEED, CLOUD_APP).with_ttl(60_000).build(),
        "request": UMessageBuilder.request(uris.uri("vehicle1", 1, 1, 0), uris.uri("cloud", 1, 1, 7), 60_000).build(),
    }[type]
    waited.attributes.id.msb = (uuids.now_ms() - 40_000) << 16 | 0x7000
    await vehicle.send(waited)
    assert [message.attributes for message in await heard.expect(1)] == [waited.attributes]


@pytest.mark.spec("local~disp-dlt")
async def test_a_refused_message_is_a_dead_letter_and_the_next_one_goes(
    make_world: MakeWorld, publish: Publish, monkeypatch: Any
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    transport = world.assembly.endpoints["cloud"].transport
    send_batch = transport.send_batch

    async def picky(messages: Any) -> Any:
        statuses = await send_batch([message for message in messages if message.payload != b"bad"])
        for index, message in enumerate(messages):
            if message.payload == b"bad":
                from uprotocol.v1.ustatus_pb2 import UStatus

                statuses.insert(index, UStatus(code=UCode.INVALID_ARGUMENT, message="not this one"))
        return statuses

    monkeypatch.setattr(transport, "send_batch", picky)
    await vehicle.send_batch([publish(SPEED, "one"), publish(SPEED, "bad"), publish(SPEED, "two")])
    await heard.expect(2)
    assert heard.texts == ["one", "two"]
    await world.until(lambda: world.assembly.dead_letters.by_code == {"INVALID_ARGUMENT": 1})


async def test_rules_come_and_go_while_running(make_world: MakeWorld, publish: Publish, monkeypatch: Any) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more='[[rule]]\nfrom = "cloud"\nto = "vehicle"\n')
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await vehicle.send(publish(SPEED, "no rule"))
    await world.taken("vehicle")
    before = world.streamer.config
    with monkeypatch.context() as patch:

        async def refuse(*_: Any) -> None:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "no room")

        patch.setattr(world.assembly.home.transport, "register_listeners", refuse)
        with pytest.raises(UStatusError, match="no room") as caught:
            await world.change_rule("vehicle", "cloud", {})
        assert caught.value.code == UCode.FAILED_PRECONDITION
    assert world.assembly.rules.between("vehicle", "cloud") is None
    assert world.streamer.config is before
    assert [one for one in world.parts.notes() if "last reload changed nothing" in one and "no room" in one]
    await world.until(lambda: not world.assembly.networks["vehicle"].trouble)
    await world.change_rule("vehicle", "cloud", {})
    await vehicle.send(publish(SPEED, "rule"))
    await heard.expect(1)
    await world.change_rule("vehicle", "cloud", None)
    await vehicle.send(publish(SPEED, "no rule again"))
    await world.taken("vehicle")
    await world.change_rule("vehicle", "cloud", {})
    await vehicle.send(publish(SPEED, "rule again"))
    await heard.expect(2)
    assert heard.texts == ["rule", "rule again"]


async def test_allow_and_deny_hold_for_topics(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(
        subscriptions={**SUBSCRIBED, "//vehicle1/8001/1/8002": ["//cloud/9001/1/0"]},
        more='[[rule]]\nfrom = "vehicle"\nto = "cloud"\nallow = ["//vehicle1/FFFFFFFF/FF/FFFF"]\ndeny = '
        '["//vehicle1/8001/1/8002"]\n',
    )
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    await vehicle.send_batch([publish(DOOR, "denied"), publish(SPEED, "allowed")])
    await heard.expect(1)
    assert heard.texts == ["allowed"]


async def test_what_the_log_refuses_is_not_confirmed_and_comes_again(
    make_world: MakeWorld, publish: Publish, monkeypatch: Any
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    log = world.assembly.logs.durable
    append, refusals = type(log).append, iter(range(3))

    def full(self: Any, streams: Any, messages: Any) -> Any:
        if self is log and next(refusals, None) is not None:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full"))
            return future
        return append(self, streams, messages)

    monkeypatch.setattr(type(log), "append", full)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(10)])
    await heard.expect(10)
    assert heard.texts == [str(number) for number in range(10)]
    assert world.assembly.home.dropped["refused"] >= 1


async def test_admin_tells_metrics_health_and_readiness(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, start=False)
    world.config = world.config.model_copy(
        update={"streamer": world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})}
    )
    await world.start()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await vehicle.send_batch([publish(SPEED) for _ in range(7)])
    await heard.expect(7)

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{world.streamer.admin.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    status, metrics = await asyncio.to_thread(get, "/metrics")
    assert status == 200
    assert 'up_streamer_forwarded_total{endpoint="cloud"} 7.0' in metrics
    assert 'up_streamer_log_newest_seq{log="durable"} 7.0' in metrics
    values = {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    }
    assert values['up_streamer_log_disk_limit_bytes{log="durable"}'] == world.assembly.logs.durable.retention_bytes
    used = values['up_streamer_log_disk_bytes{log="durable"}']
    assert 50_000 < used < 10_000_000, "the whole of it: database, write-ahead log, its index, the mark"
    assert values['up_streamer_disk_free_bytes{log="durable"}'] > 0
    assert 'up_streamer_log_holes{log="durable"} 0.0' in metrics
    assert (await asyncio.to_thread(get, "/healthz"))[0] == 200
    assert (await asyncio.to_thread(get, "/readyz"))[0] == 200
    world.assembly.endpoints["cloud"].transport.disconnect()
    status, body = await asyncio.to_thread(get, "/readyz")
    assert status == 503
    assert json.loads(body)["problems"] == ["endpoint cloud: its network is away"]
    assert (await asyncio.to_thread(get, "/nowhere"))[0] == 404


async def test_an_admin_port_in_use_is_a_clear_error(make_world: MakeWorld) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    world = await make_world(start=False)
    world.config = world.config.model_copy(
        update={"streamer": world.config.streamer.model_copy(update={"admin": f"127.0.0.1:{port}"})}
    )
    with pytest.raises(UStatusError, match=f"admin port 127.0.0.1:{port} can't be opened"):
        await world.start()
    server.close()
    await server.wait_closed()


async def test_recorded_topics_can_be_polled_though_nobody_subscribed(make_world: MakeWorld, publish: Publish) -> None:
    from history.reading.subscriber import HistoryClient

    world = await make_world(subscriptions={}, more='[history]\nrecord = ["//vehicle1/8001/FF/FFFF"]\n')
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(20)])
    async with InMemoryRpcClient(cloud, cloud.local) as rpc:
        client = HistoryClient(rpc, uris.parse("//vehicle1/4/1/0"))
        await world.until(lambda: world.assembly.logs.durable.newest_seq == 20)
        reply = await client.poll(PollRequest(topics=[SPEED]))
    payloads = [UMessage.FromString(data).payload for batch in reply.batches for data in batch.message]
    assert payloads == [str(number).encode() for number in range(20)]
    assert world.assembly.endpoints["cloud"].transport is not vehicle


async def test_a_slow_caller_is_bounded(make_world: MakeWorld) -> None:
    world = await make_world()
    cloud, vehicle = await world.node("cloud", "cloud", 0x9001), await world.node("vehicle", "vehicle1")
    method, callers = uris.parse("//vehicle1/8001/1/99"), uris.uri(uris.WILDCARD_AUTHORITY, 0xFFFFFFFF, 0xFF, 0)
    await world.hear(vehicle, callers, method)  # and never answers
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        with pytest.raises(UStatusError) as caught:
            await client.invoke_method(method, UPayload(), CallOptions(timeout_ms=100))
    assert caught.value.code == UCode.DEADLINE_EXCEEDED


async def test_the_last_known_interest_serves_over_a_restart_without_the_service(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    from usubscription.service import USubscriptionService
    from usubscription_client.client import USubscriptionClient

    world = await make_world(CLOUD_SERVICE, start=False)
    home = await world.node("cloud", "cloud", 0)
    service = USubscriptionService(home, "cloud", tmp_path / "cloud.db")
    await service.start()
    await world.start()
    await world.until(lambda: not world.parts.problems())
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    async with USubscriptionClient(cloud, cloud.local) as client:
        await client.subscribe(SPEED)
        await world.until(lambda: "cloud" in world.assembly.interest.sources[1].wants(SPEED))
        await vehicle.send(publish(SPEED, "before"))
        await heard.expect(1)
    await service.stop()
    await home.close()
    await world.stop()
    for path in world.config.streamer.data_dir.glob("usubscription.db*"):
        path.unlink()  # the vehicle's own service has forgotten, too
    await world.start()
    assert any("uSubscription of cloud does not answer" in problem for problem in world.parts.problems())
    await vehicle.send(publish(SPEED, "after"))
    await heard.expect(2)
    assert heard.texts == ["before", "after"]


async def test_a_peer_that_is_configured_no_more_holds_nothing_back(make_world: MakeWorld) -> None:
    world = await make_world(start=False)
    world.config.streamer.data_dir.mkdir()
    async with await Log.open(world.config.streamer.data_dir / "history.db", name="durable") as log:
        log.cursors.set("egress:long gone", 3, holder="egress")
        log.cursors.set("a consumer", 4)
    await world.start()
    assert set(world.assembly.logs.durable.cursors.seqs()) == {
        "egress:vehicle",
        "egress:mcu",
        "egress:cloud",
        "a consumer",
    }
