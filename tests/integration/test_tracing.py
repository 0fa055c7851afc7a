"""The spans of a message from MQTT to Zenoh through a real gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.operating.collector import PARENT, TRACE, TRACEPARENT, Collector, attributes_of
from tests.operating.collector import collector as collector
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

COMMAND = "//cloud/9001/1/8001"
MakeGateway = Callable[..., Awaitable[Any]]


async def test_a_message_from_mqtt_to_zenoh_is_traced(
    make_gateway: MakeGateway, broker: Any, collector: Collector
) -> None:
    began_ns = time.time_ns()
    extra = f'[tracing]\notlp = "{collector.url}"\n'
    gateway = await make_gateway(broker, "vehicle cloud", {COMMAND: ["//vehicle1/8001/1/0"]}, extra=extra)
    heard = await gateway.hear(await gateway.zenoh(), uris.parse(COMMAND))
    builder = UMessageBuilder.publish(uris.parse(COMMAND)).with_traceparent(TRACEPARENT)
    sent = builder.build_from_upayload(UPayload(b"open", 4))
    await (await gateway.mqtt()).send(sent)
    await heard.expect(1)
    assert heard.messages[0].attributes.traceparent == TRACEPARENT
    spans = await asyncio.to_thread(collector.named, "receive", "append", "send")
    for span in spans.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.status.code == 0
    ends = [(spans[name].start_time_unix_nano, spans[name].end_time_unix_nano) for name in ("receive", "append")]
    assert began_ns <= ends[0][0] <= ends[0][1] == ends[1][0] < ends[1][1] <= time.time_ns()
    assert ends[1][0] < spans["send"].start_time_unix_nano <= spans["send"].end_time_unix_nano
    assert [attributes_of(spans[name].attributes)["uprotocol.endpoint"] for name in ("receive", "send")] == [
        "cloud",
        "vehicle",
    ]
    metrics = await gateway.until(lambda found: found['spans_total{result="exported"}'] >= 3)
    assert metrics['spans_total{result="lost"}'] == 0
