"""docs/dds-mapping.md is enough to write an application: dds_foreign.py is one, in a process of its own, and exchanges
messages with our transport."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import dds_domain
from transports.conformance import Sink
from transports.dds import DdsTransport, mapping
from transports.dds.config import DdsConfig
from uprotocol import uri as uris
from uprotocol.communication.rpc_client import InMemoryRpcClient
from uprotocol.communication.rpc_server import InMemoryRpcServer
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dds-mapping.md"
APP = Path(__file__).with_name("dds_foreign.py")
DOMAIN = dds_domain()
DEADLINE_S = 40.0
OURS = ["beta", 0x10AB, 3]
THEIRS = ["alpha", 0x10AB, 3]
ANY = [None, None, None, None]
PUBLISHES = "up/alpha/10AB/0/3/8001/{}/{}/{}/{}/{}"
TEXT = UPayloadFormat.UPAYLOAD_FORMAT_TEXT


def config() -> DdsConfig:
    return DdsConfig(domain_id=DOMAIN, interface="lo", multicast=False, peers=("127.0.0.1",), tag=uuid.uuid4().hex)


class Foreign:
    """The other application: `await foreign.do("publish", ...)`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, order: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order} | arguments).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S))

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), DEADLINE_S)


@pytest.fixture
async def beta_and_foreign() -> AsyncIterator[tuple[DdsTransport, Foreign]]:
    settings = config()
    pipe = asyncio.subprocess.PIPE
    # -I: nothing of ours on the path
    command = [sys.executable, "-I", str(APP), str(PAGE), str(DOMAIN), settings.xml(["127.0.0.1"])]
    foreign = Foreign(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
    assert await foreign.answer() == "ready"
    async with DdsTransport(settings, LocalUriProvider("beta", 0x10AB, 3)) as beta:
        yield beta, foreign
    await foreign.end()


def test_the_application_knows_nothing_of_ours() -> None:
    names = [
        name
        for node in ast.walk(ast.parse(APP.read_text()))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([str(node.module)] if isinstance(node, ast.ImportFrom) else [])
    ]
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign == {"cyclonedds"}


def test_the_octets_of_the_page_are_ours() -> None:
    block = re.search(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    octets = bytes.fromhex(re.sub(r"#.*", "", block[1]))
    attributes = UAttributes(
        id=UUID(msb=0x018D_F6B3_4C00_7A01, lsb=0x8000_0000_0000_1267),
        type=UMessageType.UMESSAGE_TYPE_PUBLISH,
        source=UUri(authority_name="device1", ue_id=0x10AB, ue_version_major=3, resource_id=0x80CD),
        priority=UPriority.UPRIORITY_CS1,
        ttl=5_000,
        payload_format=TEXT,
    )
    message = UMessage(attributes=attributes, payload=b"hello")
    assert mapping.encode(message) == octets
    assert mapping.decode(octets) == message
    assert len(octets) == 73
    assert mapping.decode(octets + b"\x00\x00\x00") == message  # "RTPS may append octets"
    nothing = mapping.encode(UMessage(attributes=attributes))
    assert nothing == octets[:5] + b"\x00" + octets[6:64] + bytes(4)


@pytest.mark.parametrize("representation", ["", "XCDR1", "XCDR2"])
async def test_what_it_publishes_is_heard(beta_and_foreign: tuple[DdsTransport, Foreign], representation: str) -> None:
    beta, foreign = beta_and_foreign
    heard = Sink(DEADLINE_S)
    await beta.register_listener(uris.uri("alpha", 0x10AB, 3, 0x8001), heard)
    where = await foreign.do("open", keys=[[*THEIRS, 0x8001], None], representation=representation)
    assert where == PUBLISHES
    assert await foreign.do("ready", where=where)
    for payload in ("hello", "", None):
        await foreign.do("publish", where=where, source=[*THEIRS, 0x8001], payload=payload)
    await heard.expect(3)
    assert [m.payload if m.HasField("payload") else None for m in heard.messages] == [b"hello", b"", None]
    assert heard.messages[0].attributes.source == uris.uri("alpha", 0x10AB, 3, 0x8001)
    assert heard.messages[0].attributes.payload_format == TEXT
    assert not beta.dropped
    assert not beta.troubles


@pytest.mark.parametrize("representation", ["", "XCDR1", "both"])
async def test_what_we_publish_is_heard(beta_and_foreign: tuple[DdsTransport, Foreign], representation: str) -> None:
    """No message is lost after the announcement of the reader, whose octets are those of the page."""
    beta, foreign = beta_and_foreign
    one = await foreign.do("listen", keys=[[*OURS, 0x8001], None], representation=representation)
    everything = await foreign.do("listen", keys=[ANY, None])
    assert (one, everything) == ("up/beta/10AB/0/3/8001/{}/{}/{}/{}/{}", "up/*/*/*/*/*/{}/{}/{}/{}/{}")
    assert await foreign.do("known", where=one)
    assert await foreign.do("known", where=everything)
    topic = uris.uri("beta", 0x10AB, 3, 0x8001)
    messages = [
        UMessageBuilder.publish(topic)
        .with_ttl(20_000)
        .with_priority(UPriority.UPRIORITY_CS2)
        .build_from_upayload(UPayload(b"hello", TEXT)),
        UMessageBuilder.publish(topic).build(),
    ]
    assert not any(status.code for status in await beta.send_batch(messages))
    for where in (one, everything):
        heard = await foreign.do("take", where=where, count=2)
        assert sorted((m["payload"] or "", m["type"], m["priority"], m["ttl"]) for m in heard) == [
            ("", 1, 0, 0),
            ("hello", 1, 3, 20_000),
        ]


async def echo(request: UMessage) -> UPayload:
    return UPayload(request.payload + b"!", TEXT)


async def test_a_call_each_way(beta_and_foreign: tuple[DdsTransport, Foreign]) -> None:
    beta, foreign = beta_and_foreign
    ours, theirs = LocalUriProvider("beta", 0x10AB, 3), [*THEIRS, 0x11]
    requests = await foreign.do("listen", keys=[[None, None, None, 0], theirs])
    assert requests == "up/*/*/*/*/0/alpha/10AB/0/3/11"
    assert await foreign.do("known", where=requests)
    async with InMemoryRpcClient(beta, ours) as client:
        call = asyncio.ensure_future(client.invoke_method(uris.uri("alpha", 0x10AB, 3, 0x11), UPayload(b"ping", TEXT)))
        (request,) = await foreign.do("take", where=requests)
        assert (request["type"], request["payload"], request["priority"]) == (2, "ping", 5)
        back = await foreign.do("open", keys=[theirs, [*OURS, 0]])
        assert await foreign.do("ready", where=back)
        await foreign.do("answer", where=back, method=theirs, caller=[*OURS, 0], request=request, payload="pong")
        assert (await asyncio.wait_for(call, DEADLINE_S)).data == b"pong"

    server = InMemoryRpcServer(beta, ours)
    await server.register_request_handler(0x12, echo)
    responses = await foreign.do("listen", keys=[ANY, [*THEIRS, 0]])
    assert await foreign.do("known", where=responses)
    there = await foreign.do("open", keys=[[*THEIRS, 0], [*OURS, 0x12]])
    assert await foreign.do("ready", where=there)
    await foreign.do("call", where=there, source=[*THEIRS, 0], sink=[*OURS, 0x12], payload="hello")
    (response,) = await foreign.do("take", where=responses)
    assert (response["type"], response["payload"], response["ttl"]) == (3, "hello!", 20_000)
    await server.close()


async def test_an_announcement_of_its_own_is_what_registering_waits_for(
    beta_and_foreign: tuple[DdsTransport, Foreign], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registering would wait for an hour if the announcement were not understood."""
    beta, foreign = beta_and_foreign
    monkeypatch.setattr("transports.dds.readers.SEEN_S", 3_600.0)
    heard = Sink(DEADLINE_S)
    registering = asyncio.ensure_future(beta.register_listener(uris.uri("alpha", 0x10AB, 3, 0x8001), heard))
    assert await foreign.do("announce_when_found")
    await asyncio.wait_for(registering, DEADLINE_S)
    assert heard.messages == []


async def test_what_is_missing_of_a_numbered_writer_is_counted(beta_and_foreign: tuple[DdsTransport, Foreign]) -> None:
    beta, foreign = beta_and_foreign
    heard = Sink(DEADLINE_S)
    await beta.register_listener(uris.uri("alpha", 0x10AB, 3, 0x8001), heard)
    where = await foreign.do("open", keys=[[*THEIRS, 0x8001], None], numbered=True)
    assert await foreign.do("ready", where=where)
    await foreign.do("publish", where=where, source=[*THEIRS, 0x8001], payload="x", numbers=[1, 2, 5, 6])
    await heard.expect(4)
    assert beta.dropped == {"lost": 2}


async def test_a_reader_of_xcdr2_alone_is_reported(beta_and_foreign: tuple[DdsTransport, Foreign]) -> None:
    beta, foreign = beta_and_foreign
    await beta.send(UMessageBuilder.publish(uris.uri("beta", 0x10AB, 3, 0x8001)).build())
    await foreign.do("listen", keys=[[*OURS, 0x8001], None], representation="XCDR2")
    while True:  # there is no event; the time-out of the test ends this
        if beta.troubles:
            break
        await asyncio.sleep(0.01)
    assert "XCDR2 alone" in beta.troubles[0]
