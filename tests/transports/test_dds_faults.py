"""DDS with a participant that is away, stuck or incompatible: no accepted message is lost without a report, and others
are not affected.

alpha (here) -- uprotocol/v1 --+-- beta, a process that is stopped and continued
                               +-- gamma, a healthy process
"""

import asyncio
import json
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio
from cyclonedds.core import Policy, Qos
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic

from tests.stopping import stop_child
from tests.tiers import dds_domain
from transports.conformance import Sink
from transports.dds import DdsTransport, link, mapping
from transports.dds import transport as transport_module
from transports.dds.config import DdsConfig
from transports.dds.link import Participant, binding, delete
from transports.dds.roll_call import RollCall
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import is_nobody_listening
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 30.0
LOOK_S = 0.02
DOMAIN = dds_domain()
STUCK, WELL = 0x8001, 0x8002  # topics: one that beta listens to, one for gamma
EVERY = 0xFFFF  # for a listener: all topics
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW


def settings(tag: str, **more: Any) -> dict[str, Any]:
    return {"domain_id": DOMAIN, "interface": "lo", "multicast": False, "peers": ["127.0.0.1"], "tag": tag} | more


def end(tag: str, authority: str, **more: Any) -> DdsTransport:
    return DdsTransport(DdsConfig(**settings(tag, **more)), LocalUriProvider(authority, 0x10AB, 3))


def numbered(topic: int, numbers: range, octets: int = 0) -> list[UMessage]:
    """Publishes of alpha that carry these numbers; `octets` pads them with leading zeros."""
    builder = [(UMessageBuilder.publish(uris.uri("alpha", 0x10AB, 3, topic)), n) for n in numbers]
    return [one.build_from_upayload(UPayload(b"%0*d" % (octets, n), RAW)) for one, n in builder]


