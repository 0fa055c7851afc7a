"""Calls over the in-process transport: what is answered, what is not, and what ends a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from campaigns.simulation.network import FaultyNetwork
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer, SimpleNotifier
from uprotocol.communication import rpc_server as outbox
from uprotocol.message import UMessageBuilder, UPayload, validate
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from uprotocol.v1.uuid_pb2 import UUID

spec = pytest.mark.spec
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW
SERVICE, APP = LocalUriProvider("service", 0x30, 2), LocalUriProvider("app", 0x20, 1)
GET = SERVICE.get_resource(1)
LONG = CallOptions(timeout_ms=60_000)
SHORT = CallOptions(timeout_ms=30)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Bench:
    network: FaultyNetwork
    server_transport: LocalTransport
    client_transport: LocalTransport
    server: InMemoryRpcServer
    client: InMemoryRpcClient


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    network = FaultyNetwork()
    async with LocalTransport.on(network, SERVICE) as serving, LocalTransport.on(network, APP) as calling:
        server = InMemoryRpcServer(serving, SERVICE)
        async with InMemoryRpcClient(calling, APP) as client:
            yield Bench(network, serving, calling, server, client)
        await server.close()


async def fails(call: Any, code: UCode.ValueType, text: str = "") -> UStatusError:
    with pytest.raises(UStatusError) as caught:
        await asyncio.wait_for(call, 20)
    assert caught.value.code == code
    assert text in caught.value.message
    return caught.value


async def until(holds: Any) -> None:
    """Run other tasks of the event loop until `holds()`; the in-process transport needs turns, but no time."""
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("what was waited for never came")


@asynccontextmanager
async def unanswered(bench: Bench) -> AsyncIterator[None]:
    """A running call that nobody answers; cancelled at the end."""
    call = asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))
    yield
    assert not call.done()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


class Responses:
    """Receives the responses to APP, in addition to its client."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)

    async def next(self) -> UMessage:
        return await asyncio.wait_for(self.messages.get(), 10)


async def responses(bench: Bench) -> Responses:
    listener = Responses()
    await bench.client_transport.register_listener(GET, listener, APP.get_source())
    return listener


def request(**changes: Any) -> UMessage:
    message = UMessageBuilder.request(APP.get_source(), GET, 60_000).build()
    for name, value in changes.items():
        setattr(message.attributes, name, value)
    return message


@spec("local~l2-rpc-client")
@spec("local~l2-rpc-server")
@spec("local~tap-token")
@spec("local~cap-carry")
@spec("dsn~service-error-model-success-response~1")
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Timestamp(seconds=7), UPayload.pack(Timestamp(seconds=7))),
        (UPayload(b"raw", RAW), UPayload(b"raw", RAW)),
        (None, UPayload()),
    ],
)
async def test_a_call_is_answered(bench: Bench, kind: str, answer: Any, expected: UPayload) -> None:
    seen: list[UMessage] = []

    def sync(request: UMessage) -> Any:
        seen.append(request)
        return answer

    async def deferred(request: UMessage) -> Any:
        await asyncio.sleep(0)
        return sync(request)

    await bench.server.register_request_handler(1, sync if kind == "sync" else deferred)
    heard = await responses(bench)
    options = CallOptions(60_000, UPriority.UPRIORITY_CS5, token="t", permission_level=3, traceparent=TRACEPARENT)
    assert await bench.client.invoke_method(GET, UPayload(b"ask", RAW), options) == expected
    (asked,) = seen
    attributes = asked.attributes
    assert (asked.payload, attributes.source, attributes.sink) == (b"ask", APP.get_source(), GET)
    assert (
        attributes.ttl,
        attributes.priority,
        attributes.token,
        attributes.permission_level,
        attributes.traceparent,
    ) == (
        60_000,
        UPriority.UPRIORITY_CS5,
        "t",
        3,
        TRACEPARENT,
    )
    answered = (await heard.next()).attributes
    assert not answered.HasField("commstatus"), "unset means OK"
    assert (answered.reqid, answered.priority, answered.ttl) == (attributes.id, attributes.priority, attributes.ttl)


