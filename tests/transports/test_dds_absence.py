"""Absence over DDS: the sender of a publish learns at once that nobody listens, and later that a reader was found.

alpha, the sender -- uprotocol/v1 --+-- beta, here, another participant
                                    +-- gamma, another process
"""

import asyncio
import json
import os
import queue
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import dds_domain
from transports.conformance import Sink
from transports.dds import DdsTransport, mapping
from transports.dds import transport as transport_module
from transports.dds.config import DdsConfig
from transports.dds.link import Participant
from transports.dds.writers import HELD_LOOK_S, Batch, Outgoing, WriterRoute, Writers
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import OK, is_nobody_listening
from uprotocol.transport import Capability, LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

DEADLINE_S = 15.0
DOMAIN = dds_domain()
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW
TOPIC, OTHER = uris.uri("alpha", 0x10AB, 3, 0x8001), uris.uri("alpha", 0x10AB, 3, 0x8002)
PARTITION, OTHER_PARTITION = (mapping.writer_partition(topic, None, "alpha") for topic in (TOPIC, OTHER))


def settings(tag: str) -> dict[str, Any]:
    return {"domain_id": DOMAIN, "interface": "lo", "multicast": False, "peers": ["127.0.0.1"], "tag": tag}


def end(tag: str, authority: str, **more: Any) -> DdsTransport:
    return DdsTransport(DdsConfig(**settings(tag) | more), LocalUriProvider(authority, 0x10AB, 3))


def numbered(numbers: range, topic: UUri = TOPIC, priority: Any = UPriority.UPRIORITY_UNSPECIFIED) -> list[UMessage]:
    builders = [(UMessageBuilder.publish(topic).with_priority(priority), n) for n in numbers]
    return [builder.build_from_upayload(UPayload(b"%d" % n, RAW)) for builder, n in builders]


def payloads(numbers: range) -> list[bytes]:
    return [b"%d" % n for n in numbers]


def answers_of(statuses: Sequence[UStatus]) -> str:
    """One letter for each: o is OK, n nobody listens."""
    letters = {True: "n", False: "o"}
    assert all(is_nobody_listening(status) or status.code == UCode.OK for status in statuses), statuses
    return "".join(letters[is_nobody_listening(status)] for status in statuses)


