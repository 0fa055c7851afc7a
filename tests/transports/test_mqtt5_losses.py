"""A broker that loses acknowledged messages, and a transport that reports it: a full queue, a lost session."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from tools.broker import Broker
from transports.conformance import TcpProxy
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, reasons
from transports.mqtt5.losses import COUNT_SETTLES_S, DropCount, Loss, Losses
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

MakeBroker = Callable[..., Broker]
DEADLINE_S = 30
TOPIC = uris.parse("up://sender/10AB/3/80CD")
SMALL = ["max_queued_messages 50", "sys_interval 1"]
SESSION = {"client_id": "gateway", "session_expiry_s": 3_600}


def end(port: int, authority: str, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=port, **settings), LocalUriProvider(authority, 0x10AB, 3))


def messages(count: int) -> list[UMessage]:
    return [UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"%d" % number, 6)) for number in range(count)]


class Reports:
    """The losses that a transport has reported."""

    def __init__(self, transport: Mqtt5Transport) -> None:
        self.losses: list[tuple[str, int | None]] = []
        self._news = asyncio.Event()
        transport.on_loss(self._lost)

    def _lost(self, text: str, count: int | None) -> None:
        self.losses.append((text, count))
        self._news.set()

    async def first(self) -> tuple[str, int | None]:
        await asyncio.wait_for(self._news.wait(), DEADLINE_S)
        assert len(self.losses) == 1, self.losses
        return self.losses[0]


class Heard:
    def __init__(self) -> None:
        self.count = 0
        self._more = asyncio.Event()

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        self.count += len(messages)
        self._more.set()

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.count < count:
                self._more.clear()
                await self._more.wait()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def counted(transport: Mqtt5Transport, at_least: int = 0) -> None:
    """Until the broker's count has been seen."""
    dropped = transport._losses._dropped
    await until(lambda: dropped.last is not None and dropped.last >= at_least)


async def send(broker: Broker, count: int) -> None:
    async with end(broker.port, "sender") as sender:
        for status in await sender.send_batch(messages(count)):
            assert not status.code  # every one of them is acknowledged


@pytest.mark.broker
async def test_a_queue_overflow_while_disconnected_is_reported(make_broker: MakeBroker) -> None:
    broker = make_broker(settings=SMALL)
    proxy = TcpProxy(broker.host, broker.port)
    await proxy.start()
    one, heard = end(proxy.port, "gateway", **SESSION), Heard()
    reports = Reports(one)
    async with one, end(broker.port, "watcher") as watcher:
        await one.register_listener(TOPIC, heard)
        await counted(one)
        proxy.cut()
        await until(lambda: not one.connected)
        await send(broker, 200)
        await counted(watcher, 150)  # once in sys_interval
        with structlog.testing.capture_logs() as lines:
            proxy.mend()
            text, count = await reports.first()
        assert [line["what"] for line in lines if line["log_level"] == "error"] == [text]
        assert count is not None
        assert count == one.dropped["broker_dropped"] >= 150
        assert f"127.0.0.1:{proxy.port}" in text
        assert "our session was full" in text
        await heard.until(45)
    await proxy.stop()


@pytest.mark.broker
async def test_a_queue_overflow_while_connected_is_reported(make_broker: MakeBroker) -> None:
    """A slow client loses as much as an absent one; mosquitto does not say whose messages it dropped."""
    broker = make_broker(settings=SMALL)
    held = asyncio.Event()

    class Slow:
        def on_receive(self, message: UMessage) -> Any:
            return held.wait()

    one = end(broker.port, "gateway", receive_maximum=20, **SESSION)
    reports = Reports(one)
    async with one:
        await one.register_listener(TOPIC, Slow())
        await counted(one)
        await send(broker, 200)
        await until(lambda: one._receiver.arrivals.waiting == 20)
        held.set()
        text, count = await reports.first()
        assert "lagged" in text
        assert count is None
        assert one.dropped["broker_dropped"] >= 120


@pytest.mark.broker
async def test_a_loss_is_reported_by_the_next_process_too(make_broker: MakeBroker, tmp_path: Path) -> None:
    """What the last process knew is in a file; nothing is reported when nothing was lost."""
    broker, file = make_broker(settings=SMALL), tmp_path / "transport.json"

    async def run(until: Callable[[Mqtt5Transport, Reports], Any]) -> None:
        one = end(broker.port, "gateway", **SESSION)
        one.remember_in(str(file))
        reports = Reports(one)
        async with one:
            await one.register_listener(TOPIC, Heard())
            await until(one, reports)

    async def saved(one: Mqtt5Transport, reports: Reports) -> None:
        await counted(one)
        await until(lambda: file.exists() and f'"dropped": {one._losses._dropped.last}' in file.read_text())
        assert not reports.losses

    async def is_reported(one: Mqtt5Transport, reports: Reports) -> None:
        assert "dropped" in (await reports.first())[0]

    await run(saved)
    await send(broker, 20)
    await run(saved)
    await send(broker, 200)
    await run(is_reported)


