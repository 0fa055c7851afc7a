"""One filter for all that is sent to the service, so that it comes in the order of arrival.

network -> //AUTHORITY/0/FF/FFFF -> Gate -> by version and resource -> methods, responses to own calls, notifications
                                                                    '-> a method that there is not: UNIMPLEMENTED

Networks keep the order of what comes through one filter, but not between filters: Zenoh's Python binding has a thread
for each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import structlog

from uprotocol import uri as uris
from uprotocol.communication.responses import Unserved
from uprotocol.status import UStatusError
from uprotocol.transport import ConnectionCallback, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.codec import ENTITY_TYPE

log = structlog.get_logger()


class Gate(UTransport):
    """The transport as the parts of the service see it. Their listeners have sinks of the service itself, and never
    keep it waiting."""

    def __init__(self, inner: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: other authorities, or families of them, that the service is addressed by."""
        self._inner, self._own = inner, frozenset((authority, *also))
        self._sink = uris.pattern(uris.WILDCARD_AUTHORITY if also else authority, ENTITY_TYPE)
        self.capabilities = inner.capabilities
        self._listeners: dict[tuple[int, int], list[tuple[UUri, UListener]]] = {}
        self.unserved = Unserved(inner)

    def __repr__(self) -> str:
        return f"Gate({uris.format(self._sink)}, {sum(map(len, self._listeners.values()))} listeners)"

    @property
    def connected(self) -> bool:
        return self._inner.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._inner.on_connection(callback)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return await self._inner.send_batch(messages)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None, "the service listens to what is sent to itself"
        if not self._listeners:
            await self._inner.register_listener(uris.ANY, self, self._sink)
        self.unserved.served(sink_filter)
        known = self._listeners.setdefault(_key(sink_filter), [])
        if not any(one is listener for _, one in known):
            known.append((source_filter, listener))

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        key = _key(sink_filter)
        known = self._listeners.get(key, [])
        rest = [(source, one) for source, one in known if one is not listener]
        if len(rest) == len(known):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or is gone already")
        if rest:
            self._listeners[key] = rest
            return
        del self._listeners[key]
        if not self._listeners:
            await self._inner.unregister_listener(uris.ANY, self, self._sink)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Each listener gets its share in the order of arrival."""
        shares: dict[int, tuple[UListener, list[UMessage]]] = {}
        for message in messages:
            attributes = message.attributes
            if len(self._own) > 1 and not uris.is_one_of(attributes.sink.authority_name, self._own):
                continue  # another service's
            listeners = self._listeners.get(_key(attributes.sink))
            if listeners is None:
                self.unserved.answer(attributes)
                continue
            for source, listener in listeners:
                if uris.matches(source, attributes.source):
                    shares.setdefault(id(listener), (listener, []))[1].append(message)
        for listener, share in shares.values():
            take: Any = getattr(listener, "on_receive_batch", None)
            try:
                if take is not None:
                    take(share)
                else:
                    for message in share:
                        listener.on_receive(message)
            except Exception:
                log.exception(
                    "a part of the service failed; its messages count as taken",
                    listener=repr(listener),
                    messages=len(share),
                )


def _key(sink: UUri) -> tuple[int, int]:
    return sink.ue_version_major, sink.resource_id
