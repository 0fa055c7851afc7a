"""The express queue: bounded, by priority, emptied at the ttl; every request that can't be dispatched is answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.building import MemoryLimits
from streamer.walk import sender as expresses
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.sender import SENDERS_SHARE, Express
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.encoded import EncodedMessage, Stamp
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import nobody_listens
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

CALLER = uris.parse("//cloud/9001/1/0")
METHOD = uris.parse("//vehicle1/8001/1/7")
CLASSES = [UPriority.UPRIORITY_CS4, UPriority.UPRIORITY_CS5, UPriority.UPRIORITY_CS6]


class Network(UTransport):
    """Accepts messages while `there`."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK

    def __init__(self) -> None:
        self.there = False
        self.taken: list[UMessage] = []

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if self.there:
            self.taken += messages
        return [UStatus(code=UCode.OK if self.there else UCode.UNAVAILABLE) for _ in messages]


class Inside:
    """core.ustreamer of vehicle1."""

    def __init__(self) -> None:
        self.delivered: list[UMessage] = []

    def owns(self, uri: UUri) -> bool:
        return uris.matches(uris.parse("//vehicle1/4/FF/FFFF"), uri)

    def deliver(self, messages: Sequence[UMessage]) -> None:
        self.delivered += messages


def express(
    limit: int, bytes_max: int = 1 << 20
) -> tuple[Express, Endpoints, dict[str, Network], list[tuple[UMessage, int]]]:
    networks = {"cloud": Network(), "vehicle1": Network()}
    endpoints = Endpoints([Endpoint(name, [name], network) for name, network in networks.items()])  # type: ignore[arg-type]
    letters: list[tuple[UMessage, int]] = []
    dead_letters: Any = SimpleNamespace(
        add=lambda message, code, reason, endpoint, **_: letters.append((message, code))
    )
    hosted: Any = Inside()
    return (
        Express(
            endpoints, hosted, dead_letters, messages_max=limit, bytes_max=bytes_max, backoff=lambda: Backoff(1, 2)
        ),
        endpoints,
        networks,
        letters,
    )


def put(queues: Express, peer: Endpoint, message: UMessage | EncodedMessage) -> None:
    """As ingress does."""
    queues.queues[peer.name].put(message if isinstance(message, EncodedMessage) else EncodedMessage.of(message))


def request(priority: UPriority.ValueType, ttl_ms: int = 60_000) -> UMessage:
    return UMessageBuilder.request(CALLER, METHOD, ttl_ms).with_priority(priority).build()


@pytest.mark.spec("local~disp-rpc-error")
@pytest.mark.spec("local~disp-priority")
@given(
    limit=st.integers(1, 20),
    expired=st.lists(st.booleans(), max_size=40),
    priorities=st.lists(st.sampled_from(CLASSES), min_size=40, max_size=40),
)
def test_every_request_leaves_in_its_class_or_is_answered(
    limit: int, expired: list[bool], priorities: list[UPriority.ValueType]
) -> None:
    asyncio.run(_run(limit, expired, priorities))


