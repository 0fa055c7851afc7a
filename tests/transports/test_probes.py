"""What the probes of Zenoh and DDS say. test_mqtt5_probe.py has those of MQTT."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.tiers import dds_domain
from transports.dds import DdsConfig, DdsTransport
from transports.local import LocalConfig, LocalTransport
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol.transport import LocalUriProvider, ProbeRequest, UTransport

LOCAL = LocalUriProvider("vehicle1", 4, 1)
NOTHING = ProbeRequest()


async def probed(made: UTransport, asked: ProbeRequest = NOTHING) -> list[str]:
    return [f"{one.verdict} {one.what}" async for one in made.probe(asked)]


def zenoh(**settings: object) -> ZenohTransport:
    return ZenohTransport(ZenohConfig.model_validate({"connect_timeout_ms": 1_000, **settings}), LOCAL)


async def test_a_router_is_named_with_its_version_and_clock() -> None:
    at = f"tcp/127.0.0.1:{free_port()}"
    router = zenoh(mode="router", listen=[at], settings={"adminspace/enabled": True})
    asked = ProbeRequest(is_running=True)
    assert await probed(router) == [f"ok {at[4:]} is free"]
    assert await probed(router, asked) == [f"FAIL nobody listens at {at[4:]}, though the streamer runs"]
    async with router:
        away: list[bool] = []
        router.on_connection(away.append)
        linked, clock, rules = await probed(zenoh(connect=[at]), asked)
        assert linked.startswith(f"ok {at}: linked to router ")
        assert ", version v1." in linked
        assert clock.startswith("ok our clock is 0.")
        assert clock.endswith("of the router")
        assert rules.startswith("? whether access_control denies something")
        assert await probed(router, asked) == [f"ok {at[4:]} is in use, as it should be while the streamer runs"]
        (taken,) = await probed(router)
        assert taken.startswith(f"FAIL can't listen at {at[4:]}: ")


async def test_each_end_of_connect_is_tried(tmp_path: Path) -> None:
    at, nowhere = (f"tcp/127.0.0.1:{free_port()}" for _ in range(2))
    async with zenoh(listen=[at]):
        lines = await probed(zenoh(connect=[nowhere, at], listen=["udp/127.0.0.1:0"]))
        assert lines[0] == "? whether udp/127.0.0.1:0 is free"
        assert lines[1].startswith(f"FAIL linking to {nowhere}: ")
        assert lines[2].startswith(f"ok {at}: linked to peer ")
        assert lines[3] == "? whether the clocks agree: nobody there stamps messages with its time"
        file = tmp_path / "zenoh.json5"
        file.write_text(json.dumps({"mode": "peer", "connect": {"endpoints": {"peer": [at]}}, "scouting": {}}))
        assert (await probed(zenoh(config_file=file)))[-3].startswith(f"ok {at}: linked to peer ")


async def test_who_may_not_link_to_a_zenoh_peer(tmp_path: Path) -> None:
    at, users = f"tcp/127.0.0.1:{free_port()}", tmp_path / "users"
    users.write_text("vehicle1:secret\n")
    async with zenoh(listen=[at], credentials_file=users):
        (good, *_), (bad, *_) = [
            await probed(zenoh(connect=[at], user="vehicle1", password=password)) for password in ("secret", "wrong")
        ]
    assert good.startswith(f"ok {at}: linked to peer ")
    assert bad.startswith(f"FAIL linking to {at}: ")


async def test_scouting_that_finds_nobody() -> None:
    settings = {"scouting/multicast/address": "224.0.0.224:17446", "scouting/multicast/interface": "lo"}
    (found,) = await probed(zenoh(multicast_scouting=True, settings=settings))
    assert found == "? whether somebody is there: nobody answers to scouting now"


def dds(tmp_path: Path, **settings: object) -> DdsTransport:
    given = {"domain_id": dds_domain(3), "interface": "lo", "multicast": False, "peers": ["127.0.0.1"]}
    config = DdsConfig.model_validate({**given, "tag": tmp_path.name, **settings})
    return DdsTransport(config, LOCAL)


async def test_a_dds_domain_is_joined_and_shown(tmp_path: Path) -> None:
    domain = f"DDS domain {dds_domain(3)}"
    joined, others, clock = await probed(dds(tmp_path))
    assert joined == f"ok {domain} is joined at 127.0.0.1 (interface lo)"
    assert others == "? whether we are heard: no other participant is there now"
    assert clock.startswith("? whether the clocks agree")
    async with dds(tmp_path):
        _, others, *_ = await probed(dds(tmp_path))
    assert others.startswith("ok participants: ")


async def test_a_dds_interface_that_is_not_there(tmp_path: Path) -> None:
    (refused,) = await probed(dds(tmp_path, interface="no-such0"))
    assert refused.startswith("FAIL no network interface 'no-such0' now; known: ")


async def test_a_local_network_is_this_process() -> None:
    assert await probed(LocalTransport(LocalConfig(), LOCAL)) == ["ok within the process of the streamer"]


async def test_a_session_of_a_plugin_is_opened_only_if_asked() -> None:
    """The probe that a transport inherits."""
    named = LocalTransport(LocalConfig(session="gateway"), LOCAL)

    async def inherited(asked: ProbeRequest) -> list[str]:
        return [f"{one.verdict} {one.what}" async for one in UTransport.probe(named, asked)]

    assert await inherited(ProbeRequest()) == [
        "? whether it can be opened: that could disturb a session of our name (--take-over tries it)"
    ]
    assert (await inherited(ProbeRequest(is_running=True)))[0].endswith("could disturb the streamer that runs")
    assert await inherited(ProbeRequest(take_over=True)) == ["ok opened, and connected"]
    assert not named.is_open


async def test_a_probe_can_be_ended() -> None:
    async with asyncio.timeout(0.5):
        task = asyncio.create_task(probed(zenoh(connect=["tcp/127.0.0.1:1"], connect_timeout_ms=60_000)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
