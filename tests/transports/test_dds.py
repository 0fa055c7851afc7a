"""DDS against the real thing: Cyclone on the loopback interface, without multicast."""

import asyncio
import itertools
import json
import math
import os
import queue
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.qos import Policy, Qos
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.tiers import dds_domain
from transports import plugin
from transports.conformance import Sink, TransportConformance
from transports.dds import DdsTransport, mapping
from transports.dds.config import HEARTBEAT_US, DdsConfig
from transports.dds.link import Frame, Participant, delete, reliable
from transports.dds.readers import NAMES_MAX
from transports.dds.writers import Batch, Outgoing, WriterRoute, Writers
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

DEADLINE_S = 15.0
SLOW_MS = 15_000  # for a sender on a busy computer
QUIET_MS = 1_000  # opening ends when nothing was discovered for so long; 100 ms are too short on a busy computer
DOMAIN = dds_domain()
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW
TOPIC = uris.uri("alpha", 0x10AB, 3, 0x8001)


def settings(tag: str, **more: Any) -> dict[str, Any]:
    return {"domain_id": DOMAIN, "interface": "lo", "multicast": False, "peers": ["127.0.0.1"], "tag": tag} | more


def end(tag: str, authority: str, **more: Any) -> DdsTransport:
    return DdsTransport(DdsConfig(**settings(tag, **more)), LocalUriProvider(authority, 0x10AB, 3))


def numbered(first: int, count: int, topic: UUri = TOPIC) -> list[UMessage]:
    return [
        UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % n, RAW))
        for n in range(first, first + count)
    ]


async def deliver(sender: UTransport, messages: list[UMessage]) -> None:
    for start in range(0, len(messages), 512):
        statuses = await sender.send_batch(messages[start : start + 512])
        assert [status.code for status in statuses] == [UCode.OK] * len(statuses), statuses[-1]


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex


class Raw:
    """A participant that writes the octets that it is given."""

    def __init__(self, tag: str) -> None:
        self.participant = Participant(DdsConfig(**settings(tag)))
        self.writers = Writers(self.participant, writers_max=16, timeout_s=1.0)

    def write(self, source: UUri, sink: UUri | None, *samples: bytes) -> None:
        written: queue.SimpleQueue[list[UStatus]] = queue.SimpleQueue()
        batch = Batch(len(samples), written.put)
        route = WriterRoute(mapping.writer_partition(source, sink, "raw"), 0, None)

        def put_all() -> None:
            for place, sample in enumerate(samples):
                self.writers.put(Outgoing(batch, place, route, sample))

        self.writers.submit(put_all)
        assert [status.code for status in written.get()] == [UCode.OK] * len(samples)

    def close(self) -> None:
        self.writers.close()
        self.participant.close()


def malformed() -> list[bytes]:
    """Complete samples of the type without a valid message. Cyclone neither sends nor delivers malformed CDR (see
    test_dds_mapping.py)."""
    good = mapping.encode(numbered(0, 1)[0])
    return [
        mapping.pack(b"", b"no attributes", has_payload=True),
        mapping.pack(b"\xff\xff\xff", b"attributes that don't parse", has_payload=True),
        good[:4] + b"\x02" + good[5:],  # of another version
    ]


class TestDds(TransportConformance):
    capabilities = (
        Capability.PUSH
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ENCODED
        | Capability.ABSENCE
    )
    settle_s = 0.1

    tag = uuid.uuid4().hex
    lasting: Raw

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _network(cls) -> Iterator[None]:
        """Keeps the domain for all tests: making and deleting it takes longer than most of them."""
        cls.lasting = Raw(cls.tag)
        yield
        cls.lasting.close()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        # both ends are in this process, which needs no discovery
        return end(self.tag, authority, discovery_quiet_ms=10, **limits)

    def normalise(self, message: UMessage) -> UMessage:
        return message  # the sample says whether there is a payload

    async def inject(self, message: UMessage) -> None:
        attributes = message.attributes
        await self._raw(
            attributes.source, attributes.sink if attributes.HasField("sink") else None, mapping.encode(message)
        )

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        await self._raw(source, sink, *malformed())
        return len(malformed())

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        elsewhere = UUri()
        elsewhere.CopyFrom(message.attributes.source)
        elsewhere.authority_name = authority
        # of a writer that has gone by the time its sample is taken nobody can tell the partition
        self.lasting.write(elsewhere, message.attributes.sink, mapping.encode(message))

    async def _raw(self, source: UUri, sink: UUri | None, *samples: bytes) -> None:
        raw = Raw(self.tag)
        raw.write(source, sink, *samples)
        await asyncio.to_thread(raw.close)

    async def make_unreachable(self, authority: str) -> UTransport:
        elsewhere = settings(self.tag, interface="nosuch0", domain_id=dds_domain(2))
        return DdsTransport(DdsConfig(**elsewhere), LocalUriProvider(authority, 0x10AB, 3))

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "transports.dds:PLUGIN", settings(self.tag)