async def _run(limit: int, expired: list[bool], priorities: list[UPriority.ValueType]) -> None:
    lanes, endpoints, networks, letters = express(limit)
    requests = []
    for is_expired, priority in zip(expired, priorities, strict=False):
        message = request(priority, 1_000)
        if is_expired:
            message.attributes.id.msb -= 5_000 << 16
        requests.append(message)
        put(lanes, endpoints["vehicle1"], message)
        assert len(lanes.queues["vehicle1"]) <= limit
    share = max(1, limit // CALLERS_SHARE)  # it is one caller
    accepted, refused = requests[:share], requests[share:]
    for network in networks.values():
        network.there = True
    running = [asyncio.create_task(lane.run()) for lane in lanes.queues.values()]
    async with asyncio.timeout(30):
        while any(len(lane) for lane in lanes.queues.values()):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    alive = [message for message, is_expired in zip(accepted, expired, strict=False) if not is_expired]
    assert networks["vehicle1"].taken == sorted(alive, key=lambda message: -message.attributes.priority)
    codes = {uuids.format(message.attributes.id): code for message, code in letters}
    assert {code for id, code in codes.items() if id in {uuids.format(one.attributes.id) for one in refused}} <= {
        UCode.RESOURCE_EXHAUSTED
    }
    assert len(codes) == len(requests) - len(alive) == len(networks["cloud"].taken)
    for answer in networks["cloud"].taken:
        attributes = answer.attributes
        assert attributes.type == UMessageType.UMESSAGE_TYPE_RESPONSE
        assert attributes.commstatus == codes[uuids.format(attributes.reqid)]
        assert UStatus.FromString(answer.payload).code == attributes.commstatus


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_waiting_request_fails_when_its_time_is_up_not_later() -> None:
    lanes, endpoints, networks, letters = express(10)
    networks["cloud"].there = True
    running = [asyncio.create_task(lane.run()) for lane in lanes.queues.values()]
    put(lanes, endpoints["vehicle1"], request(UPriority.UPRIORITY_CS4, 100))
    async with asyncio.timeout(20):
        while not networks["cloud"].taken:  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0.005)
    (answer,) = networks["cloud"].taken
    assert answer.attributes.commstatus == UCode.DEADLINE_EXCEEDED
    assert len(letters) == 1
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_response_that_cannot_be_dispatched_is_a_dead_letter_and_answers_nobody() -> None:
    lanes, endpoints, _, letters = express(1)
    for _ in range(3):
        asked = request(UPriority.UPRIORITY_CS4).attributes
        put(lanes, endpoints["cloud"], UMessageBuilder.response_for_request(asked).build())
    assert len(lanes.queues["cloud"]) == 1
    assert len(lanes.queues["vehicle1"]) == 0
    assert [code for _, code in letters] == [UCode.RESOURCE_EXHAUSTED] * 2


def answer_of(method: str, ttl_ms: int) -> UMessage:
    asked = UMessageBuilder.request(uris.parse("//cloud/4/1/0"), uris.parse(method), ttl_ms).build()
    return UMessageBuilder.response_for_request(asked.attributes).build()


OTHERS = ["//vehicle1/4/1/5", "//vehicle1/4/2/2", "//vehicle1/8001/1/2"]  # Pause; another version; an application


@pytest.mark.parametrize(
    "method", ["//vehicle1/4/1/1", "//vehicle1/4/1/2", "//vehicle1/4/1/3", "//vehicle1/80010004/1/2"]
)
async def test_an_answer_of_a_history_that_nobody_waits_for_any_more_is_counted_and_no_dead_letter(method: str) -> None:
    """The follower polls again from its position, and accepts no answer to an earlier poll."""
    lanes, endpoints, _, letters = express(100)
    cloud, queue = endpoints["cloud"], lanes.queues["cloud"]
    for one in (method, *OTHERS):
        put(lanes, cloud, answer_of(one, 1))
    running = asyncio.create_task(queue.run())
    async with asyncio.timeout(20):
        while len(queue):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [uris.format(message.attributes.source) for message, _ in letters] == [f"up:{one}" for one in OTHERS]
    assert cloud.dropped == {"history_answers": 1}


async def test_an_answer_of_a_history_for_which_there_is_no_room_is_counted_and_no_dead_letter() -> None:
    lanes, endpoints, _, letters = express(1)
    for _ in range(3):
        put(lanes, endpoints["cloud"], answer_of("//vehicle1/4/1/2", 60_000))
    assert (letters, endpoints["cloud"].dropped) == ([], {"history_answers": 2})


