"""Two services in two processes on a real network: local, remote both ways, killed in each pending state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from transports.plugin import create
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription import __main__ as process_module
from usubscription_client import Status, Subscription, USubscriptionClient

WAIT_S = 60


def topic(authority: str, number: int = 1) -> UUri:
    return uris.uri(authority, 0x20, 1, 0x8000 + number)


class Process:
    """`python -m usubscription` for one authority."""

    def __init__(self, authority: str, store: Path, transport: str, settings: dict[str, Any]) -> None:
        self._config = store.with_suffix(".toml")
        lines = [
            f"authority = {authority!r}",
            f"store = {str(store)!r}",
            f"transport = {transport!r}",
            "audit_ms = 500",
            "remote_timeout_ms = 2000",
        ]
        lines += ["[settings]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
        self._config.write_text("\n".join(lines))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "usubscription", "--config", str(self._config)), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WAIT_S)
        assert json.loads(line)["ready"] is True

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await asyncio.wait_for(self._process.wait(), WAIT_S)

    async def kill(self) -> None:
        """kill -9: nothing is flushed or sent."""
        await self.end(signal.SIGKILL)


class Networks:
    """One real network with the services of authorities a and b, and clients of both."""

    def __init__(self, path: Path, transport: str, settings: Callable[[str], dict[str, Any]]) -> None:
        self._transport, self._settings = transport, settings
        self.services = {name: Process(name, path / f"{name}.db", transport, settings(name)) for name in "ab"}
        self._closing: list[Any] = []

    async def client(
        self, authority: str, version: int, ue_id: int = 0x10
    ) -> tuple[USubscriptionClient, asyncio.Queue[Subscription]]:
        local = LocalUriProvider(authority, ue_id, 1)
        transport = create(self._transport, self._settings(f"client-{authority}-{version}-{ue_id}"), local)
        await transport.open()
        client = USubscriptionClient(transport, local, version=version)
        await client.open()
        status_changes: asyncio.Queue[Subscription] = asyncio.Queue()
        client.on_change(status_changes.put_nowait)
        self._closing += [transport.close, client.close]
        return client, status_changes

    async def close(self) -> None:
        for close in reversed(self._closing):
            await close()
        for service in self.services.values():
            assert await service.end(signal.SIGTERM) in (0, -signal.SIGKILL)


@pytest.fixture
async def zenoh(tmp_path: Path) -> AsyncIterator[Networks]:
    pytest.importorskip("zenoh")
    router = f"tcp/127.0.0.1:{free_port()}"
    hub = create("zenoh", {"mode": "router", "listen": [router]}, LocalUriProvider("hub", 1, 1))
    async with hub:
        made = Networks(tmp_path, "zenoh", lambda name: {"mode": "client", "connect": [router]})
        yield made
        await made.close()


@pytest.fixture
async def mqtt(tmp_path: Path, broker: Any) -> AsyncIterator[Networks]:
    made = Networks(tmp_path, "mqtt5", lambda name: {"port": broker.port, "mode": "in-vehicle"})
    yield made
    await made.close()


async def until(status_changes: asyncio.Queue[Subscription], status: Status, at: UUri) -> Subscription:
    async with asyncio.timeout(WAIT_S):
        while True:
            change = await status_changes.get()
            if (change.status, change.topic) == (status, at):
                return change


async def flows(networks: Networks) -> None:
    """Local, and remote both ways, in both versions."""
    for service in networks.services.values():
        await service.start()
    for near, far in (("a", "b"), ("b", "a")):
        for version in (3, 4):
            client, status_changes = await networks.client(near, version)
            there, _ = await networks.client(far, version, 0x11)
            assert await client.subscribe(topic(near)) is Status.SUBSCRIBED
            await until(status_changes, Status.SUBSCRIBED, topic(near))
            assert await client.subscribe(topic(far)) is Status.SUBSCRIBE_PENDING
            await until(status_changes, Status.SUBSCRIBED, topic(far))
            assert [one.subscriber.authority_name for one in await there.fetch_subscriptions(topic=topic(far))] == [
                near
            ]
            await client.unsubscribe(topic(far))
            await client.unsubscribe(topic(near))
            async with asyncio.timeout(WAIT_S):
                while await there.fetch_subscribers(topic(far)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_flows_between_two_processes_on_zenoh(zenoh: Networks) -> None:
    await flows(zenoh)


@pytest.mark.slow
@pytest.mark.broker
async def test_flows_between_two_processes_on_mqtt(mqtt: Networks) -> None:
    await flows(mqtt)


@pytest.mark.slow
async def the_last_one_wins(networks: Networks) -> None:
    """Subscribe, Unsubscribe, Subscribe without waiting, in versions that change from command to command."""
    for service in networks.services.values():
        await service.start()
    client, _ = await networks.client("a", 4)
    async with USubscriptionClient(client.transport, LocalUriProvider("a", 0x10, 1), version=3) as old:
        for one in (client, old):  # then each side has discovered each method
            await one.subscribe(topic("a", 0))
            await one.unsubscribe(topic("a", 0))
    source = uris.uri("a", 0x10, 1, 0)
    for start in range(20):
        requests = []
        for number in range(3):
            major, method = (3, 4)[(start + number) % 2], (1, 2, 1)[number]
            asked: Any = (
                v4.SubscribeRequest(topic=topic("a", start))
                if method == 1
                else v4.UnsubscribeRequest(topic=topic("a", start))
            )
            if major == 3:
                asked = (
                    v3.SubscriptionRequest(topic=topic("a", start))
                    if method == 1
                    else v3.UnsubscribeRequest(topic=topic("a", start))
                )
            requests.append(UMessageBuilder.request(source, uris.uri("a", 0, major, method), 60_000).pack(asked))
        assert {status.code for status in await client.transport.send_batch(requests)} == {UCode.OK}
    async with asyncio.timeout(WAIT_S):
        while (found := len(await client.fetch_subscriptions())) < 20:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.05)
    assert found == 20
    await asyncio.sleep(0.2)
    assert len(await client.fetch_subscriptions()) == 20


async def test_the_last_command_wins_on_zenoh(zenoh: Networks) -> None:
    await the_last_one_wins(zenoh)


@pytest.mark.broker
async def test_the_last_command_wins_on_mqtt(mqtt: Networks) -> None:
    await the_last_one_wins(mqtt)


async def test_killed_while_subscribe_pending_it_goes_on_after_the_restart(zenoh: Networks) -> None:
    a, b = zenoh.services["a"], zenoh.services["b"]
    await a.start()
    client, status_changes = await zenoh.client("a", 4)
    assert await client.subscribe(topic("b")) is Status.SUBSCRIBE_PENDING  # b does not run
    await a.kill()
    await b.start()
    await a.start()
    await until(status_changes, Status.SUBSCRIBED, topic("b"))
    there, _ = await zenoh.client("b", 4)
    (known,) = await there.fetch_subscriptions()
    assert (known.subscriber, known.status) == (uris.uri("a", 0, 4, 0), Status.SUBSCRIBED)


@pytest.mark.slow
async def test_killed_while_unsubscribe_pending_it_goes_on_after_the_restart(zenoh: Networks) -> None:
    a, b = zenoh.services["a"], zenoh.services["b"]
    await a.start()
    await b.start()
    client, status_changes = await zenoh.client("a", 4)
    await client.subscribe(topic("b"))
    await until(status_changes, Status.SUBSCRIBED, topic("b"))
    await b.kill()
    await client.unsubscribe(topic("b"))
    assert await client.fetch_subscriptions() == []
    await a.kill()
    await b.start()
    there, changes = await zenoh.client("b", 4)
    await there.register_for_notifications()
    assert len(await there.fetch_subscriptions()) == 1, "b survived its kill with what it knew"
    await a.start()
    await until(changes, Status.UNSUBSCRIBED, topic("b"))
    assert await there.fetch_subscriptions() == []


@pytest.mark.slow
async def test_killed_while_subscribed_both_know_it_still_and_what_one_lost_comes_back(
    zenoh: Networks, tmp_path: Path
) -> None:
    a, b = zenoh.services["a"], zenoh.services["b"]
    await a.start()
    await b.start()
    client, status_changes = await zenoh.client("a", 4)
    await client.subscribe(topic("b"), sample_period_ms=100, expires_ms=4_102_444_800_000)
    await until(status_changes, Status.SUBSCRIBED, topic("b"))
    before = await client.fetch_subscriptions()
    await a.kill()
    await b.kill()
    for left in tmp_path.glob("b.db*"):
        left.unlink()  # b forgets everything
    await b.start()
    await a.start()
    there, _ = await zenoh.client("b", 4)
    async with asyncio.timeout(WAIT_S):
        while not (found := await there.fetch_subscriptions()):  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.02)
    assert [one.sample_period_ms for one in found] == [100]
    await until(status_changes, Status.SUBSCRIBED, topic("b"))
    async with asyncio.timeout(WAIT_S):
        while await client.fetch_subscriptions() != before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# -- the process
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_stops_cleanly_on_signals(tmp_path: Path, number: signal.Signals) -> None:
    process = Process("a", tmp_path / "a.db", "local", {})
    await process.start()
    assert await process.end(number) == 0
    assert [file.name for file in tmp_path.glob("a.db-*")] == [], "the write-ahead log is folded in"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("authority = 'a'", "store: Field required"),
        ("authority = 'a'\nstore = 's.db'\ntransport = 'local'\nstoer = 1", "stoer: unknown key"),
        ("authority = 'A:1'\nstore = 's.db'\ntransport = 'local'", "lower-case"),
        ("authority =", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(content)
    assert process_module.main(["--config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_options_go_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text(
        "authority = 'a'\nstore = 's.db'\ntransport = 'local'\n[settings]\nnetwork = 'one'\nlisteners_max = 5"
    )
    config = process_module.parse(
        ["--config", str(file), "--authority", "b", "--setting", "network=two", "--setting", "listeners_max=7"]
    )
    assert (config.authority, config.settings) == ("b", {"network": "two", "listeners_max": 7})
    with pytest.raises(UStatusError) as error:
        process_module.parse(["--config", str(file), "--setting", "nonsense"])
    assert error.value.code == UCode.INVALID_ARGUMENT


def test_a_store_that_cannot_be_opened_ends_it_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as other:
        other.execute("CREATE TABLE t(x)")
    assert process_module.main(["--authority", "a", "--store", str(tmp_path / "s.db"), "--transport", "local"]) == 1
    assert "not a uSubscription store" in capsys.readouterr().err


async def test_a_damaged_store_does_not_end_it_and_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"")
    states: list[dict[str, Any]] = []
    config = process_module.parse(["--authority", "a", "--store", str(tmp_path / "s.db"), "--transport", "local"])
    stop = asyncio.Event()
    await process_module.serve(config, stop, lambda state: (states.append(state), stop.set())[0])
    (state,) = states
    assert state["ready"] is False
    assert "0 bytes" in state["trouble"]
    assert "backup" in state["trouble"]


async def test_a_new_store_is_a_note_until_others_know_it(tmp_path: Path) -> None:
    config = process_module.parse(["--authority", "a", "--store", str(tmp_path / "s.db"), "--transport", "local"])

    async def state() -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        stop = asyncio.Event()
        await process_module.serve(config, stop, lambda state: (states.append(state), stop.set())[0])
        return states[0]

    for _ in range(2):
        assert (await state())["note"].startswith("the subscriptions are new since 2")
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as db, db:
        db.execute("DELETE FROM meta WHERE key = 'untold'")  # as ten minutes do
    assert "note" not in await state()