@spec("dsn~service-error-model-error-response~1")
@spec("dsn~service-error-model-failed-rpc~1")
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_error_reaches_the_caller_whole(bench: Bench, kind: str) -> None:
    status = UStatus(code=UCode.NOT_FOUND, message="no such thing")
    status.details.add().Pack(Timestamp(seconds=1))

    def sync(_: UMessage) -> None:
        raise UStatusError.from_status(status)

    async def deferred(request: UMessage) -> None:
        sync(request)

    await bench.server.register_request_handler(1, sync if kind == "sync" else deferred)
    heard = await responses(bench)
    error = await fails(bench.client.invoke_method(GET, options=LONG), UCode.NOT_FOUND)
    assert error.status == status
    response = await heard.next()
    assert response.attributes.commstatus == UPayload.of(response).unpack(UStatus).code == UCode.NOT_FOUND


@spec("dsn~service-error-model-error-response~1")
@pytest.mark.parametrize("fault", [lambda _: 1 // 0, lambda _: "a string", lambda _: UPayload(b"", 7).nothing])
async def test_a_faulty_handler_is_an_internal_error_and_serving_goes_on(bench: Bench, fault: Any) -> None:
    await bench.server.register_request_handler(1, fault)
    await bench.server.register_request_handler(2, lambda _: None)
    for _ in range(2):
        error = await fails(bench.client.invoke_method(GET, options=LONG), UCode.INTERNAL, "log")
        assert "division" not in error.message, "what went wrong inside is nobody's business"
    assert await bench.client.invoke_method(SERVICE.get_resource(2), options=LONG) == UPayload()


async def test_a_malformed_payload_is_answered(bench: Bench) -> None:
    await bench.server.register_request_handler(1, lambda request: UPayload.of(request).unpack(Timestamp))
    await fails(bench.client.invoke_method(GET, UPayload(b"\xff", RAW), LONG), UCode.INVALID_ARGUMENT, "protobuf")


@spec("dsn~service-error-model-failed-rpc~1")
@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "gave no reason"),
        (UPayload(b"\xff\xff", RAW), "gave no reason"),
        (UPayload.pack(UStatus(code=UCode.ABORTED, message="other code")), "other code"),
        (UPayload.pack_to_any(UStatus(code=UCode.DATA_LOSS, message="in an Any")), "in an Any"),
    ],
)
async def test_the_commstatus_decides_whatever_the_payload_is(
    bench: Bench, payload: UPayload | None, message: str
) -> None:
    class Answers:
        async def on_receive(self, request: UMessage) -> None:
            builder = UMessageBuilder.response_for_request(request.attributes).with_commstatus(UCode.DATA_LOSS)
            await bench.server_transport.send(builder.build_from_upayload(payload))

    await bench.server_transport.register_listener(uris.pattern(resource=0), Answers(), GET)
    await fails(bench.client.invoke_method(GET, options=LONG), UCode.DATA_LOSS, message)


@spec("dsn~service-error-model-success-response~1")
async def test_an_explicit_ok_is_success(bench: Bench) -> None:
    class Answers:
        async def on_receive(self, request: UMessage) -> None:
            builder = UMessageBuilder.response_for_request(request.attributes).with_commstatus(UCode.OK)
            await bench.server_transport.send(builder.build_from_upayload(UPayload(b"ok", RAW)))

    await bench.server_transport.register_listener(uris.pattern(resource=0), Answers(), GET)
    assert (await bench.client.invoke_method(GET, options=LONG)).data == b"ok"


async def test_a_response_with_another_ttl_is_taken(bench: Bench) -> None:
    class Answers:
        async def on_receive(self, request: UMessage) -> None:
            # reduced by a broker
            builder = UMessageBuilder.response_for_request(request.attributes).with_ttl(1_000)
            await bench.server_transport.send(builder.build())

    await bench.server_transport.register_listener(uris.pattern(resource=0), Answers(), GET)
    assert await bench.client.invoke_method(GET, options=LONG) == UPayload()