async def test_a_request_from_inside_is_answered_and_is_no_dead_letter() -> None:
    """While a network is away for a day, requests of the streamer itself must not evict the letters of others."""
    lanes, endpoints, _, letters = express(1)
    for _ in range(3):
        asked = UMessageBuilder.request(uris.parse("//vehicle1/4/1/0"), uris.parse("//cloud/0/3/8"), 1_000).build()
        put(lanes, endpoints["cloud"], asked)
    inside: Any = lanes._hosted
    assert [message.attributes.commstatus for message in inside.delivered] == [UCode.RESOURCE_EXHAUSTED] * 2
    assert inside.delivered[-1].attributes.reqid == asked.attributes.id
    assert letters == []


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_without_receiver_fails_soon_and_one_whose_network_is_away_is_retried() -> None:
    lanes, endpoints, networks, letters = express(10)
    vehicle, cloud = networks["vehicle1"], networks["cloud"]
    asked: list[int] = []
    answered = asyncio.Event()

    async def answer(messages: Sequence[UMessage]) -> list[UStatus]:
        cloud.taken += messages
        answered.set()
        return [UStatus(code=UCode.OK)] * len(messages)

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        asked.append(len(messages))
        if len(asked) == 1:
            return [UStatus(code=UCode.UNAVAILABLE)] * len(messages)
        return [nobody_listens("no subscriber")] * len(messages)

    vehicle.send_batch, cloud.send_batch = send_batch, answer  # type: ignore[method-assign]
    tasks = [asyncio.create_task(lane.run()) for lane in lanes.queues.values()]
    one = request(UPriority.UPRIORITY_CS4)
    put(lanes, endpoints["vehicle1"], one)
    await asyncio.wait_for(answered.wait(), 20)  # of a ttl of 60
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(asked) == {1}
    assert 3 <= len(asked) < 60, "tried again for a moment: its service may have begun to listen just now"
    (response,) = cloud.taken
    assert response.attributes.reqid == one.attributes.id
    assert response.attributes.commstatus == UCode.UNAVAILABLE
    assert UStatus.FromString(response.payload).code == UCode.UNAVAILABLE
    assert [code for _, code in letters] == [UCode.UNAVAILABLE]


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_to_a_service_that_has_just_begun_to_listen_is_taken_in_order() -> None:
    lanes, endpoints, networks, letters = express(10)
    vehicle, tries, taken = networks["vehicle1"], list[int](), asyncio.Event()

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        tries.append(len(messages))
        if len(tries) <= 3:
            if len(tries) == 1:  # a later request of the same caller must not overtake it
                put(lanes, endpoints["vehicle1"], second)
            return [nobody_listens("no subscriber")] * len(messages)
        vehicle.taken += messages
        if len(vehicle.taken) == 2:
            taken.set()
        return [UStatus(code=UCode.OK)] * len(messages)

    vehicle.send_batch = send_batch  # type: ignore[method-assign]
    first, second = request(UPriority.UPRIORITY_CS4), request(UPriority.UPRIORITY_CS4)
    running = asyncio.create_task(lanes.queues["vehicle1"].run())
    put(lanes, endpoints["vehicle1"], first)
    await asyncio.wait_for(taken.wait(), 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert vehicle.taken == [first, second]
    assert letters == []


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_with_a_short_ttl_is_answered_within_it_if_nobody_takes_it() -> None:
    lanes, _, networks, _ = express(10)
    vehicle, cloud = networks["vehicle1"], networks["cloud"]
    cloud.there = True

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        return [nobody_listens("no subscriber")] * len(messages)

    vehicle.send_batch = send_batch  # type: ignore[method-assign]
    running = [asyncio.create_task(lane.run()) for lane in lanes.queues.values()]
    lanes.queues["vehicle1"].put(EncodedMessage.of(request(UPriority.UPRIORITY_CS4, 400)))
    async with asyncio.timeout(20):
        while not cloud.taken:  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0.005)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert cloud.taken[0].attributes.commstatus == UCode.UNAVAILABLE, "not DEADLINE_EXCEEDED"


