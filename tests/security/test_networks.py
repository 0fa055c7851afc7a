"""The configurations of docs/security.md on real networks: a raw client tries what they forbid, and honest clients
continue.

service of vehicle1 or backend on a network with (and without) its access rules <- Subscribe of an honest uEntity
                                                                              <- Reset by a client that claims to be
                                                                              entity 0
"""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.security import page
from tests.tiers import dds_domain
from transports.dds import DdsTransport
from transports.dds.config import DdsConfig
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.service import MayReset, USubscriptionService

ROOT = Path(__file__).resolve().parents[2]
CALL_MS = 60_000  # for a call that is answered; only a failure waits so long
SILENCE_MS = 1_500  # for a call that is not answered
SUBSCRIBE, RESET = 1, 6


async def call(
    transport: UTransport, source: LocalUriProvider, at: str, method: int, request: Any = None, ttl_ms: int = CALL_MS
) -> UCode.ValueType:
    """Returns the answer to a request of version 4, or that it was refused or not answered."""
    try:
        async with InMemoryRpcClient(transport, source) as rpc:
            payload = UPayload.pack(request) if request is not None else None
            await rpc.invoke_method(uris.uri(at, 0, 4, method), payload, CallOptions(timeout_ms=ttl_ms))
    except UStatusError as error:
        return error.code
    return UCode.OK


def subscribing(at: str, number: int = 0) -> v4.SubscribeRequest:
    return v4.SubscribeRequest(topic=uris.uri(at, 0x20, 1, 0x8001 + number))


@contextlib.asynccontextmanager
async def serving(
    transport: UTransport, authority: str, folder: Path, reset: MayReset = "linked"
) -> AsyncIterator[USubscriptionService]:
    service = USubscriptionService(transport, authority, folder / "store.db", reset=reset)
    async with transport:
        await service.start()
        try:
            yield service
        finally:
            await service.stop()


async def subscribers(service: USubscriptionService) -> list[str]:
    return sorted(row.subscriber[0] for row in await service.subscriptions())


# -- MQTT
# ----------------------------------------------------------------------------------------------------------------------


def mqtt(broker: Any, authority: str, entity: int, user: str, mode: str) -> Mqtt5Transport:
    settings = {
        "port": broker.port,
        "mode": mode,
        "username": user,
        "password": user,
        "client_id": f"{user}-{uuid.uuid4().hex}",
    }
    return Mqtt5Transport(Mqtt5Config.model_validate(settings), LocalUriProvider(authority, entity, 1))


async def mqtt_call(
    broker: Any, user: str, source: LocalUriProvider, at: str, method: int, mode: str, request: Any = None
) -> UCode.ValueType:
    """Calls through a new connection each time, because mosquitto 2.0.11 closes it after a refusal."""
    async with mqtt(broker, source.get_authority(), 0x9001, user, mode) as transport:
        return await call(transport, source, at, method, request, SILENCE_MS if method == RESET else CALL_MS)


@pytest.mark.broker
@pytest.mark.parametrize("guarded", [True, False])
async def test_mqtt_in_vehicle_only_the_gateway_is_entity_0(make_broker: Any, tmp_path: Path, guarded: bool) -> None:
    acl = (ROOT / "deploy/mosquitto/acl-in-vehicle").read_text() if guarded else None
    broker = make_broker(users={name: name for name in ("gateway", "10AB", "9001")}, acl=acl)
    mode = "in-vehicle"
    async with serving(mqtt(broker, "vehicle1", 0, "gateway", mode), "vehicle1", tmp_path, "all") as service:
        honest = LocalUriProvider("vehicle1", 0x10AB, 1)
        assert await mqtt_call(broker, "10AB", honest, "vehicle1", SUBSCRIBE, mode, subscribing("vehicle1")) == UCode.OK
        for forged in (
            LocalUriProvider("vehicle1", 0, 3),
            LocalUriProvider("cloud", 0, 3),
            LocalUriProvider("vehicle1", 0x10000, 3),
        ):
            answer = await mqtt_call(broker, "9001", forged, "vehicle1", RESET, mode)
            assert (answer == UCode.OK) is not guarded, f"{forged}: {UCode.Name(answer)}"
        assert await subscribers(service) == (["vehicle1"] if guarded else [])
        assert service.requests["reset_v4"] == (0 if guarded else 3), "what the broker forbids does not even arrive"
        as_another = await mqtt_call(
            broker, "9001", honest, "vehicle1", 2, mode, v4.UnsubscribeRequest(topic=subscribing("vehicle1").topic)
        )
        assert (as_another == UCode.OK) is not guarded


