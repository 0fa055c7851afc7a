"""The alerts and the dashboard of deploy/, with Prometheus itself: each alert fires at a real fault of a real streamer,
and each expression of the dashboard has data."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.faults import Reserve
from streamer.egress import hold_state
from streamer.parts.certificates import CertificatePart
from streamer.parts.readiness import Readiness
from tests.certificates import TestAuthority
from tests.streamer.conftest import MakeWorld, World
from transports.certificates import CertificateFile
from transports.local import LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

Publish = Callable[..., UMessage]

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "up-streamer.json"
WAIT_S = 60
SPEED, DOOR, LAMP = (uris.parse(f"//vehicle1/1/1/800{number}") for number in (1, 2, 3))
THREE = {"vehicle": "", "cloud": "none", "mcu": "none"}
SUBSCRIBED = {uris.format(topic): ["//cloud/9001/1/0"] for topic in (SPEED, DOOR, LAMP)}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool: on Debian, apt-get install prometheus",
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# The rules alone


@needs_prometheus
def test_the_rules_are_valid_and_fire_when_they_are_to(tmp_path: Path) -> None:
    promtool("check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")
    promtool("check", "rules", ALERTS)
    text = (Path(__file__).parent / "alerts.test.yml").read_text()
    (tmp_path / "test.yml").write_text(text.replace("ALERTS]", f"{ALERTS}]"))
    promtool("test", "rules", tmp_path / "test.yml")
    assert not [name for name in names_of(ALERTS.read_text()) if name not in text], "each alert has a case"


def names_of(rules: str) -> list[str]:
    return re.findall(r"alert: (\w+)", rules)


def test_each_alert_is_in_the_page_and_asks_for_metrics_that_there_are() -> None:
    rules = ALERTS.read_text()
    page = (ROOT / "docs" / "operating.md").read_text().partition("## Alerts")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(UpStreamer\w+)`", page)) == set(names_of(rules))
    metrics = (ROOT / "docs" / "configuration.md").read_text()
    for name in re.findall(r"up_streamer_\w+", rules + DASHBOARD.read_text()):
        assert f"`{name.removesuffix('_bucket')}`" in metrics, name


# With Prometheus


class Prometheus:
    """A Prometheus that scrapes `target` and evaluates the alerts many times a second, without waiting for `for`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def _ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
            return json.loads(answer.read())["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        try:
            found = await asyncio.to_thread(self._ask, "query", query=expression)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it starts
                    return []
                raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return []  # it has not started
        return list(found["result"])

    async def until(self, expression: str) -> list[dict[str, Any]]:
        """Until the expression has data."""
        end = time.monotonic() + WAIT_S
        while not (found := await self.query(expression)):
            assert time.monotonic() < end, f"no data: {expression}"
            await asyncio.sleep(0.1)
        return found

    async def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in await self.query('ALERTS{alertstate="firing"}')}


@asynccontextmanager
async def scraping(folder: Path, target: int) -> AsyncIterator[Prometheus]:
    folder.mkdir()
    (folder / "alerts.yml").write_text(re.sub(r"\n +for: \w+", "", ALERTS.read_text()))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}\n"
        f"rule_files: [{folder}/alerts.yml]\n"
        f"scrape_configs: [{{job_name: up-streamer, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    async with process(command):
        yield Prometheus(port)