def large(caller: str, bytes: int, method: UUri = METHOD) -> UMessage:
    payload = UPayload(b"x" * bytes, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    return UMessageBuilder.request(uris.parse(caller), method, 60_000).build_from_upayload(payload)


def waiting(lanes: Express, name: str) -> Counter[int]:
    """Messages by the caller's ue_id."""
    return Counter(entry.message.attributes.source.ue_id for entry in lanes.queues[name]._sender.queue)


@pytest.mark.spec("local~disp-rpc-error")
def test_one_caller_leaves_room_in_bytes_for_others_of_its_authority_and_of_another() -> None:
    """250 requests of 4 MB to a peer that stalled were 1,144 MB."""
    lanes, endpoints, networks, letters = express(1_000, bytes_max=100_000)
    for _ in range(50):
        put(lanes, endpoints["vehicle1"], large("//cloud/1/1/0", 9_500))
    assert waiting(lanes, "vehicle1") == {1: 100_000 // CALLERS_SHARE // 9_600}
    put(lanes, endpoints["vehicle1"], large("//cloud/2/1/0", 9_500))
    assert waiting(lanes, "vehicle1")[2] == 1, "another uEntity of that authority"
    for number in range(3, 50):
        put(lanes, endpoints["vehicle1"], large(f"//cloud/{number}/1/0", 9_500))
    assert waiting(lanes, "vehicle1").total() == 100_000 // SENDERS_SHARE // 9_600, (
        "made-up callers have no more than their authority"
    )
    put(lanes, endpoints["vehicle1"], large("//cloud2/99/1/0", 9_500))
    assert waiting(lanes, "vehicle1")[0x99] == 1, "another authority"
    assert lanes.queues["vehicle1"].bytes <= 100_000
    refused = endpoints["vehicle1"].dropped
    assert refused["express_share"] == len(letters) == len(lanes.queues["cloud"])
    assert {code for _, code in letters} == {UCode.RESOURCE_EXHAUSTED}
    assert refused["express_full"] == 0
    assert networks["vehicle1"].taken == []


def test_all_callers_together_are_bounded_in_bytes_and_one_large_message_always_has_room() -> None:
    lanes, endpoints, _, letters = express(1_000, bytes_max=100_000)
    put(lanes, endpoints["vehicle1"], large("//cloud/1/1/0", 500_000))
    assert (len(lanes.queues["vehicle1"]), letters) == (1, [])
    for number in range(50):
        put(lanes, endpoints["vehicle1"], large(f"//cloud{number}/1/1/0", 9_500))
    assert endpoints["vehicle1"].dropped == {"express_full": 50}
    lanes, endpoints, _, letters = express(1_000, bytes_max=100_000)
    for number in range(50):
        put(lanes, endpoints["vehicle1"], large(f"//cloud{number}/1/1/0", 9_500))
    assert len(lanes.queues["vehicle1"]) == 100_000 // 9_600
    assert len(letters) == 50 - len(lanes.queues["vehicle1"])


def test_responses_count_for_who_caused_them_and_for_the_authority_that_sends_them() -> None:
    """A caller that does not listen must not keep a service from answering others; a service can't invent a caller."""
    lanes, endpoints, _, letters = express(1_000, bytes_max=100_000)

    def respond(caller: str) -> None:
        payload = UPayload(b"x" * 9_500, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
        asked = UMessageBuilder.request(uris.parse(caller), METHOD, 60_000).build().attributes
        put(
            lanes,
            endpoints["cloud"],
            UMessageBuilder.response_for_request(asked).build_from_upayload(payload),
        )

    for _ in range(20):
        respond("//cloud/1/1/0")
    assert len(lanes.queues["cloud"]) == 100_000 // CALLERS_SHARE // 9_600
    for number in range(2, 50):
        respond(f"//cloud/{number}/1/0")
    assert len(lanes.queues["cloud"]) == 100_000 // SENDERS_SHARE // 9_600
    assert {code for _, code in letters} == {UCode.RESOURCE_EXHAUSTED}


def test_what_is_refused_is_not_parsed_and_its_answer_names_it() -> None:
    lanes, endpoints, _, letters = express(1, bytes_max=100_000)
    for _ in range(2):
        message = large("//cloud/1/1/0", 9_500)
        carried = EncodedMessage(message.attributes.SerializeToString(), message.payload, Stamp(message.attributes))
        put(lanes, endpoints["vehicle1"], carried)
    assert len(letters) == 1
    assert carried._decoded is None
    (answer,) = (entry.message for entry in lanes.queues["cloud"]._sender.queue)
    assert answer.attributes.reqid == message.attributes.id


async def test_answers_find_room_where_the_lane_is_full_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expresses, "ANSWERS_MAX", 40)  # a quarter for one authority
    lanes, endpoints, networks, letters = express(4, bytes_max=100_000)
    for number in range(4):  # the way back is full, too
        put(
            lanes,
            endpoints["cloud"],
            large(f"//mcu{number}/1/1/0", 100, uris.parse("//cloud/9001/1/7")),
        )
    for _ in range(20):
        put(lanes, endpoints["vehicle1"], request(UPriority.UPRIORITY_CS4))
    assert len(lanes.queues["cloud"]) == 4 + 10
    assert endpoints["cloud"].dropped["answers_full"] == 9
    assert len(letters) == 19
    networks["cloud"].there = True
    running = asyncio.create_task(lanes.queues["cloud"].run())
    async with asyncio.timeout(20):
        while len(lanes.queues["cloud"]):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    used = lanes.queues["cloud"]
    assert used.bytes == 0
    for shares in (used._callers, used._senders, used._answers):
        assert repr(shares) == "Shares(0 pieces of 0 bytes, 0 owners)", "nothing is remembered of who was served"


async def test_what_is_being_sent_counts_until_it_is_taken_and_batches_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expresses, "EXPRESS_BYTES_MAX", 20_000)
    lanes, endpoints, networks, _ = express(1_000, bytes_max=100_000)
    go_on, sizes = asyncio.Event(), []

    async def slow(messages: Sequence[UMessage]) -> list[UStatus]:
        sizes.append(len(messages))
        await go_on.wait()
        return [UStatus(code=UCode.OK)] * len(messages)

    networks["vehicle1"].send_batch = slow  # type: ignore[method-assign]
    running = asyncio.create_task(lanes.queues["vehicle1"].run())
    for number in range(11):
        put(lanes, endpoints["vehicle1"], large(f"//cloud{number}/1/1/0", 9_500))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert lanes.queues["vehicle1"].bytes <= 100_000
    assert endpoints["vehicle1"].dropped == {"express_full": 1}
    go_on.set()
    async with asyncio.timeout(20):
        while len(lanes.queues["vehicle1"]):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sum(sizes) == 10
    assert max(sizes) <= 3


