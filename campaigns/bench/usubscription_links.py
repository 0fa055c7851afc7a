"""A burst of remote subscriptions: the time until all of them are confirmed.

two services:  app -> service a -> 10,000 topics -> service b
fleet:         app -> service cloud -> 30 topics of each of 1,000 vehicles -> one process that answers for all of them

Prints one JSON line. Everything runs in one process, so `cpu_s` includes the services, the networks and the fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.attributes import REQUEST
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription.service import USubscriptionService
from usubscription.state import Status

TOPICS: Final = 10_000
VEHICLES, TOPICS_EACH = 1_000, 30
SENT_TOGETHER: Final = 500


class Joins:
    """Forwards every message of one network to the other one."""

    def __init__(self, into: UTransport) -> None:
        self._into = into

    async def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        await self._into.send_batch(messages)

    def on_receive(self, message: UMessage) -> Any:
        return self.on_receive_batch([message])


class Fleet:
    """Answers every Subscribe to any vehicle and sends its change, as the service of that vehicle would."""

    def __init__(self, transport: UTransport) -> None:
        self._transport = transport

    async def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        out = []
        for message in messages:
            if message.attributes.type != REQUEST or message.attributes.sink.authority_name == "cloud":
                continue
            attributes = message.attributes
            if attributes.sink.resource_id != 1:
                out.append(UMessageBuilder.response_for_request(attributes).pack(v4.FetchSubscriptionsResponse()))
                continue
            topic, stands = UPayload.of(message).unpack(v4.SubscribeRequest).topic, v4.STATUS_SUBSCRIBED
            out.append(
                UMessageBuilder.response_for_request(attributes).pack(v4.SubscribeResponse(topic=topic, status=stands))
            )
            subscription = v4.Subscription(topic=topic, subscriber=attributes.source, status=stands)
            source = uris.uri(attributes.sink.authority_name, 0, 4, 0x8000)
            out.append(UMessageBuilder.notification(source, attributes.source).pack(subscription))
        await self._transport.send_batch(out)

    def on_receive(self, message: UMessage) -> Any:
        return self.on_receive_batch([message])


async def member(network: LocalNetwork, authority: str, ue_id: int, version: int = 1) -> LocalTransport:
    made = LocalTransport.on(network, LocalUriProvider(authority, ue_id, version))
    await made.open()
    return made


async def burst(
    service: USubscriptionService, transport: UTransport, authority: str, topics: Sequence[Any], limit_s: float
) -> dict[str, Any]:
    """Sends all Subscribes at once from one client, within the limit of waiting requests."""
    source = uris.uri(authority, 0x10, 1, 0)
    sink = uris.uri(authority, 0, 4, 1)
    requests = [
        UMessageBuilder.request(source, sink, 600_000).pack(v4.SubscribeRequest(topic=topic)) for topic in topics
    ]
    standing: set[Any] = set()
    done = asyncio.Event()

    def changed(changes: Sequence[Any]) -> None:
        standing.update(change.topic for change in changes if change.status is Status.SUBSCRIBED)
        if len(standing) == len(topics):
            done.set()

    service.on_change(changed)
    start, cpu = time.perf_counter(), time.process_time()
    for at in range(0, len(requests), SENT_TOGETHER):
        # the service refuses more than the caller's share
        while service.entry.waiting.used + 2 * SENT_TOGETHER > service.entry.waiting.caller_max:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await transport.send_batch(requests[at : at + SENT_TOGETHER])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()
    return {
        "topics": len(topics),
        "subscribed": len(standing),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }


async def two_services(directory: Path, topics: int) -> dict[str, Any]:
    networks = {name: LocalNetwork() for name in "ab"}
    ends = {name: await member(network, "bridge", 0xFFF0) for name, network in networks.items()}
    for here, there in ("ab", "ba"):
        await ends[here].register_listener(uris.ANY, Joins(ends[there]), uris.pattern(there))
    services = {}
    for name, network in networks.items():
        services[name] = USubscriptionService(await member(network, name, 0, 4), name, directory / f"{name}.db")
        await services[name].start()
    app = await member(networks["a"], "a", 0x10)
    result = await burst(
        services["a"], app, "a", [uris.uri("b", 0x20 + n // 1000, 1, 0x8000 + n % 1000) for n in range(topics)], 600
    )
    for service in services.values():
        await service.stop()
    return result


async def fleet(directory: Path, vehicles: int, topics_each: int) -> dict[str, Any]:
    network = LocalNetwork()
    others = await member(network, "fleet", 0x77)
    await others.register_listener(uris.ANY, Fleet(others), uris.pattern("*", 0, 4))
    service = USubscriptionService(await member(network, "cloud", 0, 4), "cloud", directory / "cloud.db")
    await service.start()
    app = await member(network, "cloud", 0x10)
    topics = [
        uris.uri(f"vin{vehicle}", 0x20, 1, 0x8000 + number)
        for number in range(topics_each)
        for vehicle in range(vehicles)
    ]
    result = await burst(service, app, "cloud", topics, 600)
    await service.stop()
    return {"vehicles": vehicles, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--topics", type=int, default=TOPICS)
    parser.add_argument("--vehicles", type=int, default=VEHICLES)
    parser.add_argument("--topics-each", type=int, default=TOPICS_EACH)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as one:
        services = asyncio.run(two_services(Path(one), options.topics))
    with tempfile.TemporaryDirectory() as one:
        vehicles = asyncio.run(fleet(Path(one), options.vehicles, options.topics_each))
    print(json.dumps({"two_services": services, "fleet": vehicles}))


if __name__ == "__main__":
    main()