@spec("dsn~communication-layer-impl-error-handling~1")
async def test_the_own_timer_ends_a_call_and_its_late_response_is_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[UMessage] = []

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        sent.extend(messages)
        return [UStatus()] * len(messages)

    with monkeypatch.context() as patched:
        patched.setattr(bench.client_transport, "send_batch", send_batch)
        await fails(bench.client.invoke_method(GET, options=SHORT), UCode.DEADLINE_EXCEEDED, "30 ms")
    late = UMessageBuilder.response_for_request(sent[0].attributes).with_ttl(60_000).build()
    await bench.server_transport.send(late)
    await until(lambda: bench.client.dropped["late_response"] == 1)
    assert "pending=0" in repr(bench.client)


async def test_a_second_response_is_counted(bench: Bench) -> None:
    class AnswersTwice:
        async def on_receive(self, request: UMessage) -> None:
            builder = UMessageBuilder.response_for_request(request.attributes)
            await bench.server_transport.send_batch(
                [builder.build_from_upayload(UPayload(data, RAW)) for data in (b"one", b"two")]
            )

    await bench.server_transport.register_listener(uris.pattern(resource=0), AnswersTwice(), GET)
    assert (await bench.client.invoke_method(GET, options=LONG)).data == b"one"
    await until(lambda: bench.client.dropped["late_response"] == 1)


async def test_notifications_are_not_responses(bench: Bench) -> None:
    await SimpleNotifier(bench.server_transport, SERVICE).notify(0x8001, APP.get_source())
    await until(lambda: bench.client.dropped["not_a_response"] == 1)


async def test_calls_run_side_by_side_and_find_their_own_answer(bench: Bench) -> None:
    gate = asyncio.Event()

    async def echo(request: UMessage) -> UPayload:
        await gate.wait()
        return UPayload.of(request)

    await bench.server.register_request_handler(1, echo)
    calls = [asyncio.ensure_future(bench.client.invoke_method(GET, UPayload(b"%d" % n, RAW), LONG)) for n in range(200)]
    await until(lambda: "running=200" in repr(bench.server))
    gate.set()
    assert [answer.data for answer in await asyncio.gather(*calls)] == [b"%d" % n for n in range(200)]