class Far(Network):
    """Answers when the test says so, and takes several batches meanwhile."""

    in_flight_messages = 1_000

    def __init__(self) -> None:
        super().__init__()
        self.batches: asyncio.Queue[tuple[Sequence[UMessage], asyncio.Future[list[UStatus]]]] = asyncio.Queue()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        answer: asyncio.Future[list[UStatus]] = asyncio.get_running_loop().create_future()
        self.batches.put_nowait((messages, answer))
        return await answer


async def test_a_network_far_away_has_several_batches_under_way_and_after_a_failure_all_leave_again_in_order() -> None:
    """One batch for each round trip would be 20 requests in a row within a second over 50 ms."""
    lanes, endpoints, _, letters = express(100)
    cloud, far = endpoints["cloud"], Far()
    cloud.transport = far  # type: ignore[assignment]
    running = asyncio.create_task(lanes.queues["cloud"].run())
    sent = [answer_of(f"//vehicle1/8001/1/{number}", 60_000) for number in range(1, 4)]
    under_way = []
    async with asyncio.timeout(20):
        for message in sent:  # each leaves though nothing is answered
            put(lanes, cloud, message)
            under_way.append(await far.batches.get())
        assert [[one.attributes for one in batch] for batch, _ in under_way] == [[one.attributes] for one in sent]
        put(lanes, cloud, answer_of("//vehicle1/8001/1/4", 60_000))
        under_way[1][1].set_result([UStatus(code=UCode.UNAVAILABLE)])
        under_way[0][1].set_result([UStatus(code=UCode.OK)])
        under_way[2][1].set_result([UStatus(code=UCode.UNAVAILABLE)])
        again: list[int] = []
        while len(again) < 3:
            batch, answer = await far.batches.get()
            again += [one.attributes.source.resource_id for one in batch]
            answer.set_result([UStatus(code=UCode.OK)] * len(batch))
        while len(lanes.queues["cloud"]):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (again, letters) == ([2, 3, 4], [])
    assert (cloud.forwarded, lanes.queues["cloud"].bytes) == (4, 0)


