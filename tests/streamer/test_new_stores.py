"""A data_dir that is new: a note at a first start, and a condition where others knew an earlier one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from streamer.building import neighbours_of
from streamer.config import loads
from streamer.operating import new_stores
from streamer.parts.readiness import Readiness
from streamer.reporting import STREAMER
from tests.streamer.conftest import MakeWorld, World
from tests.streamer.test_reloading import changed, reload, with_endpoint
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import StoreSaid
from uprotocol.message import UMessageBuilder
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uri_pb2 import UUri
from usubscription.service import USubscriptionService
from usubscription_client import Status, USubscriptionClient

pytestmark = pytest.mark.new_store

NEW = "the durable log and the subscriptions are new since"
OURS = uris.parse("//vehicle1/8001/1/8001")
THEIRS = uris.parse("//cloud/8001/1/8001")
ACKNOWLEDGE = "'up-streamer history acknowledge'"


def new(world: World) -> list[str]:
    return [note for note in world.parts.notes() if " new since " in note]


def texts(world: World, endpoint: str = STREAMER) -> list[str]:
    return [one.text for one in world.parts.conditions() if one.endpoint == endpoint]


async def emptied(world: World) -> None:
    """Restart the streamer without what it had stored."""
    await world.stop()
    shutil.rmtree(world.config.streamer.data_dir)
    await world.start()


async def confirmed(world: World, client: USubscriptionClient, topic: UUri) -> None:
    """Subscribe, and wait until the topic's own service has confirmed."""
    statuses: list[Status] = []
    client.on_change(lambda change: statuses.append(change.status))
    statuses.append(await client.subscribe(topic))
    await world.until(lambda: Status.SUBSCRIBED in statuses)


async def partner(world: World, tmp_path: Path) -> USubscriptionService:
    """The uSubscription of `cloud`, on its network."""
    node = LocalTransport.on(world.networks["cloud"], LocalUriProvider("cloud", 0, 4))
    await world.stack.enter_async_context(node)
    service = USubscriptionService(node, "cloud", tmp_path / "cloud.db", audit_ms=3_600_000)
    await service.start()
    world.stack.push_async_callback(service.stop)
    return service


