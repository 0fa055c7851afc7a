"""A gateway over each broker: what arrives, how often and in which order; also when the broker or the gateway ends
meanwhile.

A lost, doubled or reordered message fails the check, except that over a restart a message may come twice: delivery is
at least once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from streamer.commands.demo.drive import send_all
from tests.brokers.conftest import StartBroker
from tests.brokers.makes import AnyBroker, Make
from tests.brokers.stage import END, RECEIVER, SENDER, WAIT_S, App, Counts, Stage, all_of, publish, raw, topic
from transports.conformance.sinks import Sink
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient, InMemoryRpcServer
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SIDES = (("vehicle1", "cloud"), ("cloud", "vehicle1"))
METHOD, OTHER_METHOD = 7, 8
CALL_MS = 20_000
CALLS = 20
BACKLOG = 2_000  # more than the 1,000 that many brokers keep unless they are set up
BATCH = 100
SIZES = (0, 1, 127, 128, 65_535, 65_536, 300_000, MESSAGE_BYTES_MAX)


@pytest.fixture
async def stage(make: Make, broker: AnyBroker, tmp_path: Path) -> AsyncIterator[Stage]:
    """A gateway on the broker of all tests."""
    async with AsyncExitStack() as stack:
        made = Stage(make, broker, tmp_path / "gateway", stack)
        await made.start_gateway()
        yield made


@pytest.fixture
async def own(make: Make, start_broker: StartBroker, tmp_path: Path) -> AsyncIterator[Stage]:
    """One on a broker of its own, which the test may end."""
    broker = start_broker()
    async with AsyncExitStack() as stack:
        made = Stage(make, broker, tmp_path / "gateway", stack)
        await made.start_gateway()
        yield made


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def send(app: App, payloads: list[bytes], *, pause_s: float = 0.0) -> None:
    """Publish them in batches, each again until the broker has acknowledged it."""
    authority = app.authority
    for first in range(0, len(payloads), BATCH):
        await send_all(app.transport, [publish(authority, payload) for payload in payloads[first : first + BATCH]])
        await asyncio.sleep(pause_s)


def is_right(counts: Counts, facts: dict[str, str], *, may_double: bool = False) -> None:
    facts[""] = str(counts)
    assert not counts.lost, str(counts)
    assert not counts.reordered, str(counts)
    assert may_double or not counts.doubled, str(counts)


async def test_publishes(stage: Stage, facts: dict[str, str]) -> None:
    sent = numbers(500)
    for here, there in SIDES:
        sender, receiver = await stage.app(here, SENDER), await stage.app(there)
        heard = await receiver.hear_all(here)
        await send(sender, [*sent, END])
        is_right(await all_of(heard, sent), facts)


async def test_notifications(stage: Stage, facts: dict[str, str]) -> None:
    sent = numbers(500)
    for here, there in SIDES:
        sender, receiver = await stage.app(here, SENDER), await stage.app(there)
        heard, sink = Sink(WAIT_S), receiver.local.get_source()
        await receiver.transport.register_listener(uris.pattern(here), heard, sink)
        messages = [
            UMessageBuilder.notification(topic(here), sink).build_from_upayload(raw(one)) for one in [*sent, END]
        ]
        await send_all(sender.transport, messages)
        is_right(await all_of(heard, sent), facts)


class Served:
    """A method that counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: UMessage) -> UPayload:
        self.calls += 1
        return raw(request.payload.upper())


async def test_calls(stage: Stage) -> None:
    """Each is answered, and was served once."""
    for here, there in SIDES:
        caller, callee = await stage.app(here), await stage.app(there, SENDER)
        served, server = Served(), InMemoryRpcServer(callee.transport, callee.local)
        await server.register_request_handler(METHOD, served)
        async with InMemoryRpcClient(caller.transport, caller.local) as client:
            calls = [
                client.invoke_method(callee.local.get_resource(METHOD), raw(b"%d" % n), CallOptions(timeout_ms=CALL_MS))
                for n in range(CALLS)
            ]
            answers = [answer.data for answer in await asyncio.gather(*calls)]
        await server.close()
        assert answers == numbers(CALLS)
        assert served.calls == CALLS