@pytest.mark.parametrize("fate", ["answered", "removed", "renamed"])
async def test_a_request_in_flight_while_its_endpoint_stops_is_answered_or_sent_again(
    monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    lanes, endpoints, networks, letters = express(10)
    cloud, vehicle, far = endpoints["cloud"], endpoints["vehicle1"], Far()
    vehicle.transport = far  # type: ignore[assignment]
    running = asyncio.create_task(lanes.queues["vehicle1"].run())
    message = request(CLASSES[0])
    async with asyncio.timeout(20):
        put(lanes, vehicle, message)
        _, answer = await far.batches.get()
        if fate == "answered":
            asyncio.get_running_loop().call_soon(answer.set_result, [UStatus(code=UCode.OK)])
        else:
            monkeypatch.setattr(expresses, "LAND_S", 0.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        inside = Endpoint("inside", ["vehicle1"], networks["vehicle1"])  # type: ignore[arg-type]
        if fate == "renamed":
            lanes.rename("vehicle1", "inside")
        endpoints.remove(vehicle)
        lanes.remove_endpoint("vehicle1")
        endpoints.add(inside)
        lanes.add_endpoint(inside)
        for network in networks.values():
            network.there = True
        running = asyncio.gather(*(lane.run() for lane in lanes.queues.values()))
        while any(len(lane) for lane in lanes.queues.values()):  # noqa: ASYNC110 - the queues tell nobody
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    answers = [one.attributes.commstatus for one in networks["cloud"].taken]
    assert answers == ([UCode.UNAVAILABLE] if fate == "removed" else [])
    assert [code for _, code in letters] == answers
    assert networks["vehicle1"].taken == ([message] if fate == "renamed" else [])
    assert (vehicle.forwarded, inside.forwarded, cloud.forwarded) == (
        fate == "answered",
        fate == "renamed",
        fate == "removed",
    )


def frame(sink: str, bytes: int) -> UMessage:
    payload = UPayload(b"x" * bytes, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    return UMessageBuilder.notification(uris.parse("//vehicle1/4/1/8003"), uris.parse(sink)).build_from_upayload(
        payload
    )


@given(memory_mib=st.integers(32, 4_096))
def test_what_may_be_under_way_to_one_follower_has_room_while_its_network_takes_nothing(memory_mib: int) -> None:
    limits = MemoryLimits(memory_mib << 20)
    frames = express(4_096, limits.express_bytes_max)[0].queues["cloud"]._frames
    assert limits.window_bytes_max <= frames.each_bytes_max


def test_frames_leave_room_for_answers_and_for_those_of_other_followers() -> None:
    lanes, endpoints, _, letters = express(1_000, bytes_max=100_000)
    cloud = endpoints["cloud"]
    for _ in range(50):
        put(lanes, cloud, frame("//cloud/1/1/0", 9_500))
    assert len(lanes.queues["cloud"]) == 100_000 // SENDERS_SHARE // 9_600
    for _ in range(50):
        put(lanes, cloud, frame("//cloud/2/1/0", 9_500))
    assert len(lanes.queues["cloud"]) == 100_000 // 9_600
    assert cloud.dropped == {"frames": 100 - len(lanes.queues["cloud"])}
    asked = UMessageBuilder.request(uris.parse("//cloud/1/1/0"), METHOD, 60_000).build()
    put(lanes, cloud, UMessageBuilder.response_for_request(asked.attributes).build())
    assert len(lanes.queues["cloud"]) == 100_000 // 9_600 + 1
    assert letters == []