@pytest.mark.broker
async def test_mqtt_off_vehicle_a_vehicle_resets_what_is_its_own(make_broker: Any, tmp_path: Path) -> None:
    acl = (ROOT / "deploy/mosquitto/acl").read_text()
    broker = make_broker(users={name: name for name in ("backend", "vehicle1", "vehicle2")}, acl=acl)
    mode = "off-vehicle"
    async with serving(mqtt(broker, "backend", 0, "backend", mode), "backend", tmp_path) as service:
        for name in ("vehicle1", "vehicle2"):
            source = LocalUriProvider(name, 0, 4)
            assert await mqtt_call(broker, name, source, "backend", SUBSCRIBE, mode, subscribing("backend")) == UCode.OK
        for forged in ("vehicle1", "backend"):
            assert (
                await mqtt_call(broker, "vehicle2", LocalUriProvider(forged, 0, 4), "backend", RESET, mode) != UCode.OK
            )
        assert await subscribers(service) == ["vehicle1", "vehicle2"]
        assert (
            await mqtt_call(broker, "vehicle2", LocalUriProvider("vehicle2", 0, 4), "backend", RESET, mode) == UCode.OK
        )
        assert await subscribers(service) == ["vehicle1"]


@pytest.mark.broker
@pytest.mark.parametrize("reset", ["linked", "off"])
async def test_mqtt_without_an_acl_a_forged_reset_ends_what_it_claims_or_nothing(
    make_broker: Any, tmp_path: Path, reset: MayReset
) -> None:
    broker, mode = make_broker(), "in-vehicle"
    async with serving(mqtt(broker, "cloud", 0, "it", mode), "cloud", tmp_path, reset) as service:
        for number, name in enumerate(["cloud"] * 18 + ["vehicle1", "vehicle2"]):
            source = LocalUriProvider(name, 0x10AB if name == "cloud" else 0, 4)
            assert (
                await mqtt_call(broker, "it", source, "cloud", SUBSCRIBE, mode, subscribing("cloud", number))
                == UCode.OK
            )
        denied, taken = UCode.PERMISSION_DENIED, UCode.OK if reset == "linked" else UCode.PERMISSION_DENIED
        for forged, expected in (("cloud", denied), ("nobody", denied), ("vehicle1", taken)):
            assert await mqtt_call(broker, "it", LocalUriProvider(forged, 0, 3), "cloud", RESET, mode) == expected
        assert await subscribers(service) == ["cloud"] * 18 + ["vehicle1"] * (reset == "off") + ["vehicle2"]
        assert service.refused["reset"] == (2 if reset == "linked" else 3)


# -- Zenoh
# ----------------------------------------------------------------------------------------------------------------------


