"""Faults that block the event loop, leave threads or tasks behind, or break the connection."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Final

from tests.transports.mutants.end import RETRY_S, HubTransport
from tests.transports.mutants.hub import LISTEN, TAKEN, frame, pack
from tests.transports.mutants.mutant import TEST_OVER, fault
from transports.base import OK
from transports.listeners import Filter, ListenerTable
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import ProbeRequest, ProbeResult, ProbeVerdict, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

IN_OPEN_S: Final = 0.3
PER_BATCH_S: Final = 0.02
WHILE_AWAY_S: Final = 1.0


# The event loop.


@fault("open holds the loop up for 0.3 s", "test_open_does_not_block_the_loop")
class OpenBlocks(HubTransport):
    async def open(self) -> None:
        time.sleep(IN_OPEN_S)  # noqa: ASYNC251 - the fault
        await super().open()


@fault("close holds the loop up for 0.3 s", "test_close_does_not_block_the_loop")
class CloseBlocks(HubTransport):
    async def end(self) -> None:
        time.sleep(IN_OPEN_S)  # noqa: ASYNC251 - the fault
        await super().end()


@fault("an open that finds nobody holds the loop up for 0.3 s", "test_an_open_in_vain_does_not_block_the_loop")
class OpenInVainBlocks(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except UStatusError:
            time.sleep(IN_OPEN_S)  # noqa: ASYNC251 - the fault
            raise


@fault("each batch that is sent holds the loop up for 20 ms", "test_a_batch_does_not_block_the_loop")
class SendBlocks(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        time.sleep(PER_BATCH_S)  # noqa: ASYNC251 - the fault
        return await super().send_batch(messages)


@fault("each batch that arrives holds the loop up for 20 ms", "test_a_batch_does_not_block_the_loop")
class DeliveryBlocks(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        time.sleep(PER_BATCH_S)
        return super().deliver(messages)


@fault("the loop stands still for 1 s when the network is lost", "test_a_network_that_is_away_does_not_block_the_loop")
class AwayBlocks(HubTransport):
    def lost(self) -> None:
        super().lost()
        time.sleep(WHILE_AWAY_S)


@fault("listeners are called on a thread of the plugin", "test_listeners_and_callbacks_run_on_the_loop")
class ListenersOnAThread(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        thread = threading.Thread(target=super().deliver, args=(messages,))
        thread.start()
        thread.join()
        return None


@fault("connection callbacks are called on a thread of the plugin", "test_listeners_and_callbacks_run_on_the_loop")
class CallbacksOnAThread(HubTransport):
    def tell(self, connected: bool) -> None:
        thread = threading.Thread(target=super().tell, args=(connected,))
        thread.start()
        thread.join()


@fault("close leaves a thread behind", "test_close_leaves_no_thread_and_no_task")
class CloseLeavesAThread(HubTransport):
    async def open(self) -> None:
        await super().open()
        threading.Thread(target=TEST_OVER.wait, daemon=True).start()


@fault("close leaves a task behind", "test_close_leaves_no_thread_and_no_task")
class CloseLeavesATask(HubTransport):
    async def close(self) -> None:
        await super().close()
        self.keepalive = asyncio.ensure_future(asyncio.Event().wait())


@fault("an open that fails goes on trying in the background", "test_an_open_in_vain_leaves_no_thread_and_no_task")
class OpenInVainLeavesATask(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except UStatusError:
            self.retrying = asyncio.ensure_future(asyncio.Event().wait())
            raise


@fault("a thread looks for messages without a pause", "test_waiting_costs_no_processor")
class Polls(HubTransport):
    async def open(self) -> None:
        await super().open()
        threading.Thread(target=self.poll, daemon=True).start()

    def poll(self) -> None:
        while self._open and not TEST_OVER.is_set():
            pass


@fault(
    "while the network is away it tries to connect without a pause", "test_a_network_that_is_away_costs_no_processor"
)
class RetriesWithoutPause(HubTransport):
    retry_s = 0.0


@fault("each reconnect leaves a task", "test_a_reconnect_leaves_no_thread_and_no_task")
class ReconnectLeavesATask(HubTransport):
    def lost(self) -> None:
        super().lost()
        watching: list[asyncio.Future[bool]] = self.__dict__.setdefault("watching", [])
        watching.append(asyncio.ensure_future(asyncio.Event().wait()))


# The connection.


@fault("a library's exception leaves open where nobody is", "test_a_network_that_can_not_be_reached")
class OpenRaisesOsError(HubTransport):
    async def _connect(self) -> asyncio.StreamReader:
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.transport.abort()
        return await super()._connect()


@fault("open returns where nobody is, and nobody ever connects", "test_a_network_that_can_not_be_reached")
class OpenSwallowsErrors(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except UStatusError:
            return


@fault("open waits for ever where nobody is", "test_a_network_that_can_not_be_reached")
class OpenNeverReturns(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except UStatusError:
            await asyncio.Event().wait()


@fault("that the network refuses us is told as if it were away", "test_a_network_that_refuses_us")
class OpenHidesRefusal(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except UStatusError as error:
            raise UStatusError(UCode.UNAVAILABLE, error.message) from None


@fault("a second open makes a second connection", "test_open_twice_is_open_once")
class OpenTwice(HubTransport):
    async def open(self) -> None:
        if self._open and self._running is not None:
            self._open = False
            self._running.cancel()
            self.change(False)
        await super().open()


@fault("two opens at once make two connections", "test_open_at_once_is_open_once")
class OpenAtOnce(HubTransport):
    async def open(self) -> None:
        self._opening = asyncio.Lock()
        opened = self._open
        await super().open()
        if not opened:
            self.tell(True)


@fault("an open that was cancelled can't be repeated", "test_an_open_that_is_cancelled_leaves_it_closed")
class CancelledOpenIsStuck(HubTransport):
    async def open(self) -> None:
        if getattr(self, "begun", False) and not self._open:
            raise UStatusError(UCode.FAILED_PRECONDITION, "open was called already")
        self.begun = True
        await super().open()


@fault("an open goes on though it was cancelled", "test_an_open_that_is_cancelled_leaves_it_closed")
class CancelledOpenGoesOn(HubTransport):
    async def open(self) -> None:
        try:
            await super().open()
        except asyncio.CancelledError:
            await asyncio.Event().wait()


@fault("the first connection is not told", "test_each_change_is_reported_once")
class FirstConnectionUntold(HubTransport):
    first = True

    def tell(self, connected: bool) -> None:
        if not (connected and self.first):
            super().tell(connected)
        self.first = False


@fault("each change is reported twice", "test_each_change_is_reported_once")
class ChangesReportedTwice(HubTransport):
    def tell(self, connected: bool) -> None:
        super().tell(connected)
        super().tell(connected)


@fault(
    "connected stays true while the network is away",
    "test_sending_while_the_network_is_away_is_unavailable_and_keeps_the_order",
)
class ConnectedThoughAway(HubTransport):
    @property
    def connected(self) -> bool:
        return self._open


@fault("a probe sends a message to see whether it may", "test_a_probe_disturbs_nobody")
class ProbeSends(HubTransport):
    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        await self.open()
        for source, sink in asked.sends:
            assert sink is not None
            message = UMessageBuilder.notification(source, sink).build_from_upayload(UPayload(b"may I?", 6))
            await self.send_batch([message])
        await self.close()
        yield ProbeResult(ProbeVerdict.OK, "may send")


@fault("a probe leaves the connection", "test_a_probe_disturbs_nobody")
class ProbeStaysOpen(HubTransport):
    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        await self.open()
        yield ProbeResult(ProbeVerdict.OK, "opened")


@fault("a second close raises", "test_close_may_be_called_at_any_time_and_again")
class CloseOnce(HubTransport):
    async def close(self) -> None:
        if not self._open:
            raise RuntimeError("not open")
        await super().close()


@fault("sending after close raises an error of the library", "test_closed_before_open_and_after_close")
class SendAfterCloseRaises(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if not self._open:
            raise RuntimeError("the writer is closed")
        return await super().send_batch(messages)


@fault("sending after close is answered OK", "test_closed_before_open_and_after_close")
class SendAfterCloseIsFine(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return await super().send_batch(messages) if self._open else [OK for _ in messages]


@fault("close leaves the connection, and messages go on arriving", "test_nothing_is_delivered_after_close")
class DeliversAfterClose(HubTransport):
    async def close(self) -> None:
        self._open = False
        self.change(False)


@fault("what was answered OK is thrown away by close", "test_what_was_answered_ok_arrives_though_its_sender_closes")
class CloseThrowsAway(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if not self._open:
            return await super().send_batch(messages)
        kept = [one for one in messages if self.refusal(one, self._checks.now_ms()) is None]
        self.later = asyncio.ensure_future(self._send_later(kept))
        return [self.refusal(one, self._checks.now_ms()) or OK for one in messages]

    async def _send_later(self, messages: Sequence[UMessage]) -> None:
        await asyncio.sleep(RETRY_S)
        await super().send_batch(messages)


@fault("after a reconnect the filters are not asked for again", "test_listeners_work_again_after_the_network_was_away")
class ListenersLostByReconnect(HubTransport):
    async def _connect(self) -> asyncio.StreamReader:
        table, self._table = self._table, ListenerTable(self._authority)
        try:
            return await super()._connect()
        finally:
            self._table = table


@fault(
    "after the network forgot its state only the first filter is asked for again",
    "test_listeners_work_again_after_the_network_forgot_us",
)
class OnlyTheFirstAfterAllIsForgotten(HubTransport):
    def filters_to_register(self, session_is_known: bool) -> list[Filter]:
        filters = super().filters_to_register(session_is_known)
        return filters if session_is_known else filters[:1]


@fault(
    "it declares PERSISTENT_SESSION, and open of a new end empties the inbox",
    "test_what_comes_while_our_process_is_restarted_waits_for_its_listeners",
)
class NewEndEmptiesTheInbox(HubTransport):
    is_new = True

    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        if self.is_new:
            self._write(frame(TAKEN, numbered[-1][0]))
        else:
            super().arrived(numbered)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self.is_new = False
        await super().register_listener(source_filter, listener, sink_filter)


@fault(
    "what was registered while the network was away is never asked for",
    "test_a_listener_that_is_registered_while_the_network_is_away",
)
class RegisteredAwayLost(HubTransport):
    async def announce(self, kind: int, filter: Filter) -> None:
        known: set[Filter] = self.__dict__.setdefault("known", set())
        if self._connected:
            known.add(filter)
        await super().announce(kind, filter)

    async def _connect(self) -> asyncio.StreamReader:
        table, known = self._table, self.__dict__.get("known", set())
        self._table = ListenerTable(self._authority)
        for filter in table.filters:
            if filter in known:
                self._table.add(filter.source, filter.sink, _Nobody())
        try:
            return await super()._connect()
        finally:
            self._table = table


class _Nobody:
    def on_receive(self, message: UMessage) -> None:
        return None


@fault(
    "what is unregistered while the network is away stays",
    "test_a_listener_that_is_unregistered_while_the_network_is_away",
)
class UnregisteredAwayStays(HubTransport):
    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if self._connected or not self._open:
            await super().unregister_listener(source_filter, listener, sink_filter)


@fault(
    "what comes after the sender's reconnect is lost", "test_what_is_sent_after_the_sender_was_away_arrives_in_order"
)
class SenderLosesAfterReconnect(HubTransport):
    stale = 0

    def lost(self) -> None:
        super().lost()
        self.stale = 10

    def post(self, message: UMessage, now_ms: int) -> UStatus | asyncio.Future[bytes]:
        if self._connected and self.stale:
            self.stale -= 1
            return OK
        return super().post(message, now_ms)


@fault(
    "what comes after the sender's reconnect is out of order",
    "test_what_is_sent_after_the_sender_was_away_arrives_in_order",
)
class SenderReordersAfterReconnect(HubTransport):
    was_away = False

    def lost(self) -> None:
        super().lost()
        self.was_away = True

    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if self._connected and self.was_away and len(messages) > 1:
            self.was_away = False
            return (await super().send_window(list(reversed(messages))))[::-1]
        return await super().send_window(messages)


@fault(
    "what had no answer when the connection broke is answered OK",
    "test_a_batch_that_is_cut_off_ends_there_and_goes_on_later",
)
class UnansweredIsOk(HubTransport):
    def lost(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(b"")
        super().lost()


@fault("the rest of a batch is sent after a failure", "test_a_batch_that_is_cut_off_ends_there_and_goes_on_later")
class RestIsSent(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses: list[UStatus] = []
        for start in range(0, len(messages), 100):
            part = await super().send_batch(messages[start : start + 100])
            if self._open and part[-1].code == UCode.UNAVAILABLE:
                await asyncio.sleep(10 * RETRY_S)
            statuses += part
        return statuses


@fault(
    "what was kept while we were away is dropped when we are back",
    "test_nothing_that_was_sent_is_lost_while_we_are_away",
)
class SessionIsDropped(HubTransport):
    was_away = False

    def lost(self) -> None:
        super().lost()
        self.was_away = True

    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        if self.was_away:
            self.was_away = False
            self._write(frame(TAKEN, numbered[-1][0]))
        else:
            super().arrived(numbered)


@fault(
    "close acknowledges what no listener has taken",
    "test_what_no_listener_has_taken_by_the_close_comes_to_the_next_process",
)
class CloseTakesAll(HubTransport):
    async def drain(self) -> None:
        await super().drain()
        if self._taking:
            self._write(frame(TAKEN, self._taking[-1][0]))
            await self._ask(LISTEN, pack(self._table.filters[0]))  # so that it has left before the connection ends