class OtherProcess:
    """A publisher in another process: `send(resource, count)` makes it send `count` numbered messages on that topic of
    `alpha`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, tag: str) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        script = str(Path(__file__).with_name("dds_publisher.py"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            script,
            json.dumps(settings(tag, send_timeout_ms=SLOW_MS, discovery_quiet_ms=QUIET_MS)),
            stdin=pipe,
            stdout=pipe,
            env=environment,
        )
        other = cls(process)
        await other._line()
        return other

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S)
        assert line == b"ready\n", line
        return line

    async def send(self, resource: int, count: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d %d\n" % (resource, count))
        await self._line()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), DEADLINE_S)


@pytest.fixture
async def other(tag: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtherProcess]:
    """It starts before the transports of the test. On a busy computer it may need more than SEEN_S to announce that it
    has found a new reader."""
    monkeypatch.setattr("transports.dds.readers.SEEN_S", DEADLINE_S)
    other = await OtherProcess.start(tag)
    yield other
    await other.close()


async def meet(here: DdsTransport) -> None:
    """Wait until `here` has discovered the other process: register_listener waits for known participants only."""
    async with asyncio.timeout(DEADLINE_S):
        while "peers=1," not in repr(here):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


def payloads(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_a_new_writer_loses_nothing_to_a_listener_that_was_there_before(tag: str, other: OtherProcess) -> None:
    async with end(tag, "beta") as beta:
        await meet(beta)
        heard = Sink(DEADLINE_S)
        await beta.register_listener(uris.pattern("alpha"), heard)
        for resource in range(0x8000, 0x8020):
            await other.send(resource, 10)
        await heard.expect(0x20 * 10)
        for resource in range(0x8000, 0x8020):
            assert [m.payload for m in heard.messages if m.attributes.source.resource_id == resource] == payloads(10)


@pytest.mark.parametrize("writer_was_there", [True, False])
async def test_a_new_listener_gets_all_that_is_sent_from_then_on(
    tag: str, other: OtherProcess, writer_was_there: bool
) -> None:
    async with end(tag, "beta") as beta:
        await meet(beta)
        for resource in range(0x8000, 0x8010):
            if writer_was_there:
                await other.send(resource, 5)
            heard = Sink(DEADLINE_S)
            await beta.register_listener(uris.uri("alpha", 0x10AB, 3, resource), heard)
            await other.send(resource, 5)
            await heard.expect(5)
            assert heard.payloads == payloads(10)[5:] if writer_was_there else payloads(5)


async def test_a_reader_is_announced_once_the_writers_that_exist_have_matched_it(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cyclone reports a reader first, and then has the writers write to it."""
    monkeypatch.setattr("transports.dds.readers.SEEN_S", DEADLINE_S)
    monkeypatch.setattr("transports.dds.roll_call.MATCH_S_MAX", DEADLINE_S)
    asked, have_matched = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def late(_: Writers, readers: Any) -> bool:
        loop.call_soon_threadsafe(asked.set)
        return have_matched.is_set()

    monkeypatch.setattr(Writers, "have_matched", late)
    async with end(tag, "alpha"), end(tag, "beta") as beta:
        await meet(beta)
        registering = asyncio.ensure_future(beta.register_listener(TOPIC, Sink(DEADLINE_S)))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
            await asyncio.sleep(0.05)
            assert not registering.done()
            have_matched.set()
            await registering


