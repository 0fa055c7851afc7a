"""The broker configurations that we ship, with a real mosquitto, and what the docs say about them."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

ROOT = Path(__file__).parents[2]
BYTES_PER_MESSAGE = 1_200  # of mosquitto 2.0.11's memory, beside the payload
DEADLINE_S = 20
TOPIC = uris.parse("up://vehicle1/8001/1/8001")
HERE = (
    "listener",
    "cafile",
    "certfile",
    "keyfile",
    "require_certificate",
    "use_identity_as_username",
    "allow_anonymous",
    "acl_file",
)


def lines(path: str) -> list[str]:
    """Settings, but for those that belong to the place where it runs."""
    found = [line.strip() for line in (ROOT / path).read_text().splitlines()]
    return [line for line in found if line and not line.startswith(("#", "persistence_location", "user ", *HERE))]


def setting(path: str, name: str) -> int:
    return int(next(line.split()[1] for line in lines(path) if line.startswith(f"{name} ")))


def end(broker: Broker, name: str) -> Mqtt5Transport:
    settings = {
        "port": broker.port,
        "mode": "off-vehicle",
        "username": name,
        "password": name,
        "client_id": f"{name}-gateway",
    }
    return Mqtt5Transport(Mqtt5Config.model_validate(settings), LocalUriProvider(name, 4, 1))


class Heard:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)


@pytest.mark.broker
async def test_the_broker_for_a_fleet(make_broker: Callable[..., Broker]) -> None:
    """No vehicle can send as another one, and only the gateway in the cloud may read the count of dropped messages."""
    settings = [*lines("deploy/mosquitto/mosquitto.conf"), "sys_interval 1"]
    acl = (ROOT / "deploy/mosquitto/acl").read_text()
    broker = make_broker(
        users={name: name for name in ("vehicle1", "vehicle2", "backend")}, acl=acl, persistent=True, settings=settings
    )
    heard = Heard()
    async with end(broker, "backend") as backend, end(broker, "vehicle1") as vehicle, end(broker, "vehicle2") as thief:
        await backend.register_listener(uris.ANY, heard, uris.pattern("backend"))
        message = UMessageBuilder.publish(TOPIC).build()
        message.attributes.sink.CopyFrom(uris.parse("//backend/FFFFFFFF/FF/FFFF"))
        await vehicle.send(message)
        assert (await asyncio.wait_for(heard.messages.get(), DEADLINE_S)).attributes.id == message.attributes.id
        with pytest.raises(UStatusError) as refused:
            await thief.send(message)
        assert refused.value.code == UCode.PERMISSION_DENIED
        for one in (backend, vehicle):
            await asyncio.wait_for(asyncio.gather(*one._tasks), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while backend._losses._dropped.last is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert vehicle._losses._dropped.last is None


@pytest.mark.broker
def test_the_broker_of_the_example(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(settings=lines("examples/vehicle-cloud/mosquitto.conf"))
    assert broker.running
    assert "Error" not in broker.log


def test_the_docs_say_how_long_the_broker_bears_an_outage() -> None:
    config = "deploy/mosquitto/mosquitto.conf"
    messages, payload_bytes = setting(config, "max_queued_messages"), setting(config, "max_queued_bytes")
    docs = (ROOT / "docs/mqtt5.md").read_text()
    rates = (100, 1_000, 7_500, 30_000)
    rows = re.findall(
        r"^\| ([\d,]+) bytes \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) GB "
        r"\|$",
        docs,
        re.MULTILINE,
    )
    assert len(rows) == 5
    for row in rows:
        size, *seconds = (int(cell.replace(",", "")) for cell in row[:5])
        kept = min(messages, payload_bytes // size)
        assert seconds == [kept // rate for rate in rates], size
        assert float(row[5]) == round(kept * (BYTES_PER_MESSAGE + size) / 1e9, 1), size
    most = messages * BYTES_PER_MESSAGE + payload_bytes
    assert f"{messages:,} messages and 1 GiB, {most / 1e9:.1f} GB" in docs
    assert f"here {most / 1e9:.1f} GB" in (ROOT / config).read_text()
    assert f"max_queued_messages {messages} " in docs
    assert "bears 266 s of 7,500 messages/s" in (ROOT / "deploy/README.md").read_text().replace("\n  ", " ")


@pytest.mark.broker
async def test_the_access_rules_for_names_with_the_vehicle_behind_them(make_broker: Callable[..., Broker]) -> None:
    """The script of docs/names.md."""
    (script,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/names.md").read_text(), re.DOTALL)
    made = await asyncio.to_thread(
        subprocess.run, ["sh", "-c", script.replace("> vehicles.acl", "")], capture_output=True, text=True, check=True
    )
    acl = f"{made.stdout}user backend\ntopic read +/backend\ntopic write backend/+\n"
    broker = make_broker(users={name: name for name in ("vin1", "vin2", "backend")}, acl=acl)
    heard, hears = Heard(), Heard()
    async with end(broker, "backend") as backend:
        await backend.register_listener(uris.ANY, heard, uris.pattern("backend"))
        for source, code in (
            ("ecu1.vin2", UCode.PERMISSION_DENIED),
            ("vin1", UCode.PERMISSION_DENIED),
            ("mcu1.vin1", UCode.OK),
        ):
            message = UMessageBuilder.publish(uris.parse(f"//{source}/8001/1/8001")).build()
            message.attributes.sink.CopyFrom(uris.pattern("backend"))
            # anew: mosquitto 2.0.11 hangs up on whom it has refused something
            async with end(broker, "vin1") as vehicle:
                (status,) = await vehicle.send_batch([message])
            assert status.code == code, source
        assert (
            await asyncio.wait_for(heard.messages.get(), DEADLINE_S)
        ).attributes.source.authority_name == "mcu1.vin1"
        async with end(broker, "vin1") as vehicle:
            for name in ("ecu1.vin2", "ecu1.vin1"):
                await vehicle.register_listener(uris.ANY, hears, uris.pattern(name))
            for name in ("ecu1.vin2", "ecu1.vin1"):
                await backend.send(
                    UMessageBuilder.notification(
                        uris.parse("//backend/1/1/8001"), uris.parse(f"//{name}/1/1/0")
                    ).build()
                )
            assert (
                await asyncio.wait_for(hears.messages.get(), DEADLINE_S)
            ).attributes.sink.authority_name == "ecu1.vin1"
