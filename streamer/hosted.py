"""What a service inside this process sees of the networks: a UTransport.

    service -> send -> another hosted service | home network | express lane or log of another endpoint
    ingress (of any endpoint) -> deliver -> service
                                    '-> a method that there is not: UNIMPLEMENTED (UNAVAILABLE while services come and go)

A hosted entity (core.ustreamer, the embedded core.usubscription) lives under the streamer's own authority, so other
networks reach it by the ordinary walk, and nothing else in the streamer treats it specially.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Final, Protocol

from streamer.endpoint import Endpoint, Endpoints
from transports.listeners import ListenerTable
from uprotocol import attributes as attrs
from uprotocol import message as messages_
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.responses import Unserved
from uprotocol.status import FINAL, OK, UStatusError
from uprotocol.transport import Capability, ConnectionCallback, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION: Final = 0x0000  # the uEntity core.usubscription

_inside: ContextVar[bool] = ContextVar("inside", default=False)


def is_inside() -> bool:
    """True while a hosted service handles what another one in this process has sent: nobody on a network can claim
    that."""
    return _inside.get()


class Walk(Protocol):
    """Where messages of hosted services enter the walk (streamer.ingress.Ingress has it)."""

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None] | None: ...


class HostedTransport(UTransport):
    """The networks as seen by services inside the streamer. `walk` and `entities_changed` are set by the composition
    root."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    walk: Walk
    entities_changed: Callable[[], Awaitable[None]]

    def __init__(self, home: Endpoint, endpoints: Endpoints, authority: str, also: Iterable[str] = ()) -> None:
        """`also`: other authorities, or families of them, for which the uSubscription in this process answers."""
        self._home, self._endpoints, self.authority, self._also = home, endpoints, authority, frozenset(also)
        self._table = ListenerTable(authority)
        self._entities: dict[int, int] = {}  # ue_id -> registrations
        self.unserved = Unserved(self)

    def __repr__(self) -> str:
        return f"HostedTransport({self.authority}, entities={[f'{entity:X}' for entity in self._entities]})"

    @property
    def dropped(self) -> dict[str, int]:
        return self._table.dropped

    def sinks(self) -> list[UUri]:
        """Filters of what is for services in this process; a family of authorities needs one for all of them."""
        also = {uris.WILDCARD_AUTHORITY if uris.is_pattern(authority) else authority for authority in self._also}
        sinks = [uris.pattern(self.authority, entity) for entity in self._entities]
        return sinks + [
            uris.pattern(authority, USUBSCRIPTION) for authority in sorted(also) if USUBSCRIPTION in self._entities
        ]

    def owns(self, sink: UUri) -> bool:
        if sink.ue_id not in self._entities:
            return False
        return sink.authority_name == self.authority or (
            sink.ue_id == USUBSCRIPTION and uris.is_one_of(sink.authority_name, self._also)
        )

    def deliver(self, messages: Sequence[UMessage], *, inside: bool = False) -> Awaitable[None] | None:
        """What has come for hosted services, from a network unless it is from `inside`."""
        # told anew each time: whoever calls may itself have been called from somewhere else
        token = _inside.set(inside)
        try:
            for message in messages:
                if message.attributes.type == attrs.REQUEST and not self._table.wants(message):
                    self.unserved.answer(message.attributes)
            return self._table.deliver(messages)
        finally:
            _inside.reset(token)

    @property
    def connected(self) -> bool:
        return self._home.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        for endpoint in self._endpoints:
            endpoint.transport.on_connection(callback)

    def toward(self, endpoint: Endpoint) -> UTransport:
        """The same, for who speaks with one network: `connected` and `on_connection` are that network's."""
        return _Toward(self, endpoint)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Behind a Notification or Publish that was not taken, no other one to the same destination leaves: that would
        be out of order."""
        statuses: list[UStatus] = []
        stopped: dict[str, UStatus] = {}  # by authority; "": everybody on the home network
        for message in messages:
            attributes = message.attributes
            destination = (
                attributes.sink.authority_name if attributes.type in (attrs.NOTIFICATION, attrs.PUBLISH) else None
            )
            if destination in stopped:
                statuses.append(stopped[destination])
                continue
            try:
                messages_.validate(message)
                if attrs.is_expired(message.attributes, uuids.now_ms()):
                    raise UStatusError(UCode.DEADLINE_EXCEEDED, "the message has expired before it was sent")
                await self._send(message)
            except UStatusError as error:
                statuses.append(error.status)
                if destination is not None and error.code not in FINAL:
                    stopped[destination] = error.status
            else:
                statuses.append(OK)
        return statuses

    async def _send(self, message: UMessage) -> None:
        attributes = message.attributes
        if not attributes.HasField("sink"):
            taken = self.walk.on_receive_batch([message])
            await self._home.send(message)
        elif self.owns(attributes.sink):
            taken = self.deliver([message], inside=True)
        elif (
            network := self._endpoints.owner(attributes.sink.authority_name)
        ) is not None and network is self._network(attributes.source):
            await network.send(message)
            return
        else:
            taken = self.walk.on_receive_batch([message])
        if taken is not None:
            await taken

    def _network(self, source: UUri) -> Endpoint | None:
        return self._home if source.authority_name == self.authority else self._endpoints.owner(source.authority_name)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if sink_filter is None:
            await self._home.register_listener(source_filter, listener)
            return
        if self._table.add(source_filter, sink_filter, listener) is None:
            return
        self.unserved.served(sink_filter)
        count = self._entities.get(sink_filter.ue_id, 0)
        self._entities[sink_filter.ue_id] = count + 1
        if count == 0:
            await self.entities_changed()

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if sink_filter is None:
            await self._home.unregister_listener(source_filter, listener)
            return
        if self._table.remove(source_filter, sink_filter, listener) is None:
            return
        self._entities[sink_filter.ue_id] -= 1
        if self._entities[sink_filter.ue_id] == 0:
            del self._entities[sink_filter.ue_id]
            await self.entities_changed()


class _Toward(UTransport):
    """See HostedTransport.toward."""

    capabilities = HostedTransport.capabilities

    def __init__(self, hosted: HostedTransport, endpoint: Endpoint) -> None:
        self._hosted, self._endpoint = hosted, endpoint

    def __repr__(self) -> str:
        return f"{self._hosted!r} toward {self._endpoint.name}"

    @property
    def connected(self) -> bool:
        return self._endpoint.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._endpoint.transport.on_connection(callback)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return await self._hosted.send_batch(messages)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._hosted.register_listener(source_filter, listener, sink_filter)

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        await self._hosted.unregister_listener(source_filter, listener, sink_filter)
