"""Targets for callers of the core services: payloads of requests, answers and changes, and whole requests.

payload -> service -> a readable response without INTERNAL    answer -> client -> only valid data
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from google.protobuf.message import Message

from campaigns.fuzz.registry import refusing, target
from campaigns.fuzz.shapes import Dice, made
from history.epochs.assembling import Assembler
from history.epochs.groups import Group
from history.log.log import Log
from history.reading.acceptor import Acceptor
from history.records.epoch import Epoch
from history.records.record import Record
from history.service.keeper import Keeper
from history.service.service import HistoryService
from spark_ingest import offsets
from spark_ingest.client import HistorySession
from spark_ingest.options import Options
from spark_ingest.planner import Planner
from streamer.operating.control import ControlSocket, pause_operations
from streamer.operation import Operations
from streamer.part import Parts
from streamer.parts.control import ControlPart
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.paused import Paused
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.ids import (
    BEGINNINGS,
    DESCRIBE,
    ENTITY,
    FRONTIERS,
    LIST_PAUSED,
    PAUSE,
    POLL,
    PROGRESS,
    RESUME,
    VERSION,
    at,
)
from uprotocol.core.ustreamer.v1 import ustreamer_pb2 as ustreamer
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS, V3_CODEC, V4_CODEC, Subscription
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import OK, UStatusError
from uprotocol.transport import LocalUriProvider, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes, UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.state import Change
from usubscription_client.interest import InterestSource

OWN: Final = "vin"
CALLER: Final = uris.uri("cloud", 0x20, 1, 0)
CALL_TTL_MS: Final = 200  # so short that no poll waits for new records
ANSWER_S: Final = 20.0

_FORMATS: Final = (
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF,
    UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY,
    UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED,
    UPayloadFormat.UPAYLOAD_FORMAT_RAW,
)


class Network(UTransport):
    """The network of one host: takes its requests, and returns its answers."""

    def __init__(self) -> None:
        self.listeners: dict[int, UListener] = {}
        self.answers: asyncio.Queue[UMessage] = asyncio.Queue()

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        self.listeners[sink_filter.resource_id] = listener

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        del self.listeners[sink_filter.resource_id]

    async def send(self, message: UMessage) -> None:
        self.answers.put_nowait(message)

    async def send_batch(self, messages: Any) -> list[UStatus]:
        for message in messages:
            self.answers.put_nowait(message)
        return [OK] * len(messages)

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        raise UStatusError(UCode.UNIMPLEMENTED, "nothing is pulled here")

    async def ask(self, request: UMessage) -> UMessage:
        self.listeners[request.attributes.sink.resource_id].on_receive(request)
        async with asyncio.timeout(ANSWER_S):
            return await self.answers.get()


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Returns one loop for all inputs of a process: a new one for each would be most of the work."""
    return asyncio.new_event_loop()


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """Stops the clock, so that no request expires on a slow machine."""
    now_ns, ids = uuids.now_ms() * 1_000_000, uuids.UUIDGenerator()
    with uuids.simulated(lambda: now_ns, ids):
        yield


def payload_of(dice: Dice, *types: type[Message]) -> UPayload:
    """Returns a payload: the raw octets, or a message of a random shape."""
    choice = dice.octet()
    format = _FORMATS[choice >> 1 & 3] if choice & 8 else _FORMATS[0]
    type = types[(choice >> 4) % len(types)]
    if choice & 1:
        message = made(type, dice)
        return UPayload.pack_to_any(message) if format == _FORMATS[1] else UPayload(message.SerializeToString(), format)
    return UPayload(dice.rest(), format)


def request_of(payload: UPayload, method: UUri) -> UMessage:
    return UMessageBuilder.request(CALLER, method, CALL_TTL_MS).build_from_upayload(payload)


def call(network: Network, method: int, payload: UPayload, response: type[Message]) -> Message | UStatus:
    """Returns the answer. Any code is accepted but INTERNAL, which would be an error of the product."""
    with stopped_clock():
        request = request_of(payload, at(OWN, method))
        answer = loop().run_until_complete(network.ask(request))
    code = answer.attributes.commstatus
    assert answer.attributes.reqid == request.attributes.id
    assert network.answers.empty(), "one answer to one request"
    if code:
        status = UStatus.FromString(answer.payload)
        assert status.code == code
        assert code != UCode.INTERNAL, status.message
        return status
    return response.FromString(answer.payload)