async def test_a_first_start_is_a_note_for_a_while(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await make_world()
    (note,) = new(world)
    assert note.startswith(NEW)
    assert world.parts.problems() == []
    with monkeypatch.context() as patch:
        patch.setattr(new_stores, "NEW_NOTE_MS", 0)
        assert new(world) == []
    await world.restart()
    (note,) = new(world)  # other services may still have to be told of the subscriptions, the log is known
    assert note.startswith("the subscriptions are new since")
    assert world.parts.problems() == []


def test_asked_are_the_authorities_that_are_named_and_not_ours() -> None:
    config = loads(
        '[streamer]\nauthority = "vehicle1"\ndata_dir = "d"\n'
        '[[endpoint]]\nname = "a"\ntransport = "local"\nauthorities = ["vehicle1", "ecu1", "*.vehicle1"]\n'
        '[[endpoint]]\nname = "b"\ntransport = "local"\nauthorities = ["backend", "*"]\n'
    )
    assert neighbours_of(config) == ["ecu1", "backend"]


async def test_a_partner_that_knew_earlier_subscriptions_is_notified_and_reported(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application in the vehicle had subscribed to a topic of the cloud, whose uSubscription to one of the
    vehicle."""
    monkeypatch.setattr(new_stores, "REPORT_S", 0.0)  # the partner answers once in each version
    world = await make_world({"vehicle": "", "cloud": "none"})
    await partner(world, tmp_path)
    app = await world.node("cloud", "cloud")
    async with USubscriptionClient(app, LocalUriProvider("cloud", 0x8001, 1)) as client:
        await confirmed(world, client, OURS)
        node = await world.node("vehicle", "vehicle1")
        async with USubscriptionClient(node, LocalUriProvider("vehicle1", 0x8001, 1)) as other:
            await confirmed(world, other, THEIRS)
        await emptied(world)
        await world.until(lambda: len(world.assembly.interest.wants(OURS)) == 1)
        await world.until(lambda: any("are renewed (1)" in one for one in texts(world)))
        (text,) = texts(world)
        assert "the uSubscription of cloud knew others" in text
        assert "lost ones that are known there: 1" in text
        assert ACKNOWLEDGE in text
        assert world.parts.of(Readiness).look()["status"] == "degraded"
        await world.restart()  # it is reported once, and stays until somebody acknowledges it
        assert texts(world) == [text]
        world.assembly.logs.durable.losses.acknowledge()
        assert texts(world) == []


async def test_of_an_older_copy_only_subscriptions_of_ours_are_reported(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others renew their own, and a restoration is reported as such."""
    world = await make_world()
    usubscription = world.assembly.usubscription
    assert usubscription is not None
    monkeypatch.setattr(usubscription.store.database, "is_copy", True)
    auditor = usubscription.remote.auditor
    said = StoreSaid(b"1" * 16, former=b"2" * 16, links=2)
    auditor._compare_stores(("cloud", 4), said, 0)
    await world.assembly.new_stores.close()
    assert texts(world) == []
    auditor._compare_stores(("cloud", 4), said, 1)
    await world.assembly.new_stores.close()
    (text,) = texts(world)
    assert "are those of an older copy" in text
    assert "lost ones that are known there: 1" in text


async def test_a_message_from_an_authority_that_only_a_pattern_names_is_enough(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    toml = (
        '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
        'settings = {{ network = "{n}-vehicle" }}\n'
        '[[endpoint]]\nname = "cloud"\ntransport = "local"\nauthorities = ["*"]\n'
        'settings = {{ network = "{n}-cloud" }}\n'
    )
    world = await make_world(toml)
    cloud = await partner(world, tmp_path)
    app = await world.node("cloud", "cloud")
    async with USubscriptionClient(app, LocalUriProvider("cloud", 0x8001, 1)) as client:
        await confirmed(world, client, OURS)
        await emptied(world)
        note = UMessageBuilder.notification(THEIRS, uris.parse("//vehicle1/8001/1/0")).build()
        await app.send(note)
        await world.until(lambda: len(world.assembly.interest.wants(OURS)) == 1)
        assert cloud.remote.auditor.renewals == 1


async def test_a_session_that_the_broker_resumes_belongs_to_an_earlier_log(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world()
    await world.restart()
    monkeypatch.setattr(LocalTransport, "resumed_session", True)
    for _ in range(2):
        world.assembly._connected(world.assembly.endpoints["cloud"])
    assert texts(world, "cloud") == []  # a restart
    await emptied(world)
    for _ in range(2):
        world.assembly._connected(world.assembly.endpoints["cloud"])
    (text,) = texts(world, "cloud")
    assert "the broker has resumed a session of ours" in text
    assert ACKNOWLEDGE in text


async def test_a_session_that_this_process_has_opened_is_its_own_also_after_a_reload(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload makes another transport, which resumes the session of the one before."""
    world = await make_world()
    world.assembly._connected(world.assembly.endpoints["cloud"])
    monkeypatch.setattr(LocalTransport, "resumed_session", True)
    before = world.assembly.endpoints["cloud"].transport
    new = with_endpoint(world.config, "cloud", settings={"network": f"reloaded-{world.number}"})
    assert await reload(world, new)
    assert world.assembly.endpoints["cloud"].transport is not before
    world.assembly._connected(world.assembly.endpoints["cloud"])
    renamed = [one.model_dump(exclude_unset=True) for one in new.endpoint]
    for one in renamed:
        one["name"] = one["name"].replace("cloud", "clouds")
    assert await reload(world, changed(world.config, endpoint=renamed))
    world.assembly._connected(world.assembly.endpoints["clouds"])
    assert [*texts(world, "cloud"), *texts(world, "clouds")] == []


async def test_a_follower_that_has_records_of_another_log_is_reported(make_world: MakeWorld) -> None:
    world = await make_world(
        '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
        'settings = {{ network = "{n}-vehicle" }}\n'
        '[[endpoint]]\nname = "cloud"\ntransport = "local"\nauthorities = ["cloud"]\n'
        'usubscription = "none"\nfollowed_by = "//cloud/4/1/0"\nsettings = {{ network = "{n}-cloud" }}\n'
    )
    follower, stranger = uris.parse("//cloud/4/1/0"), uris.parse("//cloud/8001/1/0")

    def acknowledge(caller: Any, positions: dict[bytes, int]) -> None:
        world.assembly.handovers.acknowledged(caller, positions)

    ours = {one.incarnation: 5 for one in world.assembly.logs}
    acknowledge(follower, ours)
    acknowledge(follower, {b"o" * 16: 0})  # it has read nothing of it
    acknowledge(stranger, {b"o" * 16: 7})  # anybody may make that up
    assert texts(world, "cloud") == []
    acknowledge(follower, {b"o" * 16: 7})
    (text,) = texts(world, "cloud")
    assert "//cloud/4/1/0 has followed another one" in text
    world.assembly.logs.durable.losses.acknowledge()
    await world.restart()
    acknowledge(follower, {b"v" * 16: 7})  # of a log in memory, which each restart empties
    assert texts(world, "cloud") == []


async def test_what_other_services_had_lost_is_a_note(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"})
    cloud = await partner(world, tmp_path)
    node = await world.node("vehicle", "vehicle1")
    async with USubscriptionClient(node, LocalUriProvider("vehicle1", 0x8001, 1)) as client:
        await confirmed(world, client, THEIRS)
        await cloud.stop()
        for path in tmp_path.glob("cloud.db*"):
            path.unlink()
        fresh = USubscriptionService(
            cloud.remote._services._transport._inner,  # type: ignore[attr-defined]
            "cloud",
            tmp_path / "cloud.db",
            neighbours=["vehicle1"],
        )
        await fresh.start()
        world.stack.push_async_callback(fresh.stop)
        await world.until(lambda: [one for one in world.parts.notes() if "of cloud had lost 1 of our" in one])
        assert world.parts.problems() == []
        samples = {name: value for name, labels, value in world.parts.samples() if not labels}
        assert samples["usubscription_renewed"] == 1