def certificates(folder: Path, *names: str) -> None:
    """Creates a CA, and one of its certificates for each name."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def key(name: str) -> list[str]:
        return ["-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key"]

    openssl("req", "-x509", *key("ca"), "-days", "2", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for name in names:
        openssl("req", *key(name), "-out", f"{name}.csr")
        signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-days", "2", "-in", f"{name}.csr", *signed_by, "-out", f"{name}.pem")


def zenoh_client(at: str, name: str, entity: int) -> ZenohTransport:
    tls = {"root_ca": "ca.pem", "certificate": f"{name}.pem", "private_key": f"{name}.key"}
    settings = {"mode": "client", "connect": [at], "tls": tls, "connect_timeout_ms": 20_000}
    return ZenohTransport(ZenohConfig.model_validate(settings), LocalUriProvider("vehicle1", entity, 1))


@pytest.mark.parametrize("guarded", [True, False])
async def test_zenoh_a_certificate_speaks_for_its_own_entity_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # the example uses relative file names
    certificates(tmp_path, "gateway", "10AB", "9001")
    settings = page.settings(page.deployed("programs"))
    at = f"tls/localhost:{free_port()}"
    settings |= {"listen": [at]}
    if not guarded:
        del settings["settings"]
    gateway = ZenohTransport(ZenohConfig.model_validate(settings), LocalUriProvider("vehicle1", 0, 4))
    async with (
        serving(gateway, "vehicle1", tmp_path, "all") as service,
        zenoh_client(at, "10AB", 0x10AB) as app,
        zenoh_client(at, "9001", 0x9001) as thief,
    ):
        assert await answered(app, LocalUriProvider("vehicle1", 0x10AB, 1), SUBSCRIBE, subscribing("vehicle1"))
        forged = await call(thief, LocalUriProvider("vehicle1", 0, 3), "vehicle1", RESET, ttl_ms=SILENCE_MS)
        assert (forged == UCode.OK) is not guarded
        assert await answered(thief, LocalUriProvider("vehicle1", 0x9001, 1), SUBSCRIBE, subscribing("vehicle1", 1)), (
            "as itself"
        )
        assert len(await service.subscriptions()) == (2 if guarded else 1)
        assert service.requests["reset_v4"] == (0 if guarded else 1), "what was forged before has not arrived"


async def answered(transport: UTransport, source: LocalUriProvider, method: int, request: Any) -> bool:
    """Repeats a request until it is answered: others learn of a new listener with a delay."""
    for _ in range(20):
        if await call(transport, source, "vehicle1", method, request, SILENCE_MS) == UCode.OK:
            return True
    return False


# -- DDS
# ----------------------------------------------------------------------------------------------------------------------


def dds(authority: str, **more: Any) -> DdsTransport:
    settings = page.settings(*page.blocks("## DDS"))
    return DdsTransport(DdsConfig.model_validate(settings | more), LocalUriProvider(authority, 0x10AB, 1))


async def test_dds_keeps_nobody_out_who_reaches_the_domain_so_reset_is_off_there(tmp_path: Path) -> None:
    tag = uuid.uuid4().hex  # used by this test only
    async with (
        serving(dds("vehicle1", tag=tag), "vehicle1", tmp_path, "off") as service,
        dds("vehicle1", tag=tag) as attacker,
        dds("vehicle1", tag=tag, domain_id=dds_domain()) as elsewhere,
    ):
        linked = LocalUriProvider("cloud", 0, 4)
        assert await answered(attacker, linked, SUBSCRIBE, subscribing("vehicle1"))
        for forged in ("vehicle1", "cloud"):
            assert await call(attacker, LocalUriProvider(forged, 0, 3), "vehicle1", RESET) == UCode.PERMISSION_DENIED
        assert await subscribers(service) == ["cloud"]
        unheard = await call(elsewhere, linked, "vehicle1", SUBSCRIBE, subscribing("vehicle1", 1), SILENCE_MS)
        assert unheard != UCode.OK
        assert service.requests["subscribe_v4"] >= 1
        assert len(await service.subscriptions()) == 1, "another domain is another network"


async def test_dds_security_is_not_in_the_wheel() -> None:
    """Checks a limit that docs/security.md names. If this fails, the page can describe something better."""
    xml = "<CycloneDDS><Domain><Security><Authentication/></Security></Domain></CycloneDDS>"
    transport = DdsTransport(DdsConfig(domain_id=dds_domain(), cyclone_xml=xml), LocalUriProvider("vehicle1", 1, 1))
    with pytest.raises(UStatusError) as error:
        await transport.open()
    assert "Security: unknown element" in error.value.message
    await transport.close()