# core.ustreamer


@cache
def history() -> Network:
    """Returns a history with some records on three topics."""

    async def start() -> Network:
        log = await Log.open(None, name="fuzz", retention_bytes=1 << 20)
        for number in range(12):
            topic = uris.uri("vin", 0x10, 1, 0x8000 + number % 3)
            message = UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"x" * number, 5))
            await log.append([log.stream_id(topic, None)], [message])
        groups = [Group("lap", [uris.pattern(CALLER.authority_name)], None, timeout_ms=1 << 40)]
        keeper = Keeper(at(OWN, FRONTIERS), groups, [log], uuids.now_ms)
        await keeper.open()
        network = Network()
        await HistoryService(network, LocalUriProvider(OWN, 0, 1), [log], keeper=keeper).start()
        return network

    return loop().run_until_complete(start())


@target
def history_poll(data: bytes) -> None:
    answer = call(history(), POLL, payload_of(Dice(data), ustreamer.PollRequest), ustreamer.PollResponse)
    if isinstance(answer, ustreamer.PollResponse):
        for batch in answer.batches:
            columns = (batch.seq, batch.prev_seq, batch.time_ms, batch.message)
            assert len({len(column) for column in columns}) == 1, "every column has one entry for each record"


@target
def history_describe(data: bytes) -> None:
    call(history(), DESCRIBE, payload_of(Dice(data), ustreamer.DescribeRequest), ustreamer.DescribeResponse)


@target
def history_progress(data: bytes) -> None:
    answer = call(history(), PROGRESS, payload_of(Dice(data), ustreamer.ProgressRequest), ustreamer.ProgressResponse)
    if isinstance(answer, ustreamer.ProgressResponse):
        assert not answer.active, "nothing was published"


@target
def epochs_assembled(data: bytes) -> None:
    """Reports frontiers in any order: no record is delivered twice, and each whole epoch has a reported end."""
    dice, assembler = Dice(data), Assembler(filter=Dice(data).one_of(("atomic", "all")), timeout_s=5)
    handed = Counter[int]()
    for seq in range(1, 2 + dice.octet() % 64):
        kind, log = dice.octet(), bytes([dice.octet() & 1]) * 16
        if kind & 3 == 0:
            length = 1 + (kind >> 2 & 1)
            epoch = Epoch(dice.one_of(("a", "b")), tuple(dice.octet() % 4 for _ in range(length)))
            record = Record(log, seq, 0, 0, _publication(CALLER, UPayload(b"x", _FORMATS[0])), None, epoch)
        else:
            type = ustreamer.Beginning if kind & 3 == 1 else ustreamer.Frontier
            payload = UPayload.pack(made(type, dice)) if kind & 4 else UPayload(dice.some(), _FORMATS[0])
            record = Record(log, seq, 0, 0, _publication(at(OWN, BEGINNINGS if kind & 3 == 1 else FRONTIERS), payload))
        if kind & 0x30 == 0:
            assembler.lose()
        if kind & 0xC0 == 0:
            assembler.begin([record] if record.epoch is None else [], seq)
        ready = assembler.take([record], seq) + assembler.overdue(seq)
        handed.update(one.seq for epoch in ready for one in epoch.records)
        safe = assembler.safe({log: seq}, ready)
        Assembler().restore(json.loads(json.dumps(assembler.save(safe, ready))))
        assembler.forget(safe)
    assert all(count == 1 for count in handed.values())


def _publication(source: UUri, payload: UPayload) -> UMessage:
    message = UMessage(payload=payload.data)
    message.attributes.source.CopyFrom(source)
    return message


@target
def history_answers(data: bytes) -> None:
    """Feeds any answers of a history to its readers: they deliver each record once and in order."""
    acceptor, payload = Acceptor(), payload_of(Dice(data), ustreamer.PollResponse, ustreamer.DescribeResponse)
    with refusing(UCode.INVALID_ARGUMENT):
        response = payload.unpack(ustreamer.PollResponse)
        for _ in range(2):
            accepted = acceptor.accept(response)
            seen = [
                (one.incarnation, one.message.attributes.source.SerializeToString(), one.seq)
                for one in accepted.records
            ]
            assert len(set(seen)) == len(seen), "a record was taken twice"
            assert len(accepted.records) <= sum(len(batch.seq) for batch in response.batches)
            accepted.state.request()
        loop().run_until_complete(_plan(response))