class Heard:
    """The calls of `on_heard`."""

    def __init__(self, transport: DdsTransport) -> None:
        self._reported: asyncio.Queue[Sequence[str] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        transport.on_heard(self._note)

    def _note(self, addresses: Sequence[str] | None) -> None:
        assert asyncio.get_running_loop() is self._loop
        self._reported.put_nowait(addresses)

    async def next(self) -> Sequence[str] | None:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reported.get()

    @property
    def is_silent(self) -> bool:
        return self._reported.empty()


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def alpha(tag: str) -> AsyncIterator[DdsTransport]:
    """A sender whose owner wants to know that nobody listens."""
    async with end(tag, "alpha") as alpha:
        alpha.tells_absence = True
        yield alpha


@pytest.fixture
async def beta(tag: str) -> AsyncIterator[DdsTransport]:
    async with end(tag, "beta") as beta:
        yield beta


def written(transport: DdsTransport) -> int:
    """Number of samples given to DDS."""
    assert transport._session is not None
    return sum(writer.written for writer in transport._session.writers._writers.values())


async def until_nobody(sender: DdsTransport, topic: UUri = TOPIC) -> None:
    """The writer's side learns about the end of a reader a moment later, without an event."""
    async with asyncio.timeout(DEADLINE_S):
        while answers_of(await sender.send_batch(numbered(range(1), topic))) == "o":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_address_is_the_partition_of_the_writer(tag: str) -> None:
    alpha = end(tag, "alpha")
    assert Capability.ABSENCE in alpha.capabilities
    assert alpha.address_of(TOPIC, None) == "up/alpha/10AB/0/3/8001/{}/{}/{}/{}/{}"
    everything = uris.pattern("beta")
    assert alpha.address_of(uris.uri("", 0x10AB, 3, 0x8001), everything) == "up/alpha/10AB/0/3/8001/beta/{}/{}/{}/{}"
    longest = uris.uri("[v1." + "!" * 123 + "]", 0xFFFEFFFE, 0xFE, 0xFFFE)
    assert len(alpha.address_of(longest, longest)) <= 1_024


@pytest.mark.parametrize("is_encoded", [True, False])
async def test_what_nobody_reads_is_not_written_and_is_sent_again_when_somebody_does(
    alpha: DdsTransport, beta: DdsTransport, is_encoded: bool
) -> None:
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    messages: Any = numbered(range(50))
    if is_encoded:
        messages = [EncodedMessage.of(message) for message in messages]
    statuses = await alpha.send_batch(messages)
    assert answers_of(statuses) == "n" * 50
    assert PARTITION in statuses[0].message
    assert written(alpha) == 0
    await beta.register_listener(TOPIC, sink)
    assert await heard.next() == [PARTITION]
    assert answers_of(await alpha.send_batch(messages)) == "o" * 50
    await sink.expect(50)
    assert sink.payloads == payloads(range(50))
    assert heard.is_silent


async def test_a_reader_that_was_there_is_known_to_each_new_writer_at_once(
    alpha: DdsTransport, beta: DdsTransport
) -> None:
    topics, sink = [uris.uri("alpha", 0x10AB, 3, 0x8100 + n) for n in range(200)], Sink(DEADLINE_S)
    await beta.register_listener(uris.pattern("alpha"), sink)
    messages = [message for topic in topics for message in numbered(range(1), topic)]
    assert answers_of(await alpha.send_batch(messages)) == "o" * 200
    await sink.expect(200)


async def test_when_the_last_reader_goes_nobody_listens_again(alpha: DdsTransport, beta: DdsTransport) -> None:
    heard, sink, second = Heard(alpha), Sink(DEADLINE_S), Sink(DEADLINE_S)
    await beta.register_listener(TOPIC, sink)
    assert answers_of(await alpha.send_batch(numbered(range(3)))) == "ooo"
    await beta.unregister_listener(TOPIC, sink)
    await until_nobody(alpha)
    await beta.register_listener(TOPIC, second)
    assert await heard.next() == [PARTITION]
    assert answers_of(await alpha.send_batch(numbered(range(3, 6)))) == "ooo"
    await second.expect(3)
    assert second.payloads == payloads(range(3, 6))


async def test_a_reader_of_our_own_is_nobody(alpha: DdsTransport) -> None:
    heard = Heard(alpha)
    await alpha.register_listener(TOPIC, Sink(DEADLINE_S))
    assert answers_of(await alpha.send_batch(numbered(range(2)))) == "nn"
    assert heard.is_silent


async def test_absence_is_reported_only_on_request(tag: str, alpha: DdsTransport, beta: DdsTransport) -> None:
    alpha.tells_absence = False
    assert answers_of(await alpha.send_batch(numbered(range(3)))) == "ooo"
    assert written(alpha) == 3
    alpha.tells_absence = True
    assert answers_of(await alpha.send_batch(numbered(range(3)))) == "nnn"
    assert written(alpha) == 3


async def test_only_publishes_and_requests_are_answered_so(alpha: DdsTransport) -> None:
    here, there = uris.uri("alpha", 0x10AB, 3, 0), uris.uri("beta", 0xCD, 1, 0)
    request = UMessageBuilder.request(here, uris.uri("beta", 0xCD, 1, 7), 1_000).build()
    asked = UMessageBuilder.request(there, uris.uri("alpha", 0x10AB, 3, 7), 1_000).build()
    messages = [
        request,
        UMessageBuilder.response_for_request(asked.attributes).build(),
        UMessageBuilder.notification(TOPIC, there).build(),
        *numbered(range(1)),
    ]
    assert answers_of(await alpha.send_batch(messages)) == "noon"


async def test_only_addresses_with_a_listener_are_reported(alpha: DdsTransport, beta: DdsTransport) -> None:
    heard = Heard(alpha)
    third = uris.uri("alpha", 0x10AB, 3, 0x8003)
    urgent = numbered(range(1), TOPIC, UPriority.UPRIORITY_CS5)
    messages = numbered(range(1)) + urgent + numbered(range(1), OTHER) + numbered(range(1), third)
    assert answers_of(await alpha.send_batch(messages)) == "nnnn"
    sink = Sink(DEADLINE_S)
    await asyncio.gather(*(beta.register_listener(topic, sink) for topic in (TOPIC, OTHER)))
    found: set[str] = set()  # a look may come between two writers that DDS matches
    while found < {PARTITION, OTHER_PARTITION}:
        found.update(await heard.next() or [])
    assert found == {PARTITION, OTHER_PARTITION}
    assert answers_of(await alpha.send_batch(messages)) == "ooon"


async def test_what_another_process_listens_to_is_heard(tag: str, alpha: DdsTransport) -> None:
    heard = Heard(alpha)
    messages = numbered(range(50))
    assert answers_of(await alpha.send_batch(messages)) == "n" * 50
    pipe = asyncio.subprocess.PIPE
    gamma = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("dds_subscriber.py")),
        json.dumps(settings(tag)),
        "gamma",
        str(TOPIC.resource_id),
        stdin=pipe,
        stdout=pipe,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert gamma.stdin is not None
    assert gamma.stdout is not None
    try:
        assert await heard.next() == [PARTITION]
        assert answers_of(await alpha.send_batch(messages)) == "o" * 50
        assert await asyncio.wait_for(gamma.stdout.readline(), DEADLINE_S) == b"ready\n"
        seen: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(seen) < 50:
                gamma.stdin.write(b"\n")
                seen = json.loads(await gamma.stdout.readline())["seen"]
        assert seen == list(range(50))
        urgent = numbered(range(50, 51), TOPIC, UPriority.UPRIORITY_CS5)
        assert answers_of(await alpha.send_batch(urgent)) == "o"  # a new writer knows the reader at once
    finally:
        gamma.stdin.close()
        await asyncio.wait_for(gamma.wait(), DEADLINE_S)
    await until_nobody(alpha)