async def test_writers_have_matched_the_readers_of_their_partitions(tag: str) -> None:
    async with end(tag, "alpha") as alpha, end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        await deliver(alpha, numbered(0, 1))
        await heard.expect(1)
        assert alpha._session is not None
        writers = alpha._session.writers
        (partition,), (writer,) = writers.partitions(), writers._writers.values()
        (known,) = writer.entity.get_matched_subscriptions()
        pattern = partition.replace("/80", "/*", 1)
        assert writers.have_matched({known: [partition], 1: ["up/elsewhere"], 2: ["up/*/else"]})
        assert not writers.have_matched({known: [partition], 1: ["up/elsewhere", partition]})
        assert not writers.have_matched({1: ["up/*"]})
        assert writers.have_matched({known: ["up/*", pattern]})


async def test_a_participant_that_has_just_come_loses_nothing(tag: str) -> None:
    async with end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        other = await OtherProcess.start(tag)
        await other.send(TOPIC.resource_id, 10)
        await heard.expect(10)
        assert heard.payloads == payloads(10)
        await other.close()


async def test_ten_thousand_messages_come_in_order_from_another_process(tag: str, other: OtherProcess) -> None:
    async with end(tag, "beta") as beta:
        await meet(beta)
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        await other.send(TOPIC.resource_id, 10_000)
        await heard.expect(10_000)
        assert heard.payloads == payloads(10_000)


async def test_a_process_that_is_killed_stops_nobody(tag: str) -> None:
    """Its end is not known yet: a new listener waits for its answer, but not without limit."""
    async with end(tag, "alpha") as alpha, end(tag, "beta") as beta:
        other = await OtherProcess.start(tag)
        await other.kill()
        heard = Sink(DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            await beta.register_listener(TOPIC, heard)
            await deliver(alpha, numbered(0, 3))
        await heard.expect(3)


async def test_different_domains_never_hear_each_other(tag: str) -> None:
    elsewhere = settings(tag) | {"domain_id": dds_domain(1)}
    async with (
        end(tag, "alpha") as alpha,
        end(tag, "beta") as beta,
        DdsTransport(DdsConfig(**elsewhere), LocalUriProvider("gamma", 0x10AB, 3)) as gamma,
    ):
        here, there = Sink(DEADLINE_S), Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, here)
        await gamma.register_listener(TOPIC, there)
        await deliver(alpha, numbered(0, 10))
        await here.expect(10)
        assert there.messages == []


async def test_different_tags_never_hear_each_other(tag: str) -> None:
    """The first configuration of a domain counts for the whole process, so a second tag needs a second process."""
    async with end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        stranger, friend = await OtherProcess.start(tag + "x"), await OtherProcess.start(tag)
        await stranger.send(TOPIC.resource_id, 7)
        await friend.send(TOPIC.resource_id, 3)
        await heard.expect(3)
        assert heard.payloads == payloads(3)
        await asyncio.gather(stranger.close(), friend.close())
        with pytest.raises(UStatusError, match="another configuration") as raised:
            await end(tag + "x", "gamma").open()
        assert raised.value.code == UCode.FAILED_PRECONDITION


async def test_ipv6_authorities_match_exactly(tag: str) -> None:
    async with end(tag, "alpha") as alpha, end(tag, "[2001:db8::7]") as beta:
        sources = [uris.uri(authority, 0x10AB, 3, 0x8001) for authority in ("[::1]", "[::2]", "[1::]", "[2001:db8::1]")]
        heard, all_for_beta = Sink(DEADLINE_S), Sink(DEADLINE_S)
        await beta.register_listener(sources[0], heard)
        await beta.register_listener(uris.ANY, all_for_beta, uris.pattern("[2001:db8::7]"))
        await deliver(alpha, [message for source in sources[::-1] for message in numbered(0, 2, source)])
        await heard.expect(2)
        assert [m.attributes.source for m in heard.messages] == [sources[0]] * 2
        await alpha.send(UMessageBuilder.notification(sources[2], uris.uri("[2001:db8::7]", 1, 1, 0)).build())
        await alpha.send(UMessageBuilder.notification(sources[2], uris.uri("[2001:db8::8]", 1, 1, 0)).build())
        await all_for_beta.expect(1)
        assert len(all_for_beta.messages) == 1


