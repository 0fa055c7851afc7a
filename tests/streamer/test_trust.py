"""What a gateway permits others with its own uSubscription: who may Reset, and the share of one caller."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.operating.metrics import expose
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

NETWORKS = {"vehicle": "", "cloud": "none"}


async def call(
    world: Any,
    network: str,
    caller: LocalUriProvider,
    method: tuple[int, int],
    request: Any = None,
    ttl_ms: int = 20_000,
) -> UCode.ValueType:
    node = await world.node(network, caller.get_authority(), 0x7001)
    sink = uris.uri("vehicle1", 0, *method)
    async with InMemoryRpcClient(node, caller) as rpc:
        try:
            await rpc.invoke_method(
                sink, UPayload.pack(request) if request is not None else None, CallOptions(timeout_ms=ttl_ms)
            )
        except UStatusError as error:
            return error.code
    return UCode.OK


def topic(number: int) -> v4.SubscribeRequest:
    return v4.SubscribeRequest(topic=uris.uri("vehicle1", 0x20, 1, 0x8001 + number))


@pytest.mark.parametrize("reset", ["linked", "off"])
async def test_a_stranger_on_either_network_ends_nothing(make_world: Any, reset: str) -> None:
    world = await make_world(NETWORKS, more=f'[usubscription]\nreset = "{reset}"\n')
    for number in range(20):
        assert await call(world, "vehicle", LocalUriProvider("vehicle1", 0x10, 1), (4, 1), topic(number)) == UCode.OK
    for version, method in ((3, 9), (4, 6)):
        assert await call(world, "cloud", LocalUriProvider("cloud", 0, 3), (version, method)) == UCode.PERMISSION_DENIED
        # the answer to who claims to be the service itself goes to the service itself
        assert (
            await call(world, "vehicle", LocalUriProvider("vehicle1", 0, 3), (version, method), ttl_ms=500)
            == UCode.DEADLINE_EXCEEDED
        )
    await world.until(lambda: world.assembly.usubscription.refused["reset"] == 4)
    assert len(await world.assembly.usubscription.subscriptions()) == 20
    metrics = expose(world.parts.samples).decode()
    assert 'up_streamer_usubscription_refused_total{reason="reset"} 4.0' in metrics
    assert 'up_streamer_usubscription_requests_total{method="subscribe_v4"} 20.0' in metrics


async def test_the_memory_that_is_given_says_how_many_subscriptions_one_caller_may_have(make_world: Any) -> None:
    world = await make_world(NETWORKS, more="[limits]\nmemory_mib = 32\n")
    service = world.assembly.usubscription
    whole = world.assembly.limits.subscriptions_max
    assert service.store.database.subscriptions.whole == whole == 4_096
    service.store.database.subscriptions.add(("cloud", 0), whole // 8)  # as if it had so many
    assert await call(world, "cloud", LocalUriProvider("cloud", 0, 4), (4, 1), topic(1)) == UCode.RESOURCE_EXHAUSTED
    assert await call(world, "vehicle", LocalUriProvider("vehicle1", 0x10, 1), (4, 1), topic(1)) == UCode.OK
    assert 'up_streamer_usubscription_refused_total{reason="subscriptions"} 1.0' in expose(world.parts.samples).decode()