async def test_a_writer_that_gives_way_is_not_looked_at_any_more(tag: str, beta: DdsTransport) -> None:
    async with end(tag, "alpha", writers_max=1) as alpha:
        alpha.tells_absence = True
        heard, sink = Heard(alpha), Sink(DEADLINE_S)
        assert answers_of(await alpha.send_batch(numbered(range(1)))) == "n"
        assert answers_of(await alpha.send_batch(numbered(range(1), OTHER))) == "n"
        assert alpha._session is not None
        assert [partition for partition, _ in alpha._session.writers._unheard] == [OTHER_PARTITION]
        await beta.register_listener(TOPIC, sink)
        await beta.register_listener(OTHER, sink)
        assert await heard.next() == [OTHER_PARTITION]
        assert answers_of(await alpha.send_batch(numbered(range(1)))) == "o"  # its owner tries again by itself
        await sink.expect(1)
        assert heard.is_silent


async def test_what_was_looked_at_may_be_heard_when_the_domain_was_joined_again(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "ADDRESS_LOOK_S", 0.01)
    moves = iter(["it has another address"])
    monkeypatch.setattr(Participant, "moved", lambda _: next(moves, ""))
    alpha = end(tag, "alpha")
    heard = Heard(alpha)
    async with alpha:
        assert await heard.next() is None
        assert alpha.connected


class FakeReaders:
    """A test decides whether DDS knows a reader, and whether writers have capacity."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.has_room, self.asked = True, True, 0
        self.written: list[bytes] = []
        monkeypatch.setattr("transports.dds.writers._Writer.has_reader", lambda _: self._ask())
        monkeypatch.setattr("transports.dds.writers._Writer.write", lambda _, data, lifespan_ms: self._write(data))

    def _ask(self) -> bool:
        self.asked += 1
        return self.is_there

    def _write(self, data: bytes) -> bool:
        if self.has_room:
            self.written.append(data)
        return self.has_room


class Sender:
    """Writers without a transport. `send` returns a queue that gets the statuses, after all messages were put."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex
        self.participant = Participant(DdsConfig(multicast=False, peers=("127.0.0.1",), tag=tag))
        self.heard: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.writers = Writers(self.participant, writers_max=16, timeout_s=60.0, heard=self.heard.put)

    def send(self, *messages: tuple[WriterRoute, bytes], after: Any = None) -> "queue.SimpleQueue[list[UStatus]]":
        """`after()` is called on the writers' thread after each message."""
        answers: queue.SimpleQueue[list[UStatus]] = queue.SimpleQueue()
        batch = Batch(len(messages), answers.put, tells_absence=True)

        def put_all() -> None:
            for index, (route, data) in enumerate(messages):
                self.writers.put(Outgoing(batch, index, route, data))
                if after is not None:
                    after()

        self.writers.submit(put_all)
        return answers

    def close(self) -> None:
        self.writers.close()
        self.participant.close()


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> FakeReaders:
    return FakeReaders(monkeypatch)