async def test_calls_that_are_made_together_leave_in_one_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller gets the status of its own call."""
    await bench.server.register_request_handler(1, lambda request: UPayload.of(request))
    sizes: list[int] = []
    whole = bench.client_transport.send_batch

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        sizes.append(len(messages))
        statuses = await whole(messages)
        refused = [message.payload == b"7" for message in messages]
        return [UStatus(code=UCode.UNAVAILABLE) if no else yes for no, yes in zip(refused, statuses, strict=True)]

    monkeypatch.setattr(bench.client_transport, "send_batch", send_batch)
    calls = [asyncio.ensure_future(bench.client.invoke_method(GET, UPayload(b"%d" % n, RAW), LONG)) for n in range(200)]
    cancelled = asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))
    await asyncio.sleep(0)
    cancelled.cancel()  # before it is sent
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sizes == [200]
    assert [getattr(answer, "data", None) for answer in answers] == [None if n == 7 else b"%d" % n for n in range(200)]


async def test_closing_ends_a_call_that_the_network_has_not_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def stall(_: Sequence[UMessage]) -> list[UStatus]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bench.client_transport, "send_batch", stall)
    calls = [asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))]
    await begun.wait()
    calls.append(asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG)))
    await asyncio.sleep(0)  # it waits for the next turn of the event loop
    await bench.client.close()
    for call in calls:
        await fails(call, UCode.CANCELLED)


async def test_pending_calls_are_bounded(bench: Bench) -> None:
    async with InMemoryRpcClient(bench.client_transport, APP, calls_pending_max=1) as client:
        waiting = asyncio.ensure_future(client.invoke_method(GET, options=LONG))
        await until(lambda: "pending=1" in repr(client))
        await fails(client.invoke_method(GET), UCode.RESOURCE_EXHAUSTED, "limit")
        await client.close()
        await fails(waiting, UCode.CANCELLED)
        await client.close()
        await fails(client.invoke_method(GET), UCode.FAILED_PRECONDITION, "open")


@spec("dsn~communication-layer-impl-error-handling~1")
@pytest.mark.parametrize(
    "options",
    [
        CallOptions(timeout_ms=0),
        CallOptions(timeout_ms=-1),
        CallOptions(priority=UPriority.UPRIORITY_CS3),
        CallOptions(traceparent="x"),
    ],
)
async def test_a_call_that_would_be_invalid_is_not_sent(bench: Bench, options: CallOptions) -> None:
    await fails(bench.client.invoke_method(GET, options=options), UCode.INVALID_ARGUMENT)
    await fails(bench.client.invoke_method(SERVICE.get_resource(0x8000)), UCode.INVALID_ARGUMENT)


async def test_a_network_that_is_away_fails_the_call_at_once(bench: Bench) -> None:
    bench.network.break_()
    await fails(bench.client.invoke_method(GET, options=LONG), UCode.UNAVAILABLE)
    assert "pending=0" in repr(bench.client)


async def test_a_cancelled_call_leaves_nothing(bench: Bench) -> None:
    call = asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))
    await until(lambda: "pending=1" in repr(bench.client))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "pending=0" in repr(bench.client)


async def test_requests_at_once_are_bounded(bench: Bench) -> None:
    gate = asyncio.Event()
    server = InMemoryRpcServer(bench.server_transport, SERVICE, requests_running_max=2, share=1)

    async def wait(_: UMessage) -> None:
        await gate.wait()

    await server.register_request_handler(1, wait)
    calls = [asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG)) for _ in range(3)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    await fails(refused, UCode.RESOURCE_EXHAUSTED, "2 requests")
    gate.set()
    assert await asyncio.gather(*waiting) == [UPayload(), UPayload()]
    await server.close()


async def test_one_authority_has_its_share_of_what_runs_in_number_and_in_bytes(bench: Bench) -> None:
    gate = asyncio.Event()
    server = InMemoryRpcServer(bench.server_transport, SERVICE, requests_running_max=8, requests_bytes_max=4_000)

    async def wait(_: UMessage) -> None:
        await gate.wait()

    await server.register_request_handler(1, wait)
    async with (
        LocalTransport.on(bench.network, LocalUriProvider("other", 0x20, 1)) as transport,
        InMemoryRpcClient(transport, transport.local) as other,
    ):
        # one always fits
        long = asyncio.ensure_future(bench.client.invoke_method(GET, UPayload(bytes(2_000), RAW), LONG))
        await fails(
            bench.client.invoke_method(GET, UPayload(b"x", RAW), LONG),
            UCode.RESOURCE_EXHAUSTED,
            "requests of 1000 bytes",
        )
        calls = [asyncio.ensure_future(other.invoke_method(GET, options=LONG)) for _ in range(2)]
        await until(lambda: len(server._running) == 3)
        await fails(
            other.invoke_method(GET, options=LONG),
            UCode.RESOURCE_EXHAUSTED,
            "2 requests are being handled for authority 'other'",
        )
        gate.set()
        await asyncio.gather(long, *calls)
        await until(lambda: not server._running)
        assert await other.invoke_method(GET, options=LONG) == UPayload()
    assert repr(server._shares) == "Shares(0 pieces of 0 bytes, 0 owners)"
    await server.close()


async def test_the_answers_of_one_authority_leave_room_and_turns_to_others() -> None:
    sent: list[list[UMessage]] = []
    gate = asyncio.Event()

    class Network(LocalTransport):
        async def send_batch(self, messages: Any) -> list[UStatus]:
            sent.append(list(messages))
            await gate.wait()
            return [UStatus()] * len(messages)

    def response(caller: str, size: int) -> UMessage:
        request = UMessageBuilder.request(uris.uri(caller, 0x20, 1), GET, 1_000).build()
        return UMessageBuilder.response_for_request(request.attributes).build_from_upayload(UPayload(bytes(size), RAW))

    taken: list[int] = []
    responses = outbox.Responses(Network.on(LocalNetwork(), SERVICE), waiting_max=16, bytes_max=40_000, batch_max=2)
    responses.on_sent = lambda: taken.append(len(responses))
    for _ in range(6):
        responses.post(response("many", 1))
    assert (len(responses), dict(responses.dropped)) == (4, {"responses_full": 2})
    refused = UMessageBuilder.request(uris.uri("many", 0x20, 1), GET, 1_000).build().attributes
    responses.refuse(refused, invalid("no"))
    assert responses.dropped["responses_full"] == 3
    for _ in range(2):
        responses.post(response("large", 9_000))  # each uses all bytes of its share
    assert responses.dropped["responses_full"] == 4
    responses.post(response("one", 1))
    await until(lambda: sent)
    assert [message.attributes.sink.authority_name for message in sent[0]] == ["many", "large"]
    assert responses.shares.full("large", 1)  # a response counts until the network has accepted it
    gate.set()
    await responses.drain(10_000)
    assert [message.attributes.sink.authority_name for batch in sent[1:] for message in batch] == [
        "one",
        "many",
        "many",
        "many",
    ]
    assert (responses.shares.bytes, taken[-1]) == (0, 0)
    assert responses.shares.full("large", 9_000) is None


@spec("dsn~up-attributes-ttl-timeout~1")
async def test_an_expired_request_is_not_handled(bench: Bench) -> None:
    seen: list[UMessage] = []
    server = InMemoryRpcServer(bench.server_transport, SERVICE)
    await server.register_request_handler(1, seen.append)
    old = UUID(msb=(uuids.now_ms() - 1_001) << 16 | 0x7000, lsb=1 << 63)
    server.on_receive(UMessageBuilder.request(APP.get_source(), GET, 1_000).with_id(old).build())
    assert server.dropped["expired"] == 1
    assert not seen
    await server.close()


class DeliversAnything(LocalTransport):
    """A transport that does not validate; the server has to do it."""

    async def register_listener(self, source_filter: Any, listener: Any, sink_filter: Any = None) -> None:
        self.listener = listener

    async def unregister_listener(self, source_filter: Any, listener: Any, sink_filter: Any = None) -> None:
        raise UStatusError(UCode.UNAVAILABLE, "closed already")


async def test_a_malformed_request_is_answered_if_an_answer_to_it_can_be_valid(bench: Bench) -> None:
    async with DeliversAnything.on(bench.network, LocalUriProvider("other", 1, 1)) as transport:
        server, heard = InMemoryRpcServer(transport, SERVICE, check=validate), await responses(bench)
        await server.register_request_handler(1, lambda _: None)
        transport.listener.on_receive_batch(
            [request(traceparent="nonsense"), request(priority=UPriority.UPRIORITY_CS1), UMessage()]
        )
        answered = await heard.next()
        assert answered.attributes.commstatus == UCode.INVALID_ARGUMENT
        assert "traceparent" in UPayload.of(answered).unpack(UStatus).message
        assert server.dropped == {"unanswerable": 2}
        transport.listener.on_receive(
            UMessageBuilder.notification(SERVICE.get_resource(0x8000), APP.get_source()).build()
        )
        assert server.dropped == {"unanswerable": 3}
        await server.close()


async def test_a_hook_may_refuse(bench: Bench) -> None:
    def check(request: UMessage) -> None:
        if request.attributes.token != "right":
            raise UStatusError(UCode.UNAUTHENTICATED, "show a token")

    server = InMemoryRpcServer(bench.server_transport, SERVICE, check=check)
    await server.register_request_handler(1, lambda _: None)
    await fails(bench.client.invoke_method(GET, options=LONG), UCode.UNAUTHENTICATED, "show a token")
    assert await bench.client.invoke_method(GET, options=CallOptions(60_000, token="right")) == UPayload()
    await server.close()


@spec("local~l2-rpc-server")
async def test_one_handler_per_method(bench: Bench) -> None:
    def one(_: UMessage) -> None: ...

    def two(_: UMessage) -> None: ...

    server = bench.server
    await server.register_request_handler(1, one)
    await server.register_request_handler(1, one)
    await fails(server.register_request_handler(1, two), UCode.ALREADY_EXISTS)
    await fails(server.unregister_request_handler(1, two), UCode.NOT_FOUND)
    await server.unregister_request_handler(1, one)
    await fails(server.unregister_request_handler(1, one), UCode.NOT_FOUND)
    await fails(bench.client.invoke_method(GET, options=SHORT), UCode.DEADLINE_EXCEEDED)
    await server.register_request_handler(1, two)
    assert await bench.client.invoke_method(GET, options=LONG) == UPayload()
    for resource in (0, 0x8000, 0xFFFF, 0x1_0000):
        await fails(server.register_request_handler(resource, one), UCode.INVALID_ARGUMENT)


async def test_a_failed_registration_leaves_nothing(bench: Bench) -> None:
    closed = LocalTransport.on(bench.network, SERVICE)
    server = InMemoryRpcServer(closed, SERVICE)
    await fails(server.register_request_handler(1, lambda _: None), UCode.UNAVAILABLE)
    assert "methods=0" in repr(server)


async def test_close_waits_for_running_handlers(bench: Bench) -> None:
    started, gate = asyncio.Event(), asyncio.Event()

    async def wait(_: UMessage) -> Timestamp:
        started.set()
        await gate.wait()
        return Timestamp(seconds=3)

    await bench.server.register_request_handler(1, wait)
    call = asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))
    await started.wait()
    closing = asyncio.ensure_future(bench.server.close())
    await until(lambda: "methods=0" in repr(bench.server))
    gate.set()
    await closing
    assert (await call).unpack(Timestamp).seconds == 3
    await bench.server.close()
    assert "running=0, responses=0" in repr(bench.server)


async def test_close_ends_handlers_that_take_too_long(bench: Bench) -> None:
    started = asyncio.Event()

    async def forever(_: UMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    server = InMemoryRpcServer(bench.server_transport, SERVICE, drain_ms_max=1)
    await server.register_request_handler(1, forever)
    call = asyncio.ensure_future(bench.client.invoke_method(GET, options=LONG))
    await started.wait()
    await server.close()
    await fails(call, UCode.UNAVAILABLE)


async def test_close_does_not_wait_for_a_network_that_takes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, stuck = InMemoryRpcServer(bench.server_transport, SERVICE, drain_ms_max=1), asyncio.Event()

    async def never(_: Any) -> list[UStatus]:
        stuck.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(bench.server_transport, "send_batch", never)
    await server.register_request_handler(1, lambda _: None)
    async with unanswered(bench):
        await stuck.wait()
        await asyncio.wait_for(server.close(), 10)
    assert "responses=0" in repr(server)
    assert server.dropped["response_not_sent"] == 1


async def test_a_fault_of_the_transport_does_not_end_the_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def faulty(_: Any) -> list[UStatus]:
        raise ZeroDivisionError

    await bench.server.register_request_handler(1, lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(bench.server_transport, "send_batch", faulty)
        async with unanswered(bench):
            await until(lambda: bench.server.dropped["response_not_sent"] == 1)
    assert await bench.client.invoke_method(GET, options=LONG) == UPayload()


async def test_responses_that_the_network_refuses_are_counted(bench: Bench) -> None:
    def go_dark(_: UMessage) -> None:
        bench.server_transport.disconnect()

    await bench.server.register_request_handler(1, go_dark)
    async with unanswered(bench):
        await until(lambda: bench.server.dropped["response_not_sent"] == 1)
    bench.server_transport.reconnect()


@spec("dsn~communication-layer-impl-async~1")
async def test_responses_of_a_burst_travel_in_batches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send_batch = bench.server_transport.send_batch

    async def counted(messages: Any) -> list[UStatus]:
        sizes.append(len(messages))
        return await send_batch(messages)

    monkeypatch.setattr(bench.server_transport, "send_batch", counted)
    await bench.server.register_request_handler(1, UPayload.of)
    answers = await asyncio.gather(
        *(bench.client.invoke_method(GET, UPayload(b"%d" % n, RAW), LONG) for n in range(100))
    )
    assert [answer.data for answer in answers] == [b"%d" % n for n in range(100)]
    assert sum(sizes) == 100
    assert max(sizes) > 10


async def test_an_empty_authority_is_the_own_one(bench: Bench) -> None:
    async with LocalTransport.on(bench.network, LocalUriProvider("app", 0x31, 1)) as neighbour:
        server = InMemoryRpcServer(neighbour, LocalUriProvider("app", 0x31, 1))
        await server.register_request_handler(1, lambda _: None)
        assert await bench.client.invoke_method(uris.parse("/31/1/1"), options=LONG) == UPayload()
        await server.close()


def test_invalid_is_not_to_be_retried() -> None:
    assert not invalid("x").retryable