async def test_malformed_samples_are_counted_and_the_rest_goes_on(tag: str) -> None:
    async with end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        raw = Raw(tag)
        good = [mapping.encode(message) for message in numbered(0, 2)]
        raw.write(TOPIC, None, good[0], *malformed(), good[1])
        await heard.expect(2)
        assert heard.payloads == payloads(2)
        assert beta.dropped == {"malformed": len(malformed())}
        await asyncio.to_thread(raw.close)


async def test_a_partition_that_lies_reaches_nobody(tag: str) -> None:
    """Arriving messages are matched by their attributes; the partition only decides which ones arrive."""
    async with end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        raw = Raw(tag)
        lie = mapping.encode(numbered(0, 1, uris.uri("alpha", 0x10AB, 3, 0x8002))[0])
        raw.write(TOPIC, None, lie, mapping.encode(numbered(7, 1)[0]))
        await heard.expect(1)
        assert heard.payloads == [b"7"]
        await asyncio.to_thread(raw.close)


async def test_a_receiver_that_does_not_keep_up_is_reported_to_the_sender(tag: str) -> None:
    async with end(tag, "alpha", send_timeout_ms=50) as alpha, end(tag, "beta", inbox_messages_max=8) as beta:
        gate = asyncio.Event()

        class Stuck(Sink):
            async def on_receive_batch(self, messages: list[UMessage]) -> None:
                self.messages += messages
                self._changed.set()
                await gate.wait()

        heard = Stuck(DEADLINE_S)
        await beta.register_listener(TOPIC, heard)
        accepted, code = 0, UCode.OK
        for first in itertools.count(0, 512):
            statuses = await alpha.send_batch(numbered(first, 512))
            accepted += sum(status.code == UCode.OK for status in statuses)
            if statuses[-1].code != UCode.OK:
                code = statuses[-1].code
                assert {status.code for status in statuses} <= {UCode.OK, UCode.UNAVAILABLE}
                break
            assert first < 1_000_000, "nothing holds the sender back"
        assert code == UCode.UNAVAILABLE
        gate.set()
        await heard.expect(accepted)
        assert heard.payloads == payloads(accepted)


async def test_listeners_that_overlap_get_each_message_once_though_one_is_slow(tag: str, other: OtherProcess) -> None:
    async with end(tag, "beta", inbox_messages_max=32) as beta:
        await meet(beta)

        class Slow(Sink):
            async def on_receive_batch(self, messages: list[UMessage]) -> None:
                self.messages += messages
                self._changed.set()
                await asyncio.sleep(0.001)

        slow, wide, exact = Slow(2 * DEADLINE_S), Sink(DEADLINE_S), Sink(DEADLINE_S)
        await beta.register_listener(uris.ANY, slow)
        await beta.register_listener(uris.pattern("alpha"), wide)
        await beta.register_listener(TOPIC, exact)
        await other.send(TOPIC.resource_id, 14_000)
        for heard in (slow, wide, exact):
            await heard.expect(14_000)
            assert heard.payloads == payloads(14_000)


async def test_writers_give_way_to_others_and_lose_nothing(tag: str) -> None:
    async with end(tag, "alpha", writers_max=4) as alpha, end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(uris.pattern("alpha"), heard)
        topics = [uris.uri("alpha", 0x10AB, 3, 0x8000 + number % 20) for number in range(200)]
        await deliver(alpha, [message for topic in topics for message in numbered(0, 1, topic)])
        await heard.expect(200)
        assert "writers=4," in repr(alpha)


async def test_a_writer_that_has_just_written_gives_way_when_that_is_acknowledged(tag: str) -> None:
    """The writers of one batch are made one after the other, without a look for acknowledgements in between."""
    async with end(tag, "alpha", writers_max=1) as alpha, end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(uris.pattern("alpha"), heard)
        topics = [uris.uri("alpha", 0x10AB, 3, 0x8000 + number) for number in range(8)]
        await deliver(alpha, [message for topic in topics for message in numbered(0, 1, topic)])
        await heard.expect(8)
        assert "writers=1," in repr(alpha)