@pytest.fixture
def sender(readers: FakeReaders) -> Any:
    sender = Sender()
    yield sender
    sender.close()


ROUTE, URGENT, ELSEWHERE = (
    WriterRoute("here", 8, None, True),
    WriterRoute("here", 40, None, True),
    WriterRoute("there", 8, None, True),
)


def test_after_such_an_answer_the_rest_of_the_call_gets_it_too(sender: Sender, readers: FakeReaders) -> None:
    """Even if a reader appears meanwhile, and for all writers: else a retry would arrive after later messages."""
    for route in (ROUTE, URGENT, ELSEWHERE):  # make the writers
        assert sender.send((route, b"")).get(timeout=DEADLINE_S) == [OK]
    readers.is_there, readers.asked = False, 0

    def come() -> None:
        readers.is_there = True

    messages = [(ROUTE, b"1"), (ROUTE, b"2"), (URGENT, b"3"), (ELSEWHERE, b"4"), (WriterRoute("here", 8, None), b"5")]
    statuses = sender.send(*messages, after=come).get(timeout=DEADLINE_S)
    assert answers_of(statuses) == "nnnoo"
    assert readers.written == [b"", b"", b"", b"4", b"5"]
    assert sender.heard.get(timeout=DEADLINE_S) == ["here"]


def test_addresses_that_get_listeners_together_are_reported_together(sender: Sender, readers: FakeReaders) -> None:
    readers.is_there = False
    messages = [(ROUTE, b""), (URGENT, b""), (ELSEWHERE, b"")]
    assert answers_of(sender.send(*messages).get(timeout=DEADLINE_S)) == "nnn"
    readers.is_there = True
    assert sender.heard.get(timeout=DEADLINE_S) == ["here", "there"]


def test_the_network_is_asked_once_for_each_call_and_writer(sender: Sender, readers: FakeReaders) -> None:
    assert answers_of(sender.send(*[(ROUTE, b"")] * 100).get(timeout=DEADLINE_S)) == "o" * 100
    assert readers.asked == 1


def test_what_waits_for_readers_that_go_is_not_written(sender: Sender, readers: FakeReaders) -> None:
    """DDS would have capacity again and accept it for nobody."""
    assert sender.send((ROUTE, b"")).get(timeout=DEADLINE_S) == [OK]

    def go() -> None:
        readers.is_there, readers.has_room = False, True

    readers.has_room = False
    answers = sender.send((ROUTE, b"1"), (ROUTE, b"2"), (WriterRoute("here", 8, None), b"3"), after=go)
    assert answers_of(answers.get(timeout=DEADLINE_S)) == "nno"
    assert readers.written == [b"", b"3"]
    readers.is_there = True
    assert sender.heard.get(timeout=DEADLINE_S) == ["here"]


def test_a_sender_that_waits_for_answers_is_notified_afterwards(sender: Sender, readers: FakeReaders) -> None:
    """A call may wait for another receiver; its sender learns about the absence only with its answer."""
    assert sender.send((ROUTE, b""), (ELSEWHERE, b"")).get(timeout=DEADLINE_S) == [OK, OK]

    def come() -> None:
        readers.is_there = True

    readers.is_there, readers.has_room = False, False
    answers = sender.send((ROUTE, b"1"), (WriterRoute("there", 8, None), b"2"), after=come)
    with pytest.raises(queue.Empty):
        sender.heard.get(timeout=4 * HELD_LOOK_S)
    assert answers.empty()
    readers.has_room = True
    assert answers_of(answers.get(timeout=DEADLINE_S)) == "no"
    assert sender.heard.get(timeout=DEADLINE_S) == ["here"]