async def test_call_inside_a_listener(stage: Stage) -> None:
    """Its answer comes while the message that it handles has not been acknowledged."""
    vehicle, cloud = await stage.app("vehicle1", SENDER), await stage.app("cloud")
    server = InMemoryRpcServer(vehicle.transport, vehicle.local)
    await server.register_request_handler(METHOD, Served())
    answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
    async with InMemoryRpcClient(cloud.transport, cloud.local) as client:

        class Caller:
            async def on_receive(self, message: UMessage) -> None:
                method = vehicle.local.get_resource(METHOD)
                try:
                    answer = await client.invoke_method(method, raw(b"x"), CallOptions(timeout_ms=5_000))
                except Exception as error:
                    answers.put_nowait(error)
                else:
                    answers.put_nowait(answer.data)

        await cloud.transport.register_listener(uris.pattern("vehicle1"), Caller(), uris.pattern("cloud", RECEIVER))
        note = UMessageBuilder.notification(topic("vehicle1"), cloud.local.get_source())
        await send_all(vehicle.transport, [note.build_from_upayload(raw(b"1"))])
        async with asyncio.timeout(WAIT_S):
            assert await answers.get() == b"X"
    await server.close()


async def test_overlapping_filters(stage: Stage, facts: dict[str, str]) -> None:
    """A wildcard and a concrete filter of one client: each listener hears each message once."""
    cloud, vehicle = await stage.app("cloud", SENDER), await stage.app("vehicle1")
    exact, all_topics, sent = Sink(WAIT_S), Sink(WAIT_S), numbers(200)
    await vehicle.transport.register_listener(topic("cloud"), exact)
    await vehicle.transport.register_listener(
        uris.pattern("cloud", SENDER), all_topics, uris.pattern("vehicle1", RECEIVER)
    )
    await vehicle.transport.register_listener(uris.uri("cloud", SENDER, 0xFF, 0xFFFF), all_topics)
    await send(cloud, [*sent, END])
    for heard in (exact, all_topics):
        is_right(await all_of(heard, sent), facts)


async def test_calls_with_overlapping_filters(stage: Stage, facts: dict[str, str]) -> None:
    """A client that subscribes to all messages for its host serves a call only once."""
    caller, callee = await stage.app("cloud"), await stage.app("vehicle1", SENDER)
    served, server, watched = Served(), InMemoryRpcServer(callee.transport, callee.local), Sink(WAIT_S)
    await server.register_request_handler(METHOD, served)
    await callee.transport.register_listener(uris.pattern("cloud"), watched, uris.pattern("vehicle1", SENDER))
    async with InMemoryRpcClient(caller.transport, caller.local) as client:
        for number in range(CALLS):
            method = callee.local.get_resource(METHOD)
            await client.invoke_method(method, raw(b"%d" % number), CallOptions(timeout_ms=CALL_MS))
    await server.close()
    facts[""] = f"{CALLS} calls served {served.calls} times, watched {len(watched.messages)} times"
    assert (served.calls, len(watched.messages)) == (CALLS, CALLS), facts[""]


async def test_sizes(stage: Stage, facts: dict[str, str]) -> None:
    """Up to what the transport takes, both ways."""
    sent = [bytes([1 + place]) * size for place, size in enumerate(SIZES)]
    for here, there in SIDES:
        sender, receiver = await stage.app(here, SENDER), await stage.app(there)
        heard = await receiver.hear_all(here)
        for payload in [*sent, END]:
            await send(sender, [payload])
        is_right(await all_of(heard, sent), facts)


async def test_backlog(stage: Stage, facts: dict[str, str]) -> None:
    """Messages for a subscriber that is away, at the broker."""
    await backlog(stage, facts)