class _AnyHistory(HistorySession):
    """A session whose only history gives the same answer to each poll, and then is away."""

    def __init__(self, answer: ustreamer.PollResponse) -> None:
        super().__init__(_SPARK)
        self._answers = [answer] * 3

    async def call(self, authority: str, ask: Any) -> Any:
        if not self._answers:
            raise UStatusError(UCode.UNAVAILABLE, "it was asked three times")
        return self._answers.pop()


_SPARK: Final = Options(transport="none", authority="gateway", local_authority="spark", start_timeout=0)


async def _plan(answer: ustreamer.PollResponse) -> None:
    """Plans a batch for Spark, whose offsets go into a checkpoint and come back."""
    planner = Planner(_AnyHistory(answer), lambda loss, authority: None)
    try:
        with refusing(UCode.UNAVAILABLE, UCode.DATA_LOSS, UCode.FAILED_PRECONDITION):
            start = await planner.begin("q")
            end = await planner.latest(start, 1_000, 0)
            for offset in (start, end):
                assert offsets.Offset.of(json.loads(json.dumps(offset.json()))) == offset
            list(offsets.ranges(start, end, ()))
    finally:
        await planner.fleet.close()


class _Kept(Paused):
    """Keeps pauses in memory: no file is written for each input."""

    async def _change(self, pauses: Any) -> None:
        self._put_in_force(pauses)


@cache
def paused() -> _Kept:
    endpoints = Endpoints([Endpoint(name, [name], Network()) for name in ("cloud", "ecu1")])
    return _Kept(Path("nowhere"), endpoints, OWN)


@cache
def control() -> Network:
    network = Network()
    config = SimpleNamespace(dispatch=SimpleNamespace(control=[uris.format(uris.ANY)]))
    local = LocalUriProvider(OWN, ENTITY, VERSION)
    assembly: Any = SimpleNamespace(hosted=network, local=local, paused=paused(), config=config)
    loop().run_until_complete(ControlPart(assembly, Parts(assembly, [])).start())
    return network


@target
def control_calls(data: bytes) -> None:
    """Calls Pause, Resume, ListPaused."""
    dice = Dice(data)
    method, request, response = dice.one_of(
        (
            (PAUSE, ustreamer.PauseRequest, ustreamer.PauseResponse),
            (RESUME, ustreamer.ResumeRequest, ustreamer.ResumeResponse),
            (LIST_PAUSED, ustreamer.ListPausedRequest, ustreamer.ListPausedResponse),
        )
    )
    call(control(), method, payload_of(dice, request), response)


@target
def control_line(data: bytes) -> None:
    """Sends a line to the socket, as the command line does."""
    operations = Operations(pause_operations(paused()))
    answer = loop().run_until_complete(ControlSocket(Path("nowhere"), operations)._answer(data))
    assert "code" in answer or answer.keys() == {"paused"}
    assert answer.get("code") != UCode.INTERNAL


@target
def request_arrives(data: bytes) -> None:
    """Sends a whole request, valid or not: it is answered or counted."""
    dice = Dice(data)
    attributes = made(UAttributes, dice)
    network = history()
    listener = network.listeners[DESCRIBE if attributes.sink.resource_id == DESCRIBE else POLL]
    message = UMessage(attributes=attributes, payload=dice.some())
    attributes.ttl = min(attributes.ttl, CALL_TTL_MS)
    message.attributes.ttl = attributes.ttl

    async def run() -> None:
        listener.on_receive(message)
        for _ in range(3):
            await asyncio.sleep(0)

    with stopped_clock():
        loop().run_until_complete(run())
    while not network.answers.empty():
        assert network.answers.get_nowait().attributes.commstatus != UCode.INTERNAL


# core.usubscription

