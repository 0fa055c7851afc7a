"""The statements of docs/zenoh.md about networks: which ends meet, what `connect` accepts, and its examples."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import threading
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zenoh

from streamer.config import loads
from transports.conformance import Sink
from transports.conformance.messages import notification, publish, reply, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zenoh.md"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
DEADLINE_S = 30.0


def end(authority: str, **settings: Any) -> ZenohTransport:
    return ZenohTransport(
        ZenohConfig.model_validate({"connect_timeout_ms": 20_000} | settings), LocalUriProvider(authority, 0x10AB, 3)
    )


def settings_of(block: str) -> dict[str, Any]:
    """The settings of the one endpoint in an example, complete or in part."""
    endpoint = tomllib.loads(block)["endpoint"]
    found: dict[str, Any] = (endpoint[0] if isinstance(endpoint, list) else endpoint)["settings"]
    return found


async def heard(speaker: ZenohTransport, source: str, listener: ZenohTransport) -> Sink:
    """A sink that has got a message. It is sent repeatedly, since others learn about a listener a moment later."""
    sink = Sink(DEADLINE_S)
    await listener.register_listener(topic(source), sink)
    async with asyncio.timeout(DEADLINE_S):
        while not sink.messages:
            await speaker.send_batch([publish(source=topic(source))])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await sink.expect(1)
    return sink


@pytest.mark.parametrize(
    ("a", "b", "hears"),
    [
        ("client", "client", True),
        ("client", "peer", True),
        ("peer", "client", True),
        ("peer", "peer", False),
        ("router", "peer", True),
    ],
)
async def test_who_hears_whom_through_a_router(a: str, b: str, hears: bool) -> None:
    """Behind a router, be a client. That a message does not arrive is known when the router has got it."""
    at = [f"tcp/127.0.0.1:{free_port()}"]
    async with (
        end("hub", mode="router", listen=at) as hub,
        end("alpha", mode=a, connect=at) as alpha,
        end("beta", mode=b, connect=at) as beta,
    ):
        sink = Sink(DEADLINE_S)
        await beta.register_listener(topic("alpha"), sink)
        if hears:
            await heard(alpha, "alpha", beta)
            return
        await heard(hub, "hub", beta)  # then beta's listeners are known, and alpha is linked
        for _ in range(3):
            await heard(alpha, "alpha", hub)
        assert not sink.messages


@pytest.mark.parametrize("mode", ["client", "peer", "router"])
async def test_one_that_answers_is_enough(mode: str) -> None:
    """Plain Zenoh tries only the first address of a client, and needs all addresses of a peer or router."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # without listening
        where = [f"tcp/127.0.0.1:{dead.getsockname()[1]}", f"tcp/127.0.0.1:{free_port()}"]
        async with end("hub", mode="router", listen=where[1:]):
            for connect in (where, where[::-1]):
                async with end("alpha", mode=mode, connect=connect, connect_timeout_ms=4_000) as alpha:
                    assert alpha.connected
        alone = end("alpha", mode=mode, connect=where, connect_timeout_ms=400)
        with pytest.raises(UStatusError, match="Unable to connect") as raised:
            await alone.open()
        assert raised.value.code == UCode.UNAVAILABLE
        await alone.close()


@pytest.mark.parametrize("mode", ["peer", "router"])
async def test_who_was_away_at_the_start_is_found_later(mode: str) -> None:
    where = [f"tcp/127.0.0.1:{free_port()}", f"tcp/127.0.0.1:{free_port()}"]
    async with (
        end("hub", mode="router", listen=where[1:]),
        end("alpha", mode=mode, connect=where) as alpha,
        end("beta", mode="router", listen=where[:1]) as beta,
    ):
        await heard(alpha, "alpha", beta)


async def test_a_client_goes_to_the_next_one() -> None:
    where = [f"tcp/127.0.0.1:{free_port()}", f"tcp/127.0.0.1:{free_port()}"]
    first = end("hub", mode="router", listen=where[:1])
    await first.open()
    async with (
        end("hub2", mode="router", listen=where[1:]) as second,
        end("alpha", mode="client", connect=where) as alpha,
    ):
        await heard(alpha, "alpha", first)
        await first.close()
        await heard(alpha, "alpha", second)


# The examples of the page.


def test_the_examples_are_configurations() -> None:
    assert len(BLOCKS) == 4
    assert loads(BLOCKS[0]).home.transport == "zenoh"
    for block in BLOCKS:
        ZenohConfig.model_validate(settings_of(block)).to_zenoh()
    whole = BLOCKS[0].partition("[endpoint.settings]")[0]
    for block in BLOCKS[1:]:
        assert loads(whole + block).authority == "vehicle1"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[tuple[ZenohTransport, list[str]]]:
    """The vehicle's gateway of the page, on a port of its own, with two devices of which the second has no policy."""
    devices = tmp_path / "devices"
    devices.write_text("ecu1:secret\necu2:secret\n")
    at = [f"tcp/127.0.0.1:{free_port()}"]
    settings = settings_of(BLOCKS[1]) | {"listen": at, "credentials_file": devices}
    async with end("vehicle1", **settings) as transport:
        yield transport, at


