"""Faults of receiving, listeners and declarations; and those that the suite can't detect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final

from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.hub import TAKEN, UNLISTEN, frame, pack
from tests.transports.mutants.mutant import fault
from transports.listeners import Filter, ListenerTable
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PER_BATCH_S: Final = 0.02

# Receiving.


@fault("listeners get everything, whatever their filter", "test_a_pattern_that_does_not_match[another source resource]")
class FiltersIgnored(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        for _, listeners in list(self._table._routes.filters.values()):
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
        if (
            kind == UNLISTEN
            or filter.source.resource_id != uris.WILDCARD_RESOURCE
            or filter.source.authority_name == "*"
        ):
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
        if message is not None and attrs.is_expired(message.attributes, self._checks.now_ms()):
            message.attributes.ttl = 0
        return message


@fault("what arrives is acknowledged before a listener has taken it", "test_what_was_not_taken_comes_again")
class AckFirst(HubTransport):
    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        self._write(frame(TAKEN, numbered[-1][0]))
        super().arrived(numbered)

    def not_taken(self) -> None:
        self._taking.clear()


@fault("what is larger than its owner allows is taken", "test_what_is_larger_than_its_owner_allows_is_not_taken")
class TakesTooLarge(HubTransport):
    def takes(self, body: bytes) -> bool:
        return True


@fault("what is too large is thrown away, and not counted", "test_what_is_larger_than_its_owner_allows_is_not_taken")
class TooLargeUncounted(HubTransport):
    def takes(self, body: bytes) -> bool:
        return len(body) <= self.wire_bytes_max


@fault("what is too large costs the connection", "test_what_is_larger_than_its_owner_allows_is_not_taken")
class TooLargeDisconnects(HubTransport):
    def takes(self, body: bytes) -> bool:
        taken = super().takes(body)
        if not taken and self._writer is not None:
            self._writer.transport.abort()
        return taken


@fault(
    "what waits for a slow listener is bounded in messages, and not in bytes",
    "test_a_slow_listener_of_large_messages_is_not_handed_all_of_them",
)
class LargePileUp(HubTransport):
    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        if len(self._taking) < 10_000:
            self._write(frame(TAKEN, numbered[-1][0]))
        super().arrived(numbered)


@fault("a message on a key of somebody else is delivered", "test_what_is_on_a_key_of_somebody_else_is_discarded")
class MisplacedIsDelivered(HubTransport):
    def belongs(self, key: str, message: UMessage) -> bool:
        return True


@fault("a listener that raises ends delivery", "test_a_listener_that_raises_harms_nobody_else")
class ListenerKillsDelivery(HubTransport):
    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        failures = self._table.failures
        if failures:
            return None
        return super().deliver(messages)


@fault(
    "what is no message at all costs the connection", "test_what_is_no_message_at_all_is_discarded_and_the_rest_goes_on"
)
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


WHEN_WE_ARE_BACK: Final = "test_a_filter_that_is_refused_when_we_are_back_is_a_trouble_and_costs_no_other"


@fault("a filter that the network refuses costs the connection", "test_a_filter_that_is_refused_costs_no_other")
class RefusalEndsConnection(HubTransport):
    async def announce(self, kind: int, filter: Filter) -> None:
        try:
            await super().announce(kind, filter)
        except UStatusError:
            self.lost()


@fault("a filter that the network refuses after a reconnect costs the connection", WHEN_WE_ARE_BACK)
class RefusalAfterReconnectEndsConnection(HubTransport):
    def refused_again(self, filter: Filter, why: str) -> None:
        assert self._writer is not None
        self._writer.transport.abort()


@fault("a filter that is refused after a reconnect is not reported", WHEN_WE_ARE_BACK)
class RefusalAfterReconnectUnreported(HubTransport):
    def refused_again(self, filter: Filter, why: str) -> None: ...


@fault(
    "a listener goes on hearing after unregister_listener",
    "test_unregistering_ends_delivery_to_that_listener_and_filter_only",
)
class UnregisterDoesNothing(HubTransport):
    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await super().unregister_listener(source_filter, listener, sink_filter)
        self._table.add(source_filter, sink_filter, listener)


@fault("unregistering what is not registered answers OK", "test_unregistering_what_is_not_registered")
class NotFoundMissing(HubTransport):
    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        try:
            await super().unregister_listener(source_filter, listener, sink_filter)
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND:
                raise


@fault(
    "a second listener of a filter takes the place of the first",
    "test_several_listeners_of_one_filter_each_get_it_once",
)
class SecondListenerReplaces(HubTransport):
    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await super().register_listener(source_filter, listener, sink_filter)
        filter = Filter.of(source_filter, sink_filter, self._authority)
        routes = self._table._routes
        routes.put(filter, routes.listeners(filter)[-1:])


@fault(
    "the end of one listener ends the others of its filter",
    "test_unregistering_ends_delivery_to_that_listener_and_filter_only",
)
class UnregisterEndsAll(HubTransport):
    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await super().unregister_listener(source_filter, listener, sink_filter)
        await self._ask(UNLISTEN, pack(Filter.of(source_filter, sink_filter, self._authority)))


@fault(
    "unregistering a filter with the authority `*` does nothing",
    "test_unregistering_a_wildcard_ends_it_and_nothing_else[any source authority]",
)
class WildcardStays(HubTransport):
    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if source_filter.authority_name != "*":
            await super().unregister_listener(source_filter, listener, sink_filter)


@fault("registering again delivers twice", "test_registering_again_changes_nothing")
class RegisteringAgainDoubles(HubTransport):
    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        known = [one for _, listeners in self._table._routes.filters.values() for one in listeners]
        await super().register_listener(
            source_filter, _Twice(listener) if any(one is listener for one in known) else listener, sink_filter
        )


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
    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
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