_V3_REQUESTS: Final = (
    (v3.SubscriptionRequest, V3_CODEC.read_subscribe),
    (v3.UnsubscribeRequest, V3_CODEC.read_unsubscribe),
    (v3.FetchSubscriptionsRequest, V3_CODEC.read_fetch),
    (v3.FetchSubscribersRequest, V3_CODEC.read_fetch_subscribers),
    (v3.NotificationsRequest, V3_CODEC.read_registration),
)
_V4_REQUESTS: Final = (
    (v4.SubscribeRequest, V4_CODEC.read_subscribe),
    (v4.UnsubscribeRequest, V4_CODEC.read_unsubscribe),
    (v4.FetchSubscriptionsRequest, V4_CODEC.read_fetch),
    (v4.NotificationsRequest, V4_CODEC.read_registration),
)


def _requests(dice: Dice, requests: tuple[tuple[type[Message], Callable[..., Any]], ...], major: int) -> None:
    type, read = requests[dice.octet() % len(requests)]
    request = request_of(payload_of(dice, type), uris.uri(OWN, 0, major, 1))
    with refusing(UCode.INVALID_ARGUMENT):
        asked = read(request, OWN)
        parts = asked if isinstance(asked, tuple) else (asked,)
        for part in parts:
            topic = getattr(part, "topic", None)
            if isinstance(topic, tuple):
                uris.validate(
                    UUri(authority_name=topic[0], ue_id=topic[1], ue_version_major=topic[2], resource_id=topic[3])
                )
                assert topic[0], "a topic that is kept names its authority"
    with refusing(UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED):
        CODECS[major].check_reset(request)


@target
def usubscription_requests_v3(data: bytes) -> None:
    _requests(Dice(data), _V3_REQUESTS, 3)


@target
def usubscription_requests_v4(data: bytes) -> None:
    _requests(Dice(data), _V4_REQUESTS, 4)


@target
def usubscription_changes(data: bytes) -> None:
    """Sends updates of another service: the service reads them, and writes them again."""
    dice = Dice(data)
    major = 3 + dice.octet() % 2
    payload = payload_of(dice, v3.Update if major == 3 else v4.Subscription)
    codec = CODECS[major]
    with refusing(UCode.INVALID_ARGUMENT):
        received = codec.read_change(payload, strict=True)
        if received.topic.resource_id:
            topic, subscriber = uris.key(received.topic), uris.key(received.subscriber)
            change = Change(
                topic,
                subscriber,
                received.status,
                major,
                expires_ms=received.expires_ms,
                sample_period_ms=received.sample_period_ms,
            )
            again = codec.read_change(UPayload.pack(codec.change(change)), strict=True)
            assert (uris.key(again.topic), uris.key(again.subscriber)) == (topic, subscriber)
            assert again[2:] == received[2:], "it differs after encoding and decoding"


@target
def usubscription_answers(data: bytes) -> None:
    """Feeds answers and changes of a service to its clients: streamers, applications, and other services."""
    dice = Dice(data)
    major = 3 + dice.octet() % 2
    types: tuple[type[Message], ...] = (
        (v3.SubscriptionResponse, v3.FetchSubscriptionsResponse, v3.Update, v3.FetchSubscribersResponse)
        if major == 3
        else (v4.SubscribeResponse, v4.FetchSubscriptionsResponse, v4.Subscription)
    )
    payload, codec = payload_of(dice, *types), CODECS[major]
    with refusing(UCode.INTERNAL):
        codec.read_status(payload)
    with refusing(UCode.DATA_LOSS):
        codec.read_subscriptions(payload, strict=True)
    with refusing(UCode.INVALID_ARGUMENT):
        believed(*codec.read_subscriptions(payload)[0])
    with refusing(UCode.INVALID_ARGUMENT):
        change = codec.read_change(payload)
        believed(*([change] if change.topic.resource_id else []))
    with refusing(UCode.INVALID_ARGUMENT):
        for subscriber in V3_CODEC.read_subscribers(payload)[0]:
            uris.validate(subscriber)


def believed(*subscriptions: Subscription) -> None:
    """Checks what a streamer believes: the topics that it listens to and the subscribers that it sends to are valid."""
    source = InterestSource("fuzz")
    source.replace(subscriptions)
    for topic in source.topics():
        uris.validate(topic)
        assert uris.is_topic(topic) or topic.resource_id == uris.WILDCARD_RESOURCE, "no message has that source"
        for authority in source.wants(topic):
            uris.validate_authority(authority)