async def test_a_device_speaks_and_hears_for_itself_alone(
    gateway: tuple[ZenohTransport, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    hub, at = gateway
    forged, secret = Sink(DEADLINE_S), Sink(DEADLINE_S)
    async with end("ecu1", mode="client", connect=at, user="ecu1", password="secret") as ecu1:
        await hub.register_listener(topic("ecu2"), forged)
        await ecu1.register_listener(topic("ecu3"), secret)
        await ecu1.register_listener(topic("vehicle1"), secret, reply("ecu3"))
        await heard(ecu1, "ecu1", hub)
        await heard(hub, "vehicle1", ecu1)
        assert not (await ecu1.send_batch([publish(source=topic("ecu2"))]))[0].code  # dropped without an answer
        await hub.send_batch([publish(source=topic("ecu3")), notification(b"", topic("vehicle1"), reply("ecu3"))])
        await heard(ecu1, "ecu1", hub)  # what went before on the same link has been read
        await heard(hub, "vehicle1", ecu1)
    assert "may not have been read" not in capsys.readouterr().out
    assert not forged.messages
    assert not secret.messages


async def test_a_device_learns_who_listens(gateway: tuple[ZenohTransport, list[str]]) -> None:
    hub, at = gateway
    async with end("ecu1", mode="client", connect=at, user="ecu1", password="secret") as ecu1:
        for transport, source in ((ecu1, "ecu1"), (hub, "vehicle1")):
            transport.tells_absence = True
            (status,) = await transport.send_batch([publish(source=topic(source))])
            assert is_nobody_listening(status)
        await heard(ecu1, "ecu1", hub)
        await heard(hub, "vehicle1", ecu1)


async def test_a_device_without_a_policy_does_nothing(gateway: tuple[ZenohTransport, list[str]]) -> None:
    hub, at = gateway
    sink = Sink(DEADLINE_S)
    await hub.register_listener(topic("ecu2"), sink)
    async with (
        end("ecu1", mode="client", connect=at, user="ecu1", password="secret") as ecu1,
        end("ecu2", mode="client", connect=at, user="ecu2", password="secret") as ecu2,
    ):
        await ecu2.send_batch([publish(source=topic("ecu2"))])
        await heard(ecu1, "ecu1", hub)
    assert not sink.messages


def certificate(folder: Path, name: str, ca: bool = False) -> None:
    """As docs/mqtt5.md shows: a CA of our own, and one certificate of it for each."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key")
    if ca:
        openssl("req", "-x509", *key, "-days", "2", "-out", f"{name}.pem")
        return
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    openssl("req", *key, "-out", f"{name}.csr")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-days", "2", "-in", f"{name}.csr", *signed_by, "-out", f"{name}.pem")


async def test_vehicle_and_cloud_know_each_other_by_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the examples name files beside them
    certificate(tmp_path, "ca", ca=True)
    certificate(tmp_path, "cloud")
    certificate(tmp_path, "vehicle1")
    at = [f"tls/localhost:{free_port()}"]
    known = {"id": "it", "cert_common_names": ["vehicle1"]}
    rule = {
        "id": "all",
        "permission": "allow",
        "messages": ["put", "declare_subscriber"],
        "key_exprs": ["**"],
        "flows": ["ingress", "egress"],
    }
    policies = {"subjects": [known], "rules": [rule], "policies": [{"subjects": ["it"], "rules": ["all"]}]}
    control = {"access_control": {"enabled": True, "default_permission": "deny"} | policies}
    vehicle = settings_of(BLOCKS[3]) | {"connect": at}
    async with end("cloud", **(settings_of(BLOCKS[2]) | {"listen": at, "settings": control})) as cloud:
        async with end("vehicle1", **vehicle) as vehicle1:
            await heard(vehicle1, "vehicle1", cloud)
        stranger = end("vehicle2", **(vehicle | {"tls": {"root_ca": "ca.pem"}, "connect_timeout_ms": 1_000}))
        with pytest.raises(UStatusError):
            await stranger.open()
        await stranger.close()


async def test_no_daemon_of_zenoh_s_is_there_that_could_come_back_while_the_interpreter_ends() -> None:
    """It would unwind through Rust, which aborts the process: an exit code of -6 now and then."""
    before = set(threading.enumerate())
    async with end("a", mode="peer", listen=[f"tcp/127.0.0.1:{free_port()}"]) as transport:
        await transport.register_listener(topic("b"), Sink(DEADLINE_S))
        daemons = {thread.name for thread in set(threading.enumerate()) - before if thread.daemon}
        assert daemons == {"zenoh-send-a"}, "but for that one, which waits in Python's own queue"


def test_zenoh_itself_takes_messages_of_so_much() -> None:
    assert zenoh.Config().get_json("transport/link/rx/max_message_size") == str(1 << 30)
