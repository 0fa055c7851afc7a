"""Messages that the log refuses: none is lost, and none overtakes a failed one."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from history.file.store import Store
from history.log.log import Log
from streamer.walk import flow as flows
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

MakeWorld = Any
Publish = Callable[..., UMessage]

SPEED = uris.parse("//vehicle1/8001/1/8001")
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}


@contextmanager
def refusing(log: Log, monkeypatch: pytest.MonkeyPatch, error: UStatusError) -> Iterator[None]:
    """Every append fails meanwhile."""
    with monkeypatch.context() as patch:
        patch.setattr(type(log), "append", lambda self, streams, messages: failing(error))
        yield


def failing(error: UStatusError) -> asyncio.Future[int]:
    """An append that fails soon."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    loop.call_soon(future.set_exception, error)
    return future


@pytest.mark.spec("local~disp-order")
async def test_what_waits_behind_a_failure_fails_with_it(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full while one batch is written, and has room again for the next one: both come again, in order."""
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    writing, fail = threading.Event(), threading.Event()
    commit = Store.commit

    def full(self: Store, chunks: Any, *more: Any, **options: Any) -> Any:
        if chunks and not fail.is_set():
            writing.set()
            assert fail.wait(20)
            raise sqlite3.OperationalError("database or disk is full")
        return commit(self, chunks, *more, **options)

    monkeypatch.setattr(Store, "commit", full)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(10)])
    await asyncio.to_thread(writing.wait, 20)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(10, 20)])
    await world.until(lambda: world.assembly.home.received == 20)  # the second batch is behind the first one now
    fail.set()
    await heard.expect(20)
    assert heard.texts == [str(number) for number in range(20)]
    await world.until(lambda: not world.parts.problems())
    assert world.assembly.home.dropped["refused"] >= 20


@pytest.mark.spec("local~disp-order")
async def test_what_arrives_before_a_failed_batch_comes_again_waits_for_it(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    ingress, log = world.assembly.ingresses["vehicle"], world.assembly.logs.durable
    first, second = [publish(SPEED, "1"), publish(SPEED, "2")], [publish(SPEED, "3")]
    full = UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")
    with refusing(log, monkeypatch, full), pytest.raises(UStatusError, match="full"):
        await ingress.on_receive_batch(first)
    with pytest.raises(UStatusError, match="comes again"):  # the network has not heard of the failure yet
        await ingress.on_receive_batch(second)
    await ingress.on_receive_batch(first)
    await ingress.on_receive_batch(second)
    await heard.expect(3)
    assert heard.texts == ["1", "2", "3"]
    assert world.assembly.home.dropped["refused"] == 3


async def test_nothing_waits_for_ever_for_what_never_comes_again(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "REDELIVERY_S", 0.0)
    world = await make_world(subscriptions=SUBSCRIBED)
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    ingress, log = world.assembly.ingresses["vehicle"], world.assembly.logs.durable
    with refusing(log, monkeypatch, UStatusError(UCode.UNAVAILABLE, "I/O error")), pytest.raises(UStatusError):
        await ingress.on_receive_batch([publish(SPEED, "gone")])
    await ingress.on_receive_batch([publish(SPEED, "goes on")])
    await heard.expect(1)
    assert heard.texts == ["goes on"]


async def test_a_second_copy_is_safe_only_when_the_first_one_is(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches fail one after the other; both come again before the second failure is known."""
    monkeypatch.setattr(flows, "REDELIVERY_S", 0.0)
    world = await make_world(subscriptions=SUBSCRIBED)
    ingress, log = world.assembly.ingresses["vehicle"], world.assembly.logs.durable
    appends: list[asyncio.Future[int]] = []

    def pending(*_: Any) -> asyncio.Future[int]:
        appends.append(asyncio.get_running_loop().create_future())
        return appends[-1]

    monkeypatch.setattr(log, "append", pending)
    first, second = publish(SPEED, "1"), publish(SPEED, "2")
    taken = [asyncio.ensure_future(ingress.on_receive_batch([message])) for message in (first, second)]
    full = UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")
    appends[0].set_exception(full)
    with pytest.raises(UStatusError):
        await asyncio.wait_for(taken[0], 1)
    await asyncio.sleep(0)
    again = asyncio.ensure_future(ingress.on_receive_batch([first, second]))
    appends[2].set_result(1)
    await asyncio.sleep(0)
    assert not again.done()  # the copy of the second one is not taken while the first copy of it is not
    appends[1].set_exception(full)
    with pytest.raises(UStatusError):
        await again
    assert len(appends) == 3