@pytest.mark.broker
async def test_a_session_that_the_broker_lost_is_reported(make_broker: MakeBroker, tmp_path: Path) -> None:
    """Within a process, and over a restart; not for the first start, and not where we asked for it."""
    broker, file = make_broker(), tmp_path / "transport.json"  # not persistent: it forgets all sessions
    one = end(broker.port, "gateway", **SESSION)
    one.remember_in(str(file))
    reports = Reports(one)
    async with one:
        await one.register_listener(TOPIC, Heard())
        await until(file.exists)
        assert not reports.losses
        broker.kill()
        await broker.start_async()
        text, count = await reports.first()
        assert "gateway" in text
        assert count is None
        assert one.dropped["session_lost"] == 1
    broker.kill()
    await broker.start_async()
    for settings, losses in ((SESSION | {"clean_start": True}, 0), (SESSION, 1)):
        again = end(broker.port, "gateway", **settings)
        again.remember_in(str(file))
        reports = Reports(again)
        if losses:
            broker.kill()
            await broker.start_async()
        async with again:
            assert len(reports.losses) == losses == again.dropped["session_lost"]
            await again.register_listener(TOPIC, Heard())  # without any, a session that is lost costs nothing


@pytest.mark.broker
async def test_a_session_that_goes_on_at_another_address_of_the_broker_is_not_lost(
    make_broker: MakeBroker, tmp_path: Path
) -> None:
    """As after a change of `host` or `port`. With another client_id it is another session."""
    broker, file = make_broker(), tmp_path / "transport.json"
    for settings, losses in (({"host": "127.0.0.1"}, 0), ({"host": "localhost"}, 0), ({"client_id": "other"}, 1)):
        one = end(broker.port, "gateway", **SESSION | settings)
        one.remember_in(str(file))
        reports = Reports(one)
        async with one:
            assert len(reports.losses) == losses
            await one.register_listener(TOPIC, Heard())


@pytest.mark.broker
async def test_a_session_that_was_ended_on_purpose_is_not_reported(make_broker: MakeBroker) -> None:
    """With a made-up name it ends with `close`; with session expiry 0 it has no session to lose."""
    broker = make_broker()
    for settings in ({}, {"session_expiry_s": 0}):
        one = end(broker.port, "gateway", **settings)
        reports = Reports(one)
        for _ in range(2):
            async with one:
                await one.register_listener(TOPIC, Heard())
                await counted(one)
        assert not reports.losses
        assert not one.dropped


@pytest.mark.broker
async def test_a_broker_that_does_not_tell_is_used_all_the_same(make_broker: MakeBroker) -> None:
    """Its access rules hide the count: mosquitto grants the subscription, and sends nothing."""
    broker = make_broker(
        users={"gateway": "g"}, acl="user gateway\ntopic readwrite sender/#\n", settings=["sys_interval 1"]
    )
    one, heard = end(broker.port, "gateway", username="gateway", password="g", **SESSION), Heard()
    async with one:
        await one.register_listener(TOPIC, heard)
        await asyncio.wait_for(asyncio.gather(*one._tasks), DEADLINE_S)
        assert one.connected
        assert one.troubles == []


@pytest.mark.broker
async def test_a_subscription_that_is_refused_is_a_trouble_until_it_is_left(
    make_broker: MakeBroker, monkeypatch: Any
) -> None:
    """When the broker has lost our session, and its rules have changed meanwhile."""
    broker = make_broker()
    one, listener = end(broker.port, "gateway"), Heard()

    async def refuse(*_: Any, **__: Any) -> None:
        raise reasons.refused("it", 0x87, {})

    async with one:
        await one.register_listener(TOPIC, listener)
        monkeypatch.setattr(one._link, "subscribe", refuse)
        broker.kill()
        await until(lambda: not one.connected)
        await broker.start_async()
        await until(lambda: one.connected)
        (trouble,) = one.troubles
        assert "sender/10AB/0/3/80CD" in trouble
        assert "Not authorized" in trouble
        await one.unregister_listener(TOPIC, listener)
        assert one.troubles == []


async def test_the_filters_in_the_file_are_bounded_and_the_more_there_are_the_less_often_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transports.mqtt5.losses.FILTERS_MAX", 3_000)
    file, filters = tmp_path / "transport.json", tuple(f"a/{number}" for number in range(5_000))
    losses = Losses("broker", "session", Counter())
    losses.remember_in(file)
    losses.tick(0.0, ())
    assert losses._saving is None, "who has nothing to remember makes no file"

    async def written(now_s: float, filters: tuple[str, ...]) -> list[str]:
        losses.tick(now_s, filters)
        assert losses._saving is not None
        await losses._saving
        found: list[str] = json.loads(file.read_text())["filters"]
        return found

    assert await written(1.0, filters) == list(filters[:3_000])
    assert await written(5.9, filters[4_000:]) == list(filters[:3_000]), "5,000 filters, so not within 5 s"
    assert await written(6.0, filters[4_000:]) == list(filters[4_000:])
    await losses.close(("last",))
    again = Losses("broker", "session", Counter())
    again.remember_in(file)
    assert again.filters_left == ["last"]
    other = Losses("broker", "another session", Counter())
    other.remember_in(file)
    assert other.filters_left == []


