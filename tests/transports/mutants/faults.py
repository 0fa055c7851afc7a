"""The faults: each is a good plugin with a few lines that are wrong, one sentence, and the test that catches it.

HubTransport <- a subclass for each fault, registered by @fault(sentence, test) under its own name, in words
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tests.transports.mutants.hub import MESSAGE_BYTES_MAX, RETRY_S, SEND, TAKEN, UNLISTEN, HubTransport, frame, pack
from transports.listeners import Filter, ListenerTable
from transports.outbox import OK
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, UListener
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

IN_OPEN_S: Final = 0.3
PER_BATCH_S: Final = 0.02
WHILE_AWAY_S: Final = 3.0
TEST_OVER: Final = threading.Event()  # for threads that end then, and not before


@dataclass(frozen=True)
class Mutant:
    name: str
    says: str
    transport: type[HubTransport]
    caught_by: str  # the test that must fail; "" if the suite can't see this fault


MUTANTS: Final[dict[str, Mutant]] = {}
T = TypeVar("T", bound=type[HubTransport])


def fault(says: str, caught_by: str) -> Callable[[T], T]:
    def register(transport: T) -> T:
        name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in transport.__name__).strip()
        MUTANTS[name] = Mutant(name, says, transport, caught_by)
        return transport

    return register


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


@fault("the loop stands still for 3 s when the network is lost", "test_a_network_that_is_away_does_not_block_the_loop")
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
class OpenHangs(HubTransport):
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


@fault("the first connection is not told", "test_each_change_is_told_once_from_the_first_connection_to_the_end")
class FirstConnectionUntold(HubTransport):
    first = True

    def tell(self, connected: bool) -> None:
        if not (connected and self.first):
            super().tell(connected)
        self.first = False


@fault("each change is told twice", "test_each_change_is_told_once_from_the_first_connection_to_the_end")
class ChangesToldTwice(HubTransport):
    def tell(self, connected: bool) -> None:
        super().tell(connected)
        super().tell(connected)


@fault("connected stays true while the network is away", "test_sending_while_the_network_is_away_is_unavailable_and_keeps_the_order")
class ConnectedThoughAway(HubTransport):
    @property
    def connected(self) -> bool:
        return self._open


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
        kept = [one for one in messages if self.refusal(one, self._outbox.now_ms()) is None]
        self.later = asyncio.ensure_future(self._send_later(kept))
        return [self.refusal(one, self._outbox.now_ms()) or OK for one in messages]

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


@fault("what was registered while the network was away is never asked for", "test_a_listener_that_is_registered_while_the_network_is_away")
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


@fault("what is unregistered while the network is away stays", "test_a_listener_that_is_unregistered_while_the_network_is_away")
class UnregisteredAwayStays(HubTransport):
    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        if self._connected or not self._open:
            await super().unregister_listener(source_filter, listener, sink_filter)


@fault("what comes after the sender's reconnect is lost", "test_what_is_sent_after_the_sender_was_away_arrives_in_order")
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


@fault("what comes after the sender's reconnect is out of order", "test_what_is_sent_after_the_sender_was_away_arrives_in_order")
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


@fault("what had no answer when the connection broke is answered OK", "test_a_batch_that_is_cut_off_ends_there_and_goes_on_later")
class UnansweredIsOk(HubTransport):
    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        posted_while_connected = self._connected
        status = await super().answer(posted)
        return OK if status.code == UCode.UNAVAILABLE and posted_while_connected and self._open else status


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


@fault("what was kept while we were away is dropped when we are back", "test_nothing_that_was_sent_is_lost_while_we_are_away")
class SessionIsDropped(HubTransport):
    was_away = False

    def lost(self) -> None:
        super().lost()
        self.was_away = True

    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        if self.was_away:
            self.was_away = False
            self._tell(frame(TAKEN, numbered[-1][0]))
        else:
            super().arrived(numbered)


# Sending.


@fault("the caller's message is changed", "test_what_is_sent_belongs_to_the_caller")
class ChangesTheMessage(HubTransport):
    def encode(self, message: UMessage) -> bytes:
        if not message.attributes.priority:
            message.attributes.priority = UPriority.UPRIORITY_CS1
        return super().encode(message)


class _Losing(HubTransport):
    """Encodes a message that lacks something."""

    def lose(self, message: UMessage) -> None:
        raise NotImplementedError

    def encode(self, message: UMessage) -> bytes:
        lossy = copy.deepcopy(message)
        self.lose(lossy)
        return super().encode(lossy)


@fault("a permission level of 0 arrives as none", "test_all_attributes_and_the_payload_survive")
class PermissionLevelZeroLost(_Losing):
    def lose(self, message: UMessage) -> None:
        if not message.attributes.permission_level:
            message.attributes.ClearField("permission_level")


@fault("the payload's format is lost", "test_every_payload_format_survives")
class FormatLost(_Losing):
    def lose(self, message: UMessage) -> None:
        message.attributes.ClearField("payload_format")


@fault("the traceparent is lost", "test_all_attributes_and_the_payload_survive")
class TraceparentLost(_Losing):
    def lose(self, message: UMessage) -> None:
        message.attributes.ClearField("traceparent")


@fault("a token that is not ASCII is mangled", "test_all_attributes_and_the_payload_survive")
class TokenMangled(_Losing):
    def lose(self, message: UMessage) -> None:
        message.attributes.token = message.attributes.token.encode("ascii", "replace").decode()
        if not message.attributes.token:
            message.attributes.ClearField("token")


@fault("a response's status is lost", "test_all_attributes_and_the_payload_survive")
class StatusLost(_Losing):
    def lose(self, message: UMessage) -> None:
        message.attributes.ClearField("commstatus")


@fault("an unspecified priority arrives as CS1", "test_every_priority_survives")
class PriorityInvented(_Losing):
    def lose(self, message: UMessage) -> None:
        message.attributes.priority = message.attributes.priority or UPriority.UPRIORITY_CS1


@fault("a payload ends at 64 KiB", "test_a_large_payload_survives")
class LargeIsCut(_Losing):
    def lose(self, message: UMessage) -> None:
        if len(message.payload) > 1 << 16:
            message.payload = message.payload[: 1 << 16]


@fault("a ttl of 0 counts as expired", "test_a_ttl_of_0_never_expires")
class ZeroTtlExpires(HubTransport):
    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        if message.attributes.HasField("ttl") and not message.attributes.ttl:
            return UStatus(code=UCode.DEADLINE_EXCEEDED, message="expired")
        return super().refusal(message, now_ms)


@fault("what has expired is sent", "test_an_expired_message_is_refused")
class SendsExpired(HubTransport):
    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        refusal = super().refusal(message, now_ms)
        return refusal if refusal is not None and refusal.code != UCode.DEADLINE_EXCEEDED else None


@fault("an invalid message is answered UNAVAILABLE", "test_an_invalid_message_is_refused[no id]")
class WrongCode(HubTransport):
    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        refusal = super().refusal(message, now_ms)
        return refusal and UStatus(code=UCode.UNAVAILABLE, message=refusal.message)


@fault("only the addresses of what is sent are checked", "test_an_invalid_message_is_refused[request of CS3]")
class SendsInvalid(HubTransport):
    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        attributes = message.attributes
        try:
            attrs.validate_route(attributes.type, attributes.source, attributes.sink if attributes.HasField("sink") else None)
        except UStatusError as error:
            return error.status
        return super().refusal(message, now_ms) if attrs.is_expired(attributes, now_ms) else None


@fault("an invalid message stops the rest of its batch", "test_what_is_refused_does_not_stop_the_rest")
class InvalidStopsTheBatch(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        now_ms = self._outbox.now_ms()
        good = list(itertools.takewhile(lambda one: self.refusal(one, now_ms) is None, messages))
        statuses = await super().send_window(good)
        if len(good) < len(messages):
            refusal = self.refusal(messages[len(good)], now_ms)
            assert refusal is not None
            statuses += [refusal] * (len(messages) - len(good))
        return statuses


@fault("small messages overtake large ones", "test_a_large_payload_is_not_overtaken")
class SmallOvertakesLarge(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        order = sorted(range(len(messages)), key=lambda at: len(messages[at].payload) > 1 << 14)
        statuses = dict(zip(order, await super().send_window([messages[at] for at in order]), strict=True))
        return [statuses[at] for at in range(len(messages))]


@fault("what is too large is answered OK, and thrown away", "test_what_is_too_large_is_refused_or_arrives")
class OversizeIsOk(HubTransport):
    def post(self, message: UMessage, now_ms: int) -> UStatus | asyncio.Future[bytes]:
        return OK if len(message.payload) > MESSAGE_BYTES_MAX else super().post(message, now_ms)


@fault("each message is sent twice", "test_a_batch_listener_gets_batches_in_order")
class SendsTwice(HubTransport):
    def _post(self, kind: int, body: bytes) -> asyncio.Future[bytes]:
        if kind == SEND and self._open:
            super()._post(kind, body)
        return super()._post(kind, body)


@fault("each batch is sent the last message first", "test_a_large_batch_arrives_complete_and_in_order")
class BatchReversed(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return (await super().send_window(list(reversed(messages))))[::-1]


@fault(
    "batches that are sent at once are mixed, though of one stream",
    "test_batches_of_one_stream_keep_the_order_of_the_calls",
)
class BatchesMixed(HubTransport):
    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        self._sending = asyncio.Lock()
        return await super().send_batch(messages)


@fault("sending never waits: what a slow end has not taken piles up", "test_a_slow_listener_is_felt_by_the_sender")
class NoBackPressure(HubTransport):
    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        if isinstance(posted, asyncio.Future) and not posted.done():
            return OK
        return await super().answer(posted)

    async def drain(self) -> None:
        while self._answers and self._connected:
            await asyncio.wait(list(self._answers.values()))


# Receiving.


@fault("listeners get everything, whatever their filter", "test_a_pattern_that_does_not_match[another source resource]")
class FiltersIgnored(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        for listeners in list(self._table._table.values()):
            for listener in listeners:
                for message in messages:
                    listener.on_receive(message)
        return None

    async def announce(self, kind: int, filter: Filter) -> None:
        for wide in ((uris.ANY, uris.ANY), (uris.pattern("*"), None)):
            await super().announce(kind, Filter.of(*wide))


@fault("a wildcard stands for the authority only", "test_a_pattern_that_matches[any source resource]")
class WildcardsIgnored(HubTransport):
    async def announce(self, kind: int, filter: Filter) -> None:
        if kind == UNLISTEN or filter.source.resource_id != uris.WILDCARD_RESOURCE or filter.source.authority_name == "*":
            await super().announce(kind, filter)


@fault("a sender hears what it has sent itself", "test_nobody_hears_what_it_sent_itself")
class OwnEcho(HubTransport):
    def post(self, message: UMessage, now_ms: int) -> UStatus | asyncio.Future[bytes]:
        posted = super().post(message, now_ms)
        if isinstance(posted, asyncio.Future):
            self._table.deliver([message])
        return posted


@fault("what has expired on its way is delivered", "test_what_has_expired_is_never_delivered")
class DeliversExpired(HubTransport):
    def decode(self, body: bytes) -> UMessage | None:
        message = super().decode(body)
        if message is not None and attrs.is_expired(message.attributes, self._outbox.now_ms()):
            message.attributes.ttl = 0
        return message


@fault("what arrives is acknowledged before a listener has taken it", "test_what_was_not_taken_comes_again")
class AckFirst(HubTransport):
    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        self._tell(frame(TAKEN, numbered[-1][0]))
        super().arrived(numbered)

    def not_taken(self) -> None:
        self._taking.clear()


@fault("a listener that raises ends delivery", "test_a_listener_that_raises_harms_nobody_else")
class ListenerKillsDelivery(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        failures = self._table.failures
        if failures:
            return None
        return super().deliver(messages)


@fault("what is no message at all costs the connection", "test_what_is_no_message_at_all_is_discarded_and_the_rest_goes_on")
class MalformedKillsTheConnection(HubTransport):
    def decode(self, body: bytes) -> UMessage | None:
        message = super().decode(body)
        if message is None and self._writer is not None:
            self._writer.transport.abort()
            return UMessage()
        return message


@fault("what is thrown away is not counted", "test_an_invalid_message_is_discarded[no id]")
class DroppedIsNotCounted(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        result = super().deliver(messages)
        self._table.dropped.clear()
        return result


# Listeners.


@fault("registering answers OK though the network refuses it", "test_a_network_that_lets_us_hear_nothing")
class RegisterSwallowsErrors(HubTransport):
    async def announce(self, kind: int, filter: Filter) -> None:
        try:
            await super().announce(kind, filter)
        except UStatusError:
            return


@fault("a listener goes on hearing after unregister_listener", "test_unregistering_ends_delivery_to_that_listener_and_filter_only")
class UnregisterDoesNothing(HubTransport):
    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        await super().unregister_listener(source_filter, listener, sink_filter)
        self._table.add(source_filter, sink_filter, listener)


@fault("unregistering what is not registered answers OK", "test_unregistering_what_is_not_registered")
class NotFoundMissing(HubTransport):
    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        try:
            await super().unregister_listener(source_filter, listener, sink_filter)
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND:
                raise


@fault("a second listener of a filter takes the place of the first", "test_several_listeners_of_one_filter_each_get_it_once")
class SecondListenerReplaces(HubTransport):
    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        await super().register_listener(source_filter, listener, sink_filter)
        filter = Filter.of(source_filter, sink_filter, self._authority)
        del self._table._table[filter][:-1]
        self._table._forget()


@fault("the end of one listener ends the others of its filter", "test_unregistering_ends_delivery_to_that_listener_and_filter_only")
class UnregisterEndsAll(HubTransport):
    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        await super().unregister_listener(source_filter, listener, sink_filter)
        await self._ask(UNLISTEN, pack(Filter.of(source_filter, sink_filter, self._authority)))


@fault("registering again delivers twice", "test_registering_again_changes_nothing")
class RegisteringAgainDoubles(HubTransport):
    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        known = [one for listeners in self._table._table.values() for one in listeners]
        await super().register_listener(source_filter, _Twice(listener) if any(one is listener for one in known) else listener, sink_filter)


class _Twice:
    def __init__(self, listener: UListener) -> None:
        self.listener = listener

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        return self.listener.on_receive(message)


@fault("the limit of listeners is ignored", "test_the_limit_of_listeners_overall")
class LimitIgnored(HubTransport):
    def __init__(self, config: Any, local: Any) -> None:
        super().__init__(config, local)
        self._table = ListenerTable(self._authority, listeners_per_filter_max=config.listeners_per_filter_max)


@fault("a pair of filters that matches nothing is accepted", "test_an_invalid_pair_is_refused[(reply, reply)]")
class InvalidFiltersAccepted(HubTransport):
    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        try:
            await super().register_listener(source_filter, listener, sink_filter)
        except UStatusError as error:
            if error.code != UCode.INVALID_ARGUMENT:
                raise


# What is declared.


@fault("it declares PULL, and receive is UNIMPLEMENTED", "test_pull_is_what_is_declared")
class PullIsALie(HubTransport):
    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        raise UStatusError(UCode.UNIMPLEMENTED, "some day")


@fault("it does not declare all that it can do", "test_push_is_what_is_declared")
class DeclaresLess(HubTransport):
    capabilities = HubTransport.capabilities & ~Capability.ACK


@fault("receive answers what has expired", "test_receive_never_answers_what_has_expired")
class ReceivesExpired(HubTransport):
    def is_expired(self, message: UMessage) -> bool:
        return False


# What the suite can not see.


@fault("every 100th batch holds the loop up for 20 ms", "")
class SendBlocksNowAndThen(HubTransport):
    batches = 0

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        self.batches += 1
        if not self.batches % 100:
            time.sleep(PER_BATCH_S)  # noqa: ASYNC251 - the fault
        return await super().send_batch(messages)


@fault("every message costs a little memory for ever", "")
class Leaks(HubTransport):
    def encode(self, message: UMessage) -> bytes:
        kept: list[bytes] = self.__dict__.setdefault("kept", [])
        kept.append(super().encode(message))
        return kept[-1]


@fault("while the network is away it tries to connect without a pause", "")
class RetriesWithoutPause(HubTransport):
    retry_s = 0.0
