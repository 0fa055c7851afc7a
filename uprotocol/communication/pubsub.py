"""Publish, notify, subscribe, over any UTransport.

publish(0x8001, payload) -> UMessage -> transport
subscribe(topic, listener): register the listener -> ask uSubscription -> after a failure unregister the listener
"""

from __future__ import annotations

import contextlib
from typing import Any, Unpack

from uprotocol import uri as uris
from uprotocol.communication.api import (
    MessageOptions,
    NotificationListener,
    Notifier,
    Publisher,
    Subscriber,
    SubscriptionService,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri


def finished(builder: UMessageBuilder, payload: UPayload | None, options: MessageOptions) -> UMessage:
    """Returns the valid message. Raises INVALID_ARGUMENT."""
    if (priority := options.get("priority")) is not None:
        builder.with_priority(priority)
    if (ttl_ms := options.get("ttl_ms")) is not None:
        builder.with_ttl(ttl_ms)
    if (traceparent := options.get("traceparent")) is not None:
        builder.with_traceparent(traceparent)
    return builder.build_from_upayload(payload)


class SimplePublisher(Publisher):
    """Sends each publish at once."""

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self._local = transport, local

    async def publish(
        self, resource_id: int, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        builder = UMessageBuilder.publish(self._local.get_resource(resource_id))
        await self._transport.send(finished(builder, payload, options))


class SimpleNotifier(Notifier):
    """Sends each notification at once; receives notifications to its own address."""

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self._local = transport, local

    async def notify(
        self, resource_id: int, destination: UUri, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        sink = uris.with_authority(destination, self._local.get_authority())
        builder = UMessageBuilder.notification(self._local.get_resource(resource_id), sink)
        await self._transport.send(finished(builder, payload, options))

    async def register_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        _require_topic(topic)  # with a wildcard resource the pair (FFFF, 0) would match responses, too
        await self._transport.register_listener(topic, listener, self._local.get_source())

    async def unregister_notification_listener(self, topic: UUri, listener: NotificationListener) -> None:
        _require_topic(topic)
        await self._transport.unregister_listener(topic, listener, self._local.get_source())


class InMemorySubscriber(Subscriber):
    """Keeps its listeners in memory; the service stores the subscriptions."""

    def __init__(self, transport: UTransport, local: LocalUriProvider, usubscription: SubscriptionService) -> None:
        self._transport, self._local, self._usubscription = transport, local, usubscription
        self._listeners: dict[tuple[str, int, int, int], list[UListener]] = {}

    async def subscribe(self, topic: UUri, listener: UListener, **options: Any) -> Any:
        topic = self._complete(topic)
        listeners = self._listeners.setdefault(uris.key(topic), [])
        known = any(one is listener for one in listeners)
        if not known:
            listeners.append(listener)
        try:
            # before the request, so that no message after the answer is missed
            await self._transport.register_listener(topic, listener)
            return await self._usubscription.subscribe(topic, **options)
        except BaseException:
            if not known:
                with contextlib.suppress(UStatusError):  # the caller gets the first failure
                    await self._forget(topic, listener)
            raise

    async def unsubscribe(self, topic: UUri, listener: UListener | None = None) -> None:
        topic = self._complete(topic)
        listeners = self._listeners.get(uris.key(topic), [])
        leaving = list(listeners) if listener is None else [one for one in listeners if one is listener]
        if listener is not None and not leaving:
            what = f"this listener is not subscribed to {uris.format(topic)}: give none to end the subscription"
            raise UStatusError(UCode.NOT_FOUND, what)
        if len(leaving) == len(listeners):
            # before the listeners are removed: after a failure nothing has changed, and the caller may try again
            await self._usubscription.unsubscribe(topic)
        for one in leaving:
            await self._forget(topic, one)

    async def _forget(self, topic: UUri, listener: UListener) -> None:
        listeners = self._listeners.pop(uris.key(topic), [])
        if rest := [one for one in listeners if one is not listener]:
            self._listeners[uris.key(topic)] = rest
        try:
            await self._transport.unregister_listener(topic, listener)
        except UStatusError as error:
            if error.code != UCode.NOT_FOUND:  # never registered, or removed when the transport was closed
                raise

    def _complete(self, topic: UUri) -> UUri:
        _require_topic(topic)
        return uris.with_authority(topic, self._local.get_authority())


def _require_topic(topic: UUri) -> None:
    if not uris.is_topic(topic):
        raise invalid(f"a topic has a resource of 8000 to FFFE, got {uris.format(topic)}")