async def eventually(holds: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                held = holds()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise AssertionError(f"expected within {DEADLINE_S} s: {what}") from None


def roll_call(transport: DdsTransport) -> RollCall:
    assert transport._session is not None
    return transport._session.roll_call


class Listening:
    """Another process that listens to one topic of alpha."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, authority: str, topic: int, tag: str, **more: Any) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        script = str(Path(__file__).with_name("dds_subscriber.py"))
        pipe = asyncio.subprocess.PIPE
        arguments = [script, json.dumps(settings(tag, **more)), authority, str(topic)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, env=environment, limit=1 << 24
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S) == b"ready\n"
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        stop_child(self.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def report(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S))
        return answer

    async def until_seen(self, number: int) -> dict[str, Any]:
        """The numbers that it has received, once it has received that one."""
        report: dict[str, Any] = {}

        async def seen() -> bool:
            report.update(await self.report())
            return number in report["seen"]

        await eventually(seen, f"message {number} at the other process")
        return report

    async def close(self) -> None:
        if self._process.returncode is not None:
            return
        self.go_on()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), DEADLINE_S)


Start = Callable[..., Awaitable[Listening]]


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex


@pytest_asyncio.fixture
async def start(tag: str) -> AsyncIterator[Start]:
    """Starts subscribers, and ends them."""
    started: list[Listening] = []

    async def start(authority: str, topic: int, **more: Any) -> Listening:
        started.append(await Listening.start(authority, topic, tag, **more))
        return started[-1]

    yield start
    for one in started:
        await one.close()


async def send(transport: DdsTransport, messages: list[UMessage]) -> list[int]:
    return [status.code for status in await transport.send_batch(messages)]


async def test_what_a_receiver_had_not_acknowledged_when_its_lease_ended_is_sent_again(tag: str, start: Start) -> None:
    async with end(tag, "alpha", lease_ms=1_000, send_timeout_ms=60_000) as alpha:
        beta = await start("beta", STUCK, lease_ms=1_000)
        assert await send(alpha, numbered(STUCK, range(10))) == [UCode.OK] * 10
        await beta.until_seen(9)
        beta.stop()
        unacknowledged = numbered(STUCK, range(10, 50))
        statuses = await alpha.send_batch(unacknowledged)  # answered when its lease ends
        assert [status.code for status in statuses] == [UCode.UNAVAILABLE] * 40
        assert all("a receiver has left before" in status.message for status in statuses)
        alpha.tells_absence = True
        assert all(is_nobody_listening(status) for status in await alpha.send_batch(unacknowledged))
        beta.go_on()
        await eventually(lambda: roll_call(alpha).returned == 1, "its return")

        async def taken() -> bool:
            return await send(alpha, unacknowledged) == [UCode.OK] * 40

        await eventually(taken, "the acknowledgement of the other process")
        report = await beta.until_seen(49)
        assert sorted(set(report["seen"])) == list(range(50))
        assert alpha.left_unacknowledged == 1
        (note,) = alpha.notes
        assert note.startswith("1 time(s) a DDS receiver left before it had acknowledged")


async def test_a_reader_that_leaves_has_acknowledged_on_none_of_its_topics(tag: str, start: Start) -> None:
    """Cyclone counts all as acknowledged by a reader that is being removed, milliseconds before it reports that it has
    left: of 900 messages 81 were answered OK."""
    many = [
        UMessageBuilder.publish(uris.uri("alpha", 0x10AB, 3, 0x8000 + n)).build_from_upayload(UPayload(b"1", RAW))
        for n in range(300)
    ]
    async with end(tag, "alpha", lease_ms=1_000, send_timeout_ms=60_000) as alpha:
        beta = await start("beta", EVERY, lease_ms=1_000)
        assert await send(alpha, many) == [UCode.OK] * len(many)
        beta.stop()
        assert await send(alpha, many) == [UCode.UNAVAILABLE] * len(many)
        assert alpha.left_unacknowledged == len(many)


async def test_a_gap_in_the_numbers_of_a_writer_is_counted(tag: str, start: Start) -> None:
    """Without `tells_absence` what is written while nobody is there is lost, and counted when the reader is back."""
    async with end(tag, "alpha", lease_ms=1_000) as alpha:
        beta = await start("beta", STUCK, lease_ms=1_000)
        assert await send(alpha, numbered(STUCK, range(10))) == [UCode.OK] * 10
        await beta.until_seen(9)
        beta.stop()
        await eventually(lambda: "peers=0" in repr(alpha), "the end of its lease")
        assert await send(alpha, numbered(STUCK, range(50, 100))) == [UCode.OK] * 50  # nobody is there
        beta.go_on()
        await eventually(lambda: roll_call(alpha).returned == 1, "its return")
        last = 99

        async def heard_again() -> bool:
            nonlocal last
            last += 1
            assert await send(alpha, numbered(STUCK, range(last, last + 1))) == [UCode.OK]
            return bool((await beta.report())["seen"][-1] >= 100)

        await eventually(heard_again, "messages at the other process again")
        report = await beta.until_seen(last)
        seen = report["seen"]
        assert seen == sorted(set(seen))
        assert seen[:10] == list(range(10))
        assert report["dropped"]["lost"] == last + 1 - 40 - len(seen)


async def test_a_pause_within_the_lease_loses_nothing(tag: str, start: Start) -> None:
    async with end(tag, "alpha", lease_ms=60_000, send_timeout_ms=60_000) as alpha:
        beta = await start("beta", STUCK, lease_ms=60_000)
        beta.stop()
        sending = []
        for first in range(0, 150, 10):
            sending.append(asyncio.create_task(send(alpha, numbered(STUCK, range(first, first + 10)))))
            await asyncio.sleep(0.1)
        assert not any(task.done() for task in sending)  # nothing is acknowledged
        beta.go_on()
        assert await asyncio.gather(*sending) == [[UCode.OK] * 10] * 15
        report = await beta.until_seen(149)
        assert report["seen"] == list(range(150))
        assert report["dropped"] == {}
        assert roll_call(alpha).returned == 0


async def test_what_is_acknowledged_after_the_time_out_is_not_sent_twice(tag: str, start: Start) -> None:
    async with end(tag, "alpha", lease_ms=60_000, send_timeout_ms=200) as alpha:
        beta = await start("beta", STUCK, lease_ms=60_000)
        beta.stop()
        messages = numbered(STUCK, range(100))
        assert await send(alpha, messages) == [UCode.UNAVAILABLE] * 100
        beta.go_on()
        await eventually(lambda: alpha.troubles == [], "the late acknowledgement")
        assert await send(alpha, [*messages, *numbered(STUCK, range(100, 101))]) == [UCode.OK] * 101
        assert (await beta.until_seen(100))["seen"] == list(range(101))


async def test_what_a_killed_receiver_had_not_acknowledged_goes_to_the_next_one(tag: str, start: Start) -> None:
    async with end(tag, "alpha", lease_ms=60_000, send_timeout_ms=60_000) as alpha:
        beta = await start("beta", STUCK, lease_ms=1_000)
        beta.stop()
        messages = numbered(STUCK, range(30))
        sending = asyncio.create_task(send(alpha, messages))
        await beta.kill()
        assert await sending == [UCode.UNAVAILABLE] * 30
        alpha.tells_absence = True
        gamma = await start("gamma", STUCK, lease_ms=60_000)
        assert await send(alpha, messages) == [UCode.OK] * 30
        assert (await gamma.until_seen(29))["seen"] == list(range(30))


async def test_a_receiver_that_stops_taking_holds_up_its_own_topic_alone(tag: str, start: Start) -> None:
    async with end(tag, "alpha", send_timeout_ms=200, lease_ms=60_000) as alpha:
        beta, gamma = await start("beta", STUCK, lease_ms=60_000), await start("gamma", WELL, lease_ms=60_000)
        beta.stop()
        unacknowledged = numbered(STUCK, range(50), octets=2_000)
        assert await send(alpha, unacknowledged) == [UCode.UNAVAILABLE] * 50
        (trouble,) = alpha.troubles
        assert f"{beta.pid} on" in trouble
        assert f"{gamma.pid} on" not in trouble
        for first in range(0, 500, 50):  # each batch has messages for both: those for gamma pass
            well = numbered(WELL, range(first, first + 50))
            codes = await send(alpha, [message for both in zip(unacknowledged, well, strict=True) for message in both])
            assert codes[1::2] == [UCode.OK] * 50
            assert codes[::2] == [UCode.UNAVAILABLE] * 50
        assert len(alpha.troubles) == 1
        assert (await gamma.until_seen(499))["seen"] == list(range(500))
        beta.go_on()
        await eventually(lambda: alpha.troubles == [], "the end of the trouble")
        messages = [*unacknowledged, *numbered(STUCK, range(50, 100), octets=2_000)]
        assert await send(alpha, messages) == [UCode.OK] * 100
        assert (await beta.until_seen(99))["seen"] == list(range(100))


async def fill(alpha: DdsTransport, topic: int) -> None:
    """Wait until the writer of that topic is held back."""
    async with asyncio.timeout(DEADLINE_S):
        while UCode.UNAVAILABLE not in await send(alpha, numbered(topic, range(200), octets=2_000)):
            pass


async def test_of_two_receivers_the_one_is_named_that_acknowledges_nothing_else(tag: str, start: Start) -> None:
    async with (
        end(tag, "alpha", send_timeout_ms=200, lease_ms=60_000) as alpha,
        end(tag, "gamma", lease_ms=60_000) as gamma,
    ):
        beta = await start("beta", STUCK, lease_ms=60_000)
        well = Sink(DEADLINE_S)
        for topic in (STUCK, WELL):
            await gamma.register_listener(uris.uri("alpha", 0x10AB, 3, topic), well)
        assert await send(alpha, numbered(WELL, range(1))) == [UCode.OK]
        await well.expect(1)
        beta.stop()
        await fill(alpha, STUCK)
        (trouble,) = alpha.troubles
        assert f"{beta.pid} on" in trouble
        assert gamma.key.hex() not in trouble


async def test_the_second_topic_of_a_receiver_that_is_stuck_is_not_waited_for(tag: str, start: Start) -> None:
    async with end(tag, "alpha", send_timeout_ms=200, lease_ms=60_000) as alpha:
        beta = await start("beta", EVERY, lease_ms=60_000)
        assert await send(alpha, [*numbered(STUCK, range(1)), *numbered(WELL, range(1))]) == [UCode.OK] * 2
        beta.stop()
        await fill(alpha, STUCK)
        assert alpha._session is not None
        alpha._session.writers._timeout_s = 3_600.0  # were it waited for, this would not end
        await fill(alpha, WELL)
        (trouble,) = alpha.troubles
        assert "2 topic(s)" in trouble


async def test_a_large_batch_waits_for_a_receiver_that_is_slow(tag: str, start: Start) -> None:
    """One batch may have more messages than DDS keeps for one writer, without a trouble."""
    async with end(tag, "alpha") as alpha:
        beta = await start("beta", STUCK)
        assert await send(alpha, numbered(STUCK, range(4_000), octets=1_000)) == [UCode.OK] * 4_000
        assert (await beta.until_seen(3_999))["seen"] == list(range(4_000))
        assert alpha.troubles == []


async def test_close_does_not_wait_for_a_receiver_that_is_stuck(tag: str, start: Start) -> None:
    alpha = end(tag, "alpha", send_timeout_ms=60_000, lease_ms=60_000)
    await alpha.open()
    beta = await start("beta", STUCK, lease_ms=60_000)
    beta.stop()
    sending = asyncio.ensure_future(send(alpha, numbered(STUCK, range(3_000), octets=2_000)))
    await eventually(lambda: bool(re.search(r"writers=1, waiting=[1-9]", repr(alpha))), "a full writer")
    async with asyncio.timeout(DEADLINE_S):
        await alpha.close()
        codes = await sending
    assert codes == [UCode.UNAVAILABLE] * 3_000


async def test_a_host_that_is_reached_at_another_address_joins_its_domain_again(
    tag: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two transports of one process share a domain, which knows the address: both must leave it first."""
    monkeypatch.setattr(transport_module, "ADDRESS_LOOK_S", LOOK_S)
    monkeypatch.setattr(link, "addresses_of", lambda interface: frozenset({"10.0.0.1"}))
    async with end(tag, "alpha") as alpha, end(tag, "delta") as delta:
        both = (alpha, delta)
        beta = await start("beta", STUCK)
        heard = Sink(DEADLINE_S)
        await delta.register_listener(uris.uri("alpha", 0x10AB, 3, WELL), heard)
        assert await send(alpha, numbered(STUCK, range(1))) == [UCode.OK]
        await beta.until_seen(0)
        keys, seen = [one.key for one in both], list[tuple[bool, str]]()
        alpha.on_connection(lambda connected: seen.append((connected, alpha.away_because)))
        monkeypatch.setattr(link, "addresses_of", lambda interface: frozenset({"10.0.0.2"}))
        await eventually(lambda: all(one.connected and one.key not in (b"", *keys) for one in both), "new participants")
        assert [connected for connected, _ in seen] == [False, True]
        assert seen[0][1] == "DDS was joined at 10.0.0.1, and this host is reached at 10.0.0.2 now"
        assert await send(alpha, numbered(STUCK, range(1, 2)) + numbered(WELL, range(1))) == [UCode.OK] * 2
        assert (await beta.until_seen(1))["seen"] == [0, 1]
        assert [message.payload for message in await heard.expect(1)] == [b"0"]
    assert (alpha.connected, alpha.away_because) == (False, "")


def test_the_addresses_are_those_of_the_best_interfaces() -> None:
    assert link.addresses_of("lo") == {"127.0.0.1"}
    assert link.addresses_of("no-such-one") == frozenset()
    found = link.addresses_of(None)
    assert found, "loopback at least"
    assert "127.0.0.1" not in found or found == {"127.0.0.1"}


@dataclass
class Foreign(IdlStruct, typename="uprotocol.v1.UMessage"):
    """The type as an IDL compiler makes it."""

    version: uint8
    has_payload: bool
    attributes: sequence[uint8]  # type: ignore[type-arg]
    payload: sequence[uint8]  # type: ignore[type-arg]


async def test_incompatible_endpoints_are_reported_while_they_exist(tag: str) -> None:
    topic = uris.uri("alpha", 0x10AB, 3, STUCK)
    async with end(tag, "beta", lease_ms=5_000) as beta:
        foreign = Participant(DdsConfig(**settings(tag, lease_ms=5_000)))
        with binding:
            dds_topic = Topic(foreign.entity, mapping.TOPIC, Foreign)
            publisher = Publisher(
                foreign.entity, Qos(Policy.Partition([mapping.writer_partition(topic, None, "alpha")]))
            )
            writer = DataWriter(publisher, dds_topic, Qos(Policy.Reliability.BestEffort))
            subscriber = Subscriber(foreign.entity, Qos(Policy.Partition(["up/beta/*"])))
            kept = Qos(Policy.Reliability.Reliable(0), Policy.Durability.TransientLocal)
            reader = DataReader(subscriber, dds_topic, kept)
        await eventually(lambda: roll_call(beta).misfits_found == 2, "both of them")
        assert beta.troubles == []  # they have nothing for each other
        await beta.register_listener(topic, Sink(DEADLINE_S))
        assert ["BEST_EFFORT" in one for one in beta.troubles] == [True]
        assert foreign.key.hex() in beta.troubles[0]
        await beta.send(UMessageBuilder.publish(uris.uri("beta", 0x10AB, 3, 0x8001)).build())
        await eventually(lambda: len(beta.troubles) == 2, "the reader that asks for too much")
        assert any("DURABILITY" in one for one in beta.troubles)
        with binding:
            seen = reader.get_requested_incompatible_qos_status().total_count
        assert seen > 0  # DDS says so, too
        delete(writer, reader)
        await eventually(lambda: beta.troubles == [], "the end of the troubles")
        delete(publisher, subscriber, dds_topic)
        foreign.close()