async def test_listeners_that_come_together_share_a_reader_and_get_their_own(tag: str) -> None:
    """DDS matches each new writer with each reader: with one reader for each topic, 2,000 topics took seconds."""
    topics = [uris.uri("alpha", 0x10AB, 3, 0x8000 + number) for number in range(600)]
    async with end(tag, "alpha") as alpha, end(tag, "beta") as beta:
        sinks = [Sink(DEADLINE_S) for _ in topics]
        every = Sink(DEADLINE_S)
        await asyncio.gather(
            beta.register_listener(uris.pattern("alpha"), every),
            *(beta.register_listener(topic, sink) for topic, sink in zip(topics, sinks, strict=True)),
        )
        assert f"readers={1 + math.ceil(600 / NAMES_MAX)}," in repr(beta)
        await deliver(alpha, [message for topic in topics for message in numbered(0, 2, topic)])
        for sink in sinks:
            await sink.expect(2)
            assert sink.payloads == [b"0", b"1"]
        # all but one of them leave: what is for the others still arrives at that reader, and is nobody's
        for topic, sink in zip(topics[1:], sinks[1:], strict=True):
            await beta.unregister_listener(topic, sink)
        assert "readers=2," in repr(beta)
        await deliver(alpha, [message for topic in topics for message in numbered(2, 1, topic)])
        await sinks[0].expect(3)
        await every.expect(1_800)
        assert [len(sink.payloads) for sink in sinks] == [3, *(2 for _ in sinks[1:])]
        await beta.unregister_listener(topics[0], sinks[0])
        assert "readers=1," in repr(beta)


async def test_one_that_leaves_its_reader_and_comes_back_is_heard_again(tag: str) -> None:
    other = uris.uri("alpha", 0x10AB, 3, 0x8002)
    async with end(tag, "alpha") as alpha, end(tag, "beta") as beta:
        heard, others = Sink(DEADLINE_S), Sink(DEADLINE_S)
        await asyncio.gather(beta.register_listener(TOPIC, heard), beta.register_listener(other, others))
        await beta.unregister_listener(TOPIC, heard)
        await beta.register_listener(TOPIC, heard)
        await deliver(alpha, numbered(0, 3) + numbered(0, 1, other))
        await heard.expect(3)
        await others.expect(1)
        assert heard.payloads == [b"0", b"1", b"2"]


async def test_a_writer_of_several_names_reaches_whom_its_message_is_for(tag: str) -> None:
    other, third = (uris.uri("alpha", 0x10AB, 3, 0x8000 + number) for number in (2, 3))
    async with end(tag, "beta") as beta:
        heard, others = Sink(DEADLINE_S), Sink(DEADLINE_S)
        await asyncio.gather(beta.register_listener(TOPIC, heard), beta.register_listener(other, others))
        raw = Raw(tag)
        try:
            names = [mapping.writer_partition(topic, None, "raw") for topic in (TOPIC, other, third)]
            publisher = Publisher(raw.participant.entity, Qos(Policy.Partition(names)))
            writer = DataWriter(publisher, raw.participant.topic, reliable(Policy.History.KeepAll))
            for topic in (third, other, TOPIC):  # nobody listens to the third
                await asyncio.to_thread(writer.write, Frame(mapping.encode(numbered(0, 1, topic)[0])))
            await heard.expect(1)
            await others.expect(1)
            assert [m.attributes.source for m in heard.messages + others.messages] == [TOPIC, other]
            delete(writer, publisher)
        finally:
            await asyncio.to_thread(raw.close)


async def test_topics_that_are_new_hold_up_no_other_one(tag: str) -> None:
    async with end(tag, "alpha") as alpha, end(tag, "beta") as beta:
        heard = Sink(DEADLINE_S)
        await beta.register_listener(uris.pattern("alpha"), heard)
        await deliver(alpha, numbered(0, 1))
        fresh = [uris.uri("alpha", 0x10AB, 3, 0x8100 + number) for number in range(2_000)]
        answered: list[str] = []

        async def send(name: str, messages: list[UMessage]) -> None:
            await deliver(alpha, messages)
            answered.append(name)

        new = [message for topic in fresh for message in numbered(0, 1, topic)]
        await asyncio.gather(send("new", new), send("known", numbered(1, 1)))
        assert answered == ["known", "new"]
        await heard.expect(2_002)