async def test_backlog_as_delivered(
    make: Make, start_broker: StartBroker, tmp_path: Path, facts: dict[str, str]
) -> None:
    """The same with the limits that the broker comes with."""
    broker = start_broker(as_delivered=True)
    async with AsyncExitStack() as stack:
        stage = Stage(make, broker, tmp_path / "gateway", stack)
        await stage.start_gateway()
        await backlog(stage, facts)


async def backlog(stage: Stage, facts: dict[str, str]) -> None:
    sent = numbers(BACKLOG)
    vehicle, witness = await stage.app("vehicle1", SENDER), await stage.app("cloud", 0x9002)
    seen, cloud = await witness.hear_all("vehicle1"), await stage.app("cloud", keeps_session=True)
    await cloud.hear_all("vehicle1")
    await cloud.transport.close()
    await send(vehicle, [*sent, b"behind"])
    await seen.expect_payload(b"behind")  # the broker has all of them
    cloud = await stage.app("cloud", keeps_session=True)
    heard = await cloud.hear_all("vehicle1")
    await send(vehicle, [END])
    is_right(await all_of(heard, sent), facts)


async def test_backlog_over_a_stop(own: Stage, facts: dict[str, str]) -> None:
    """What the broker has acknowledged for a gateway that is away is there after it was stopped and started."""
    await backlog_over(own, facts, kill=False)


async def test_backlog_over_a_kill(own: Stage, facts: dict[str, str]) -> None:
    """The same after a kill -9."""
    await backlog_over(own, facts, kill=True)


async def backlog_over(stage: Stage, facts: dict[str, str], *, kill: bool) -> None:
    sent = numbers(BACKLOG)
    vehicle, cloud = await stage.app("vehicle1", SENDER), await stage.app("cloud", keeps_session=True)
    heard = await cloud.hear_all("vehicle1")
    await send(vehicle, [b"first"])
    await heard.expect_payload(b"first")
    assert stage.gateway is not None
    await stage.gateway.stop()
    await send(vehicle, sent)
    await end_broker(stage, kill=kill)
    await stage.broker.start_async()
    for app in (vehicle, cloud):
        await app.until_connected()
    await stage.start_gateway()
    await send(vehicle, [END])
    is_right(await all_of(heard, sent), facts, may_double=True)


async def end_broker(stage: Stage, *, kill: bool) -> None:
    await asyncio.to_thread(stage.broker.kill if kill else stage.broker.stop)


async def test_stop_of_the_broker_under_way(own: Stage, facts: dict[str, str]) -> None:
    await broker_ends(own, facts, kill=False)


async def test_kill_of_the_broker_under_way(own: Stage, facts: dict[str, str]) -> None:
    await broker_ends(own, facts, kill=True)


async def broker_ends(stage: Stage, facts: dict[str, str], *, kill: bool) -> None:
    sent = numbers(BACKLOG)
    vehicle, cloud = await stage.app("vehicle1", SENDER), await stage.app("cloud", keeps_session=True)
    heard = await cloud.hear_all("vehicle1")
    sending = asyncio.create_task(send(vehicle, sent, pause_s=0.05))
    await heard.expect_payload(b"500")
    await end_broker(stage, kill=kill)
    await stage.broker.start_async()
    await sending
    await cloud.until_connected()
    await send(vehicle, [END])
    is_right(await all_of(heard, sent), facts, may_double=True)


async def test_kill_of_the_gateway_under_way(stage: Stage, facts: dict[str, str]) -> None:
    sent = numbers(BACKLOG)
    vehicle, cloud = await stage.app("vehicle1", SENDER), await stage.app("cloud", keeps_session=True)
    heard = await cloud.hear_all("vehicle1")
    sending = asyncio.create_task(send(vehicle, sent, pause_s=0.05))
    await heard.expect_payload(b"500")
    assert stage.gateway is not None
    await stage.gateway.kill()
    await stage.start_gateway()
    await sending
    await send(vehicle, [END])
    is_right(await all_of(heard, sent), facts, may_double=True)