@pytest.mark.parametrize("payload", [b"9" * 400, b"-5", b"1e9", b"", b"\xff"])
async def test_a_count_that_can_be_none_is_not_counted(payload: bytes) -> None:
    """A number of 400 digits made /metrics fail for good."""
    counters: Counter[str] = Counter()
    losses = Losses("broker", "session", counters)
    for count in (b"1", payload, b"2"):
        losses.counted(count, retained=True, now_s=0.0)
    assert counters == {"broker_dropped": 1}


async def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    """The disk was full, say; nothing has to change at the broker before the next try."""
    file = tmp_path / "not there yet" / "transport.json"
    losses = Losses("broker", "session", Counter())
    losses.remember_in(file)
    losses.tick(0.0, ("a/1",))
    assert losses._saving is not None
    await losses._saving
    file.parent.mkdir()
    losses.tick(60.0, ("a/1",))
    await losses._saving
    assert json.loads(file.read_text())["filters"] == ["a/1"]
    written = file.stat().st_ino
    losses.tick(120.0, ("a/1",))
    await losses.close(("a/1",))
    assert file.stat().st_ino == written, "what is written already is not written again"


# How the count is read.


def read(
    dropped: DropCount, *counts: int, retained: bool = False, behind: bool = False, now_s: float = 0.0
) -> list[Loss | None]:
    return [dropped.seen(count, retained=retained, behind=behind, now_s=now_s) for count in counts]


def resumed(last: int) -> DropCount:
    dropped = DropCount()
    read(dropped, last, retained=True)
    dropped.returned(0.0)
    return dropped


def test_the_first_count_says_nothing() -> None:
    assert read(DropCount(), 500, retained=True) == [None]
    assert read(DropCount(), 500) == [None]


def test_an_update_that_is_missing_from_our_queue_was_dropped_itself() -> None:
    dropped = resumed(10)
    assert read(dropped, 12, 15) == [None, None]  # queued: there was room
    assert read(dropped, 400, retained=True) == [Loss(385, ours=True)]


def test_updates_that_were_queued_count_the_messages_of_others() -> None:
    dropped = resumed(10)
    assert read(dropped, 12, 15) == [None, None]
    assert read(dropped, 15, retained=True) == [None]
    assert read(dropped, 16, now_s=1.0) == [None]  # and so does the next one, most likely


def test_an_update_right_after_our_return_may_count_ours() -> None:
    dropped = resumed(10)
    assert read(dropped, 10, retained=True) == [None]
    assert read(dropped, 30, now_s=COUNT_SETTLES_S / 2) == [Loss(20, ours=False)]
    assert read(dropped, 31, now_s=COUNT_SETTLES_S * 2) == [None]


def test_an_update_counts_ours_perhaps_while_we_lag_behind() -> None:
    dropped = DropCount()
    read(dropped, 5, retained=True)
    assert read(dropped, 6) == [None]
    assert read(dropped, 9, behind=True) == [Loss(3, ours=False)]


def test_a_restarted_broker_counts_from_0() -> None:
    dropped = resumed(500)
    assert read(dropped, 0, retained=True) == [None]
    dropped = resumed(500)
    assert read(dropped, 7, retained=True) == [Loss(7, ours=False)]
    dropped = resumed(0)  # and the first count has not been made yet, so none is retained
    assert read(dropped, 7) == [None]
    assert dropped.tick(COUNT_SETTLES_S / 2) is None
    assert dropped.tick(COUNT_SETTLES_S) == Loss(7, ours=False)
    assert dropped.tick(COUNT_SETTLES_S * 2) is None


@given(
    room=st.integers(0, 5),
    others=st.lists(st.integers(0, 3), max_size=8),
    overflow=st.lists(st.integers(1, 9), max_size=4),
    after=st.integers(0, 3),
)
def test_no_overflow_goes_untold(room: int, others: list[int], overflow: list[int], after: int) -> None:
    """A broker as mosquitto is: updates are queued until our queue is full; from then on everything for us is dropped
    and counted."""
    count, last = 100, 100
    dropped = resumed(count)
    losses: list[Loss] = []
    for rise in others:
        count += rise
        if count != last:
            last = count
            assert read(dropped, count) == [None]
    shown = count
    count += sum(overflow)
    for _ in overflow[1:]:
        shown = count
    losses += filter(None, read(dropped, shown, retained=True))
    if count != shown or after:
        losses += filter(None, read(dropped, count + after, now_s=10.0))
    if len(overflow) > 1:
        assert losses[0] == Loss(sum(overflow), ours=True)
    elif overflow and not sum(others):
        assert losses
    elif not overflow and not after:
        assert not losses