async def test_a_transport_opens_again_and_keeps_its_listeners(tag: str) -> None:
    async with end(tag, "alpha") as alpha:
        beta = end(tag, "beta")
        changes: list[bool] = []
        beta.on_connection(changes.append)
        heard = Sink(DEADLINE_S)
        await beta.open()
        await beta.register_listener(TOPIC, heard)
        await beta.close()
        await beta.open()
        await deliver(alpha, numbered(0, 2))
        await heard.expect(2)
        await beta.close()
        assert changes == [True, False, True, False]


async def test_an_open_that_is_given_up_leaves_nothing_behind(tag: str) -> None:
    beta = end(tag, "beta", discovery_quiet_ms=60_000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(beta.open(), 0.2)
    assert not beta.connected
    for thread in threading.enumerate():
        if thread.name.startswith("dds-registrar"):  # it closes the session
            await asyncio.to_thread(thread.join)
    async with end(tag + "x", "beta"):  # another configuration: the domain has been left
        pass


async def test_an_open_that_is_given_up_before_there_is_anything_leaves_nothing_behind(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance while a name is being resolved."""
    resolve, resolving, known = threading.Event(), threading.Event(), socket.getaddrinfo

    def slow(*arguments: Any) -> Any:
        resolving.set()
        assert resolve.wait(DEADLINE_S)
        return known("127.0.0.1", *arguments[1:])

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    beta = end(tag, "beta", peers=["slow.invalid"])
    opening = asyncio.ensure_future(beta.open())
    await asyncio.to_thread(resolving.wait, DEADLINE_S)
    (thread,) = (one for one in threading.enumerate() if one.name == "dds-open")
    assert thread.daemon  # the process may end meanwhile
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    resolve.set()
    await asyncio.to_thread(thread.join, DEADLINE_S)
    assert DOMAIN not in Participant._domains
    assert not beta.connected


async def test_an_open_that_cannot_listen_again_may_be_tried_again(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with end(tag, "alpha") as alpha:
        beta, heard = end(tag, "beta"), Sink(DEADLINE_S)
        await beta.open()
        await beta.register_listener(TOPIC, heard)
        await beta.close()

        def fail(*_: Any) -> Any:
            raise OSError("no more files")

        with monkeypatch.context() as patch:
            patch.setattr("transports.dds.readers.make_reader", fail)
            with pytest.raises(UStatusError, match="no more files"):
                await beta.open()
        assert not beta.connected
        async with beta:
            await deliver(alpha, numbered(0, 2))
            await heard.expect(2)


async def test_listeners_come_and_go_while_the_transport_closes(tag: str) -> None:
    beta = end(tag, "beta", discovery_quiet_ms=10)
    await beta.open()
    listeners = [(uris.uri("alpha", 1, 1, 0x8000 + number), Sink(DEADLINE_S)) for number in range(20)]
    await asyncio.gather(*(beta.register_listener(topic, listener) for topic, listener in listeners))
    going = [beta.unregister_listener(topic, listener) for topic, listener in listeners]
    results = await asyncio.gather(*going, beta.close(), return_exceptions=True)
    assert all(
        result is None or (isinstance(result, UStatusError) and result.code == UCode.UNAVAILABLE) for result in results
    )


@dataclass
class Generated(IdlStruct, typename="uprotocol.v1.UMessage"):
    """The type as an IDL compiler makes it, for the comparison with our own octets."""

    version: uint8
    has_payload: bool
    attributes: sequence[uint8]
    payload: sequence[uint8]


@given(st.binary(max_size=40), st.binary(max_size=40) | st.none())
def test_our_octets_are_those_of_the_generated_type(attributes: bytes, payload: bytes | None) -> None:
    ours = mapping.pack(attributes, payload or b"", has_payload=payload is not None)
    theirs = Generated(1, payload is not None, list(attributes), list(payload or b""))
    assert theirs.serialize() == ours
    assert Generated.deserialize(ours) == theirs
    assert mapping.unpack(theirs.serialize(use_version_2=True)) == (attributes, payload)


def test_the_configuration_of_cyclone() -> None:
    assert "<HeartbeatInterval" in str(DdsConfig().configuration())
    config = DdsConfig(
        interface="lo",
        multicast=False,
        peers=["10.0.0.1", "localhost:7410"],
        tag="<t>",
        lease_ms=1500,
        participants_per_host_max=5,
    )
    xml = config.configuration()
    assert xml is not None
    assert '<NetworkInterface name="lo" multicast="false"/>' in xml
    assert "<AllowMulticast>false</AllowMulticast>" in xml
    assert "<MaxAutoParticipantIndex>5</MaxAutoParticipantIndex>" in xml
    assert '<Peers><Peer address="10.0.0.1"/><Peer address="127.0.0.1:7410"/></Peers>' in xml
    assert "<Tag>&lt;t&gt;</Tag>" in xml
    assert "<LeaseDuration>1500 ms</LeaseDuration>" in xml
    other = DdsConfig(interface="lo", multicast=False, peers=["10.0.0.1", "localhost"])
    assert config.configuration_key() != other.configuration_key()


def test_a_foreign_configuration_overrides_our_interval_of_heartbeats(tag: str, tmp_path: Path) -> None:
    traced = {}
    for name, wanted in {"none": "", "own": "<HeartbeatInterval>7 ms</HeartbeatInterval>"}.items():
        file = tmp_path / name
        xml = (
            f"<CycloneDDS><Domain><Discovery><Tag>{tag}</Tag></Discovery><Internal>{wanted}</Internal>"
            f"<Tracing><Verbosity>config</Verbosity><OutputFile>{file}</OutputFile></Tracing></Domain></CycloneDDS>"
        )
        Participant(DdsConfig(domain_id=DOMAIN, cyclone_xml=xml)).close()
        traced[name] = file.read_text()
    assert f"HeartbeatInterval/#text: {HEARTBEAT_US} us" in traced["none"]
    assert "HeartbeatInterval/#text: 7 ms" in traced["own"]


async def test_without_options_a_domain_that_the_application_has_joined_is_used_as_it_is(tag: str) -> None:
    foreign = DomainParticipant(DOMAIN)
    try:
        async with DdsTransport(DdsConfig(domain_id=DOMAIN), LocalUriProvider("alpha", 1, 1)) as alpha:
            assert alpha.connected
        with pytest.raises(UStatusError, match="PRECONDITION_NOT_MET"):
            await end(tag, "alpha").open()
    finally:
        delete(foreign)
    async with end(tag, "alpha"):  # nothing is left of the domain of the application
        pass


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"domain": 3}, "domain"),
        ({"domain_id": 231}, "domain_id"),
        ({"multicast": False}, "needs peers"),
        ({"cyclone_xml": "<CycloneDDS/>", "interface": "lo"}, "can't be combined with interface"),
        ({"cyclone_xml": "<CycloneDDS/>", "cyclone_file": "x.xml"}, "can't be combined with cyclone_file"),
        ({"cyclone_xml": "<CycloneDDS/>", "lease_ms": 1_000}, "can't be combined with lease_ms"),
        ({"cyclone_xml": "<CycloneDDS>ü</CycloneDDS>"}, "ASCII"),
        ({"cyclone_xml": "<Cyclone"}, "expected a Cyclone configuration in XML"),
        ({"cyclone_xml": ""}, "expected a Cyclone configuration in XML"),
        ({"interface": ""}, "named as in"),
        ({"interface": "lo lo"}, "named as in"),
        ({"tag": "x" * 70_000}, "255"),
        ({"tag": "a\nb"}, "printable"),
        ({"lease_ms": 0}, "200"),
        ({"peers": ["127.0.0.1"] * 257}, "256"),
        *(
            ({"peers": [peer]}, "(?i)peer|octet")
            for peer in (
                "",
                "::1",
                "[::1]",
                "a b",
                "udp/127.0.0.1",
                "256.1.1.1",
                "1",
                "127.1",
                "0.0.0.0",
                "0x7f000001",
                "255.255.255.255",
            )
        ),
        *(({"peers": [f"127.0.0.1:{port}"]}, "peer") for port in ("0", "65536", "99999", "x", "", "-1")),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DdsConfig(**wrong)


def whole(discovery: str) -> dict[str, str]:
    return {"cyclone_xml": f"<CycloneDDS><Domain>{discovery}</Domain></CycloneDDS>"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"interface": "nosuch0"}, "no network interface 'nosuch0' now; known: .*lo"),
        ({"peers": ["no-such-host.invalid"]}, "'no-such-host.invalid' has no IPv4 address now"),
        ({"peers": ["no-such-host.invalid:7410"]}, "no IPv4 address now"),
        ({"cyclone_file": "/nosuch/file.xml"}, "/nosuch/file.xml can't be used now"),
        (
            whole("<Discovery><Peers><Peer address='::1'/></Peers></Discovery>"),
            "::1: unknown address; ended by signal 6",
        ),
        (whole("<Discovery><Peers><Peer address='0.0.0.0'/></Peers></Discovery>"), "ended by signal 11"),
        (whole("<Discovery><LeaseDuration>never</LeaseDuration></Discovery>"), "LeaseDuration"),
        (
            whole("<General><Interfaces><NetworkInterface name='nosuch0'/></Interfaces></General>"),
            "nosuch0: does not match an available",
        ),
    ],
)
async def test_what_cyclone_would_refuse_or_die_of_is_a_clear_error(wrong: dict[str, Any], words: str) -> None:
    """Each of them ended the process, or wrote the reason only to stderr."""
    transport = plugin.create("dds", {"domain_id": DOMAIN, **wrong}, LocalUriProvider("alpha", 1, 1))
    with pytest.raises(UStatusError, match=words) as raised:
        await transport.open()
    assert raised.value.code == UCode.UNAVAILABLE
    assert not transport.connected
    await transport.close()


async def test_the_environment_is_tried_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CYCLONEDDS_URI",
        whole("<Discovery><Peers><Peer address='127.0.0.1:99999'/></Peers></Discovery>")["cyclone_xml"],
    )
    transport = DdsTransport(DdsConfig(domain_id=DOMAIN), LocalUriProvider("alpha", 1, 1))
    with pytest.raises(UStatusError, match=r"127\.0\.0\.1:99999: not a valid address; ended by signal 6") as raised:
        await transport.open()
    assert raised.value.code == UCode.UNAVAILABLE


async def test_a_refusal_by_cyclone_is_reported_with_its_text(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance with an interface that exists and is down."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "nosuch0")])
    with pytest.raises(UStatusError, match="Cyclone says: nosuch0: does not match an available interface") as raised:
        await end(tag, "alpha", interface="nosuch0").open()
    assert raised.value.code == UCode.UNAVAILABLE


async def test_a_peer_that_gets_its_address_later_is_found_then(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alpha = end(tag, "alpha", peers=["later.invalid"])
    with pytest.raises(UStatusError):
        await alpha.open()
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: known("127.0.0.1" if host == "later.invalid" else host, *rest)
    )
    async with alpha:
        assert alpha.connected


async def test_the_file_with_the_configuration_may_have_a_space_in_its_name(tag: str, tmp_path: Path) -> None:
    file = tmp_path / "cyclone of ours.xml"
    options = DdsConfig(**settings(tag))
    alpha = DdsTransport(DdsConfig(domain_id=DOMAIN, cyclone_file=file), LocalUriProvider("alpha", 0x10AB, 3))
    file.write_text("<CycloneDDS")
    with pytest.raises(UStatusError, match="expected a Cyclone configuration in XML") as raised:
        await alpha.open()
    assert raised.value.code == UCode.UNAVAILABLE
    file.write_text(str(options.configuration()))
    async with alpha:
        other = await OtherProcess.start(tag)
        heard = Sink(DEADLINE_S)
        await alpha.register_listener(TOPIC, heard)
        await other.send(TOPIC.resource_id, 1)
        await heard.expect(1)
        await other.close()