@asynccontextmanager
async def process(command: Sequence[str]) -> AsyncIterator[None]:
    """A process that is killed at the end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = await asyncio.create_subprocess_exec(*command, **quiet)
    try:
        yield
    finally:
        started.kill()
        await started.wait()


async def watched(make_world: MakeWorld) -> World:
    world = await make_world(THREE, SUBSCRIBED, start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    return world


def port_of(world: World) -> int:
    assert world.streamer.admin is not None
    return world.streamer.admin.port


@needs_prometheus
@pytest.mark.slow
async def test_each_alert_fires_at_a_real_fault_and_none_before(
    make_world: MakeWorld, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.05)
    world = await watched(make_world)
    streamer, cloud = world.streamer, world.assembly.endpoints["cloud"]
    vehicle, far = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(far, DOOR)
    await vehicle.send_batch([publish(DOOR, "1")])
    await heard.until(lambda: heard.messages, "the first")
    async with scraping(tmp_path / "prometheus", port_of(world)) as prometheus:
        await prometheus.until("count_over_time(up_streamer_ready[1m]) > 3")
        assert await prometheus.firing() == set()

        world.networks["cloud"].refuse(uris.format(SPEED))
        await vehicle.send(publish(SPEED, "refused"))
        await prometheus.until('ALERTS{alertname="UpStreamerHeldAddresses", endpoint="cloud", reason="refused"}')

        refuse_for_now(cloud.transport, LAMP, monkeypatch)
        await vehicle.send_batch([publish(LAMP, "stuck"), publish(DOOR, "2")])
        await prometheus.until('ALERTS{alertname="UpStreamerStuckStreams", endpoint="cloud"}')

        streamer.assembly.losses.network_lost(cloud, "the broker has not kept the session", 3)
        await prometheus.until('ALERTS{alertname="UpStreamerEndpointDegraded", endpoint="cloud"}')
        await prometheus.until('ALERTS{alertname="UpStreamerLogDamaged", log="durable"}')

        streamer.assembly.drops.add("cloud", "cloud", "over_quota")
        await prometheus.until('ALERTS{alertname="UpStreamerMessagesLost", log="durable"}')

        streamer.assembly.losses.records_lost(cloud, streamer.assembly.logs.durable, 0, 2, Gap.REASON_RETENTION)
        await prometheus.until('ALERTS{alertname="UpStreamerGaps"}')

        TestAuthority(tmp_path).issue("soon", ends_in=timedelta(days=2))
        streamer.parts.of(CertificatePart).add("cloud", [CertificateFile("tls.cert_file", tmp_path / "soon.pem")])
        await streamer.parts.of(CertificatePart).look()
        await prometheus.until('ALERTS{alertname="UpStreamerCertificateExpires", endpoint="cloud"}')

        streamer.assembly.logs.durable.cursors.set("egress:old", 0)  # as a removed endpoint leaves it
        streamer.assembly.claims.find_unclaimed()
        await prometheus.until('ALERTS{alertname="UpStreamerUnclaimedRecords", endpoint="old"}')

        monkeypatch.setattr(Reserve, "restore", lambda *_: False)
        assert streamer.assembly.runtime.disk.reserve.give_up()
        await prometheus.until('ALERTS{alertname="UpStreamerDiskShort"}')

        transport = streamer.assembly.endpoints["mcu"].transport
        assert isinstance(transport, LocalTransport)
        transport.disconnect()
        await prometheus.until('ALERTS{alertname="UpStreamerEndpointNotReady", endpoint="mcu"}')
        await prometheus.until('ALERTS{alertname="UpStreamerNotReady"}')

        to_mcu = uris.parse("//vehicle1/8001/1/0"), uris.parse("//mcu1/8002/1/1")
        await vehicle.send(UMessageBuilder.request(*to_mcu, 100).build())
        await prometheus.until('ALERTS{alertname="UpStreamerDeadLetters", code="DEADLINE_EXCEEDED"}')

        assert isinstance(cloud.transport, LocalTransport)
        world.networks["cloud"].hangs[cloud.transport] = "before"
        await vehicle.send(publish(DOOR, "3"))
        ahead_ms = streamer.assembly.runtime.now_ms() + 120_000
        monkeypatch.setattr(streamer.parts.of(Readiness).meters, "_now_ms", lambda: ahead_ms)
        await prometheus.until('ALERTS{alertname="UpStreamerLag", endpoint="cloud", log="durable"}')

        file = world.config.streamer.data_dir / "history.db"
        file.rename(file.with_suffix(".moved"))
        await prometheus.until('ALERTS{alertname="UpStreamerLogRefuses", log="durable"}')
        expected = {*names_of(ALERTS.read_text())} - {"UpStreamerUnreachable", "UpStreamerRestarts", "UpStreamerBusy"}
        assert expected <= await prometheus.firing()


def refuse_for_now(transport: Any, topic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network answers UNAVAILABLE to messages of one topic, and takes the others."""
    send, unavailable = transport.send_batch, UStatus(code=UCode.UNAVAILABLE, message="not now")

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        others = [one for one in messages if one.attributes.source != topic]
        taken = iter(await send(others) if others else ())
        return [unavailable if one.attributes.source == topic else next(taken) for one in messages]

    monkeypatch.setattr(transport, "send_batch", send_batch)


@needs_prometheus
@pytest.mark.slow
async def test_a_gateway_that_starts_again_and_again_or_not_at_all_is_reported(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "one.toml").write_text(
        f'[streamer]\ndata_dir = "{tmp_path}/data"\nadmin = "127.0.0.1:{port}"\n'
        '[[endpoint]]\nname = "v"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    )
    command = [sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(tmp_path / "one.toml")]
    async with scraping(tmp_path / "prometheus", port) as prometheus:
        for starts in range(1, 5):
            async with process(command):
                await prometheus.until(f"changes(process_start_time_seconds[15m]) == {starts - 1}")
        await prometheus.until('ALERTS{alertname="UpStreamerRestarts", job="up-streamer"}')
        await prometheus.until('ALERTS{alertname="UpStreamerUnreachable", job="up-streamer"}')


@needs_prometheus
@pytest.mark.slow
async def test_each_expression_of_the_dashboard_has_data(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    world = await watched(make_world)
    vehicle, far = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(far, DOOR)
    TestAuthority(tmp_path).issue("long")
    world.parts.of(CertificatePart).add("cloud", [CertificateFile("tls.cert_file", tmp_path / "long.pem")])
    await world.parts.of(CertificatePart).look()
    world.assembly.endpoints["vehicle"].dropped["duplicate"] += 1
    world.assembly.drops.add("vehicle", "vehicle1", "over_quota")
    async with scraping(tmp_path / "prometheus", port_of(world)) as prometheus:
        await prometheus.until("count_over_time(up_streamer_ready[1m]) > 3")
        await vehicle.send_batch([publish(DOOR, "1")])
        await heard.until(lambda: heard.messages, "it")
        await prometheus.until('up_streamer_forwarded_total{endpoint="cloud"} > 0')
        rules = world.assembly.rules
        rules.replace([rule for rule in rules if (rule.ingress, rule.egress) != ("vehicle", "cloud")])
        for panel in json.loads(DASHBOARD.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*")
                assert await prometheus.until(expression.replace("$instance", ".*")), panel["title"]
