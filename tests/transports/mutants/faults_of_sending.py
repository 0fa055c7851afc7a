"""Faults of sending and of its answers."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence

from tests.transports.mutants.end import NO_ROOM, HubTransport
from tests.transports.mutants.hub import IF_HEARD, MESSAGE_BYTES_MAX, SEND
from tests.transports.mutants.mutant import fault
from transports.base import OK, too_large
from uprotocol import attributes as attrs
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus


@fault("the caller's message is changed", "test_what_is_sent_belongs_to_the_caller")
class ChangesTheMessage(HubTransport):
    def encode(self, message: UMessage) -> bytes:
        if not message.attributes.priority:
            message.attributes.priority = UPriority.UPRIORITY_CS1
        return super().encode(message)


@fault(
    "an address without authority arrives as the receiver's", "test_an_address_without_authority_means_the_senders_host"
)
class HostLost(HubTransport):
    def serialise(self, message: UMessage) -> bytes:
        return message.SerializeToString()

    def belongs(self, key: str, message: UMessage) -> bool:
        return True


class _Losing(HubTransport):
    """Drops a part of each message."""

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


@fault("trailing newlines of a payload are stripped", "test_a_payload_survives_whatever_it_ends_with")
class NewlinesStripped(_Losing):
    def lose(self, message: UMessage) -> None:
        if message.payload.endswith(b"\n"):
            message.payload = message.payload.rstrip(b"\n")


@fault("a payload above 100 KiB holds the loop up for 0.1 s", "test_a_large_payload_does_not_block_the_loop")
class LargeBlocks(HubTransport):
    def encode(self, message: UMessage) -> bytes:
        if len(message.payload) > 100 << 10:
            time.sleep(0.1)
        return super().encode(message)


@fault("an error answer of the network counts as sent", "test_what_the_network_answers_with_an_error_is_not_sent")
class ErrorIsOk(HubTransport):
    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        status = await super().answer(posted)
        return OK if status == NO_ROOM else status


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
            attrs.validate_route(
                attributes.type, attributes.source, attributes.sink if attributes.HasField("sink") else None
            )
        except UStatusError as error:
            return error.status
        return super().refusal(message, now_ms) if attrs.is_expired(attributes, now_ms) else None


@fault("an invalid message stops the rest of its batch", "test_what_is_refused_does_not_stop_the_rest")
class InvalidStopsTheBatch(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        now_ms = self._checks.now_ms()
        good = list(itertools.takewhile(lambda one: self.refusal(one, now_ms) is None, messages))
        statuses = await super().send_window(good)
        if len(good) < len(messages):
            refusal = self.refusal(messages[len(good)], now_ms)
            assert refusal is not None
            statuses += [refusal] * (len(messages) - len(good))
        return statuses


@fault("an address that is refused stops the rest of its batch", "test_an_address_that_is_refused_costs_no_other")
class RefusalStopsTheBatch(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses: list[UStatus] = []
        for message in messages:
            statuses += await super().send_window([message])
            if statuses[-1].code == UCode.PERMISSION_DENIED:
                return statuses + statuses[-1:] * (len(messages) - len(statuses))
        return statuses


@fault(
    "a refused address is answered UNAVAILABLE, as if the network were away",
    "test_an_address_that_is_refused_costs_no_other",
)
class RefusalIsUnavailable(HubTransport):
    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        status = await super().answer(posted)
        if status.code == UCode.PERMISSION_DENIED:
            return UStatus(code=UCode.UNAVAILABLE, message=status.message)
        return status


@fault(
    "it declares ABSENCE, and a publish that nobody hears is answered OK",
    "test_a_publish_that_nobody_hears_is_reported_and_waits_for_its_sender",
)
class AbsenceIsOk(HubTransport):
    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        status = await super().answer(posted)
        return OK if is_nobody_listening(status) else status


@fault(
    "a publish that nobody hears is answered so, and comes by itself later",
    "test_a_publish_that_nobody_hears_is_reported_and_waits_for_its_sender",
)
class AbsentComesLater(HubTransport):
    def post(self, message: UMessage, now_ms: int) -> UStatus | asyncio.Future[bytes]:
        posted = super().post(message, now_ms)
        if self.tells_absence and isinstance(posted, asyncio.Future):
            self.ask_again(posted, message)
        return posted

    def ask_again(self, posted: asyncio.Future[bytes], message: UMessage) -> None:
        """Repeat the request after the sender has got its answer."""

        def again(done: asyncio.Future[bytes]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, UStatusError) and is_nobody_listening(error.status) and self._connected:
                self.ask_again(self._post(IF_HEARD, self.encode(message)), message)

        posted.add_done_callback(again)


@fault(
    "a notification that nobody hears is answered as a publish is",
    "test_only_a_publish_or_request_needs_somebody_who_listens",
)
class NotificationsWait(HubTransport):
    def _post(self, kind: int, body: bytes) -> asyncio.Future[bytes]:
        return super()._post(IF_HEARD if kind == SEND and self.tells_absence else kind, body)


@fault("all addresses have one name", "test_an_address_has_a_name_that_tells_it_from_others")
class OneAddress(HubTransport):
    def address_of(self, source: UUri, sink: UUri | None) -> str:
        return "hub"


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


@fault("what is larger than its owner allows is sent", "test_what_is_larger_than_its_owner_allows_is_not_sent")
class OwnersLimitIgnored(HubTransport):
    def bytes_max(self) -> int:
        return MESSAGE_BYTES_MAX


@fault("what is too large stops the rest of its batch", "test_what_is_larger_than_its_owner_allows_is_not_sent")
class TooLargeStopsTheBatch(HubTransport):
    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        good = list(itertools.takewhile(lambda one: len(self.encode(one)) <= self.bytes_max(), messages))
        statuses = await super().send_window(good)
        return statuses + [too_large(0, self.bytes_max())] * (len(messages) - len(good))


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
