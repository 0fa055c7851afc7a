"""Publishers with an older layout of Zenoh keys: their messages cannot be read, and that is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import zenoh
from structlog.testing import capture_logs

from tests.transports.test_zenoh_network import DEADLINE_S, end
from transports.conformance import Sink
from transports.conformance.messages import publish, topic
from transports.ports import free_port
from transports.zenoh import ZenohTransport, older
from uprotocol import uri as uris

OLD_KEY = "up/{}/10AB/3/8001/{{}}/{{}}/{{}}/{{}}"
ATTACHMENT = b"\x02\x00\x01\x01\x00\x04\x0a\x02\x08\x01"  # two pairs, serialised: a version, and attributes


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[tuple[ZenohTransport, zenoh.Session]]:
    """A transport whose owner is a streamer, and a foreign session that is linked to it."""
    at = [f"tcp/127.0.0.1:{free_port()}"]
    config = zenoh.Config.from_json5(
        json.dumps({"mode": "client", "connect": {"endpoints": at}, "scouting": {"multicast": {"enabled": False}}})
    )
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(end("vehicle1", mode="router", listen=at, **settings))
        session = await asyncio.to_thread(zenoh.open, config)
        stack.push_async_callback(asyncio.to_thread, session.close)
        yield transport, session


async def until(condition: Callable[[], bool], act: Callable[[], Any] = lambda: None) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            act()
            await asyncio.sleep(0.01)


async def test_each_publisher_with_an_older_layout_is_reported_once_and_all_its_messages_are_counted() -> None:
    async with gateway() as (transport, session):
        sink = Sink(DEADLINE_S)
        await transport.register_listener(topic("ecu1"), sink)
        with capture_logs() as logs:
            session.put(OLD_KEY.format("ecu1"), b"1", attachment=ATTACHMENT)
            assert transport.notes == []
            transport.all_registered()
            await until(
                lambda: bool(transport.notes), lambda: session.put(OLD_KEY.format("ecu1"), b"1", attachment=ATTACHMENT)
            )
            before = transport.dropped["older_layout"]
            for _ in range(20):
                session.put(OLD_KEY.format("ecu2"), b"1", attachment=ATTACHMENT)
            await until(lambda: "ecu1, ecu2" in transport.notes[0])
            await until(lambda: transport.dropped["older_layout"] >= before + 20)
        events = [entry for entry in logs if entry["event"] == "messages with an older Zenoh key layout cannot be read"]
        assert [entry["source_authority"] for entry in events] == ["ecu1", "ecu2"]
        assert "docs/interop.md" in transport.notes[0]
        async with end("ecu1", mode="client", connect=[str(link.dst) for link in _links(session)]) as ecu:
            await ecu.send_batch([publish(b"ours", topic("ecu1"))])
            await sink.expect_payload(b"ours")
        assert sink.payloads == [b"ours"]


async def test_older_messages_stop_crossing_the_network_when_enough_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "OLDER_COUNTED_MAX", 5)
    monkeypatch.setattr(older, "LOGGED_AUTHORITIES_MAX", 3)
    async with gateway() as (transport, session):
        publisher: Any = session.declare_publisher(OLD_KEY.format("ecu1"))
        assert not publisher.matching_status.matching, "only a streamer listens to older layouts"
        transport.all_registered()
        await until(lambda: publisher.matching_status.matching)
        for number in range(10):
            session.put(OLD_KEY.format(f"ecu{number}"), b"")
        await until(lambda: transport.dropped["older_layout"] == 5)
        await until(lambda: not publisher.matching_status.matching)
        assert "ecu0, ecu1, ecu2:" in transport.notes[0]
        await transport.close()
        await transport.open()
        await until(lambda: publisher.matching_status.matching)  # a new session listens again


async def test_an_invented_authority_is_shortened_and_escaped() -> None:
    async with gateway() as (transport, session):
        transport.all_registered()
        hostile = "\n\x1b[2J" + "a" * 1_000
        with capture_logs() as logs:
            await until(lambda: bool(transport.notes), lambda: session.put(OLD_KEY.format(hostile), b""))
        [authority] = {entry["source_authority"] for entry in logs if "source_authority" in entry}
        assert authority == "\\n\\x1b[2J" + "a" * (uris.AUTHORITY_LENGTH_MAX - 5)
        assert f" {authority}:" in transport.notes[0]


async def test_a_subscription_that_access_control_denies_changes_nothing() -> None:
    rule = {"id": "ours", "permission": "allow", "flows": ["ingress", "egress"], "key_exprs": ["up/ecu1/**"]}
    rule["messages"] = ["put", "declare_subscriber"]
    control = {
        "enabled": True, "default_permission": "deny", "rules": [rule],
        "subjects": [{"id": "all"}], "policies": [{"subjects": ["all"], "rules": ["ours"]}],
    }  # fmt: skip
    async with gateway(settings={"access_control": control}) as (transport, session):
        sink = Sink(DEADLINE_S)
        await transport.register_listener(topic("ecu1"), sink)
        transport.all_registered()
        async with end("ecu1", mode="client", connect=[str(link.dst) for link in _links(session)]) as ecu:
            await ecu.send_batch([publish(b"ours", topic("ecu1"))])
            await sink.expect_payload(b"ours")


def _links(session: zenoh.Session) -> list[zenoh.Link]:
    return session.info.links()
