"""Spans of messages at an OpenTelemetry collector, and what becomes of them when it is away."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamer.config import Config, TracingSection, loads
from streamer.operating import tracing
from streamer.operating.tracing import SpanExporter, check_tracing, headers_of
from streamer.parts.readiness import Readiness
from streamer.parts.reloading import Reloader
from streamer.reporting import build
from streamer.spans import EVENTS_MAX, SENDING_MAX, MessageSpans, TraceSpan
from tests.operating.collector import PARENT, TRACE, TRACEPARENT, Collector, attributes_of
from tests.operating.collector import collector as collector
from tests.streamer.conftest import MakeWorld, World, publication
from tests.streamer.conftest import make_world as make_world
from transports.base import NOT_TRIED
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK, UStatusError, nobody_listens
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

SPEED = "up://vehicle1/8001/1/8001"
AT_CLOUD = {SPEED: ["//cloud/9001/1/0"]}
TWO = {"vehicle": "", "cloud": "none"}


def toml(collector: Collector, more: str = "") -> str:
    return f'[tracing]\notlp = "{collector.url}"\n{more}\n'


def traced(traceparent: str = TRACEPARENT, payload: str = "x") -> EncodedMessage:
    return EncodedMessage.of(publication(SPEED, payload, traceparent=traceparent))


async def published(make_world: MakeWorld, collector: Collector, more: str = "") -> World:
    """A streamer through which one traced message has gone."""
    world = await make_world(TWO, AT_CLOUD, more=toml(collector, more))
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(SPEED))
    node = await world.node("vehicle", "vehicle1")
    message = publication(SPEED, "fast", traceparent=TRACEPARENT)
    await node.send(message)
    await heard.expect(1)
    assert heard.messages == [message], "it is forwarded as it is"
    return world


# -- through a streamer


async def test_a_message_has_the_spans_receive_append_and_send(make_world: MakeWorld, collector: Collector) -> None:
    world = await published(make_world, collector)
    spans = await asyncio.to_thread(collector.named, "receive", "append", "send")
    assert sorted(span.name for span in collector.spans) == ["append", "receive", "send"]
    for span in spans.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert len(span.span_id) == 8
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.status.code == 0
        found = attributes_of(span.attributes)
        assert found["uprotocol.source"] == uris.format(uris.parse(SPEED))
        assert found["messaging.message.body.size"] == 4
    assert len({span.span_id for span in spans.values()}) == 3
    receive, append, send = (attributes_of(spans[name].attributes) for name in ("receive", "append", "send"))
    assert receive["uprotocol.endpoint"] == "vehicle"
    assert (append["uprotocol.log"], append["uprotocol.seq"]) == (
        "durable",
        world.assembly.logs.durable.newest_seq,
    )
    assert (send["uprotocol.endpoint"], send["uprotocol.attempts"], send["uprotocol.code"]) == ("cloud", 1, "OK")
    assert spans["receive"].end_time_unix_nano == spans["append"].start_time_unix_nano
    assert spans["append"].end_time_unix_nano >= spans["append"].start_time_unix_nano
    (resource,) = {tuple(sorted(one.items())) for one in collector.resources}
    expected = {"service.name": "up-streamer", "service.instance.id": "vehicle1", "service.version": build()[0]}
    assert dict(resource) == expected
    counted = [("spans", ("exported",), 3), ("spans", ("lost",), 0)]
    await world.until(lambda: [one for one in world.parts.samples() if one[0] == "spans"] == counted)


async def test_a_request_and_its_response_have_spans_without_a_log(make_world: MakeWorld, collector: Collector) -> None:
    world = await make_world(TWO, more=toml(collector))
    method, reply_to = uris.parse("up://cloud/9001/1/1"), uris.parse("up://vehicle1/8001/1/0")
    server, client = await world.node("cloud", "cloud", 0x9001), await world.node("vehicle", "vehicle1")
    asked = await world.hear(server, uris.parse("//*/FFFFFFFF/FF/0"), method)
    request = UMessageBuilder.request(reply_to, method, 10_000).with_traceparent(TRACEPARENT).build()
    await client.send(request)
    await asked.expect(1)
    spans = await asyncio.to_thread(collector.named, "receive", "send")
    assert "append" not in spans
    for name, endpoint in (("receive", "vehicle"), ("send", "cloud")):
        found = attributes_of(spans[name].attributes)
        assert (found["uprotocol.endpoint"], found["uprotocol.type"]) == (endpoint, "request")
        assert found["uprotocol.sink"] == uris.format(method)


async def test_what_a_network_refuses_is_held_or_a_dead_letter_in_its_trace(
    make_world: MakeWorld, collector: Collector
) -> None:
    world = await make_world(TWO, AT_CLOUD, more=toml(collector))
    reply_to, method = uris.parse("up://vehicle1/8001/1/0"), uris.parse("up://cloud/9001/1/1")
    request = UMessageBuilder.request(reply_to, method, 10_000).with_traceparent(TRACEPARENT).build()
    endpoint = world.assembly.endpoints["cloud"]
    for message in (request, traced().decoded()):
        world.networks["cloud"].refuse(endpoint.addressed(EncodedMessage.of(message))[0])
        await (await world.node("vehicle", "vehicle1")).send(message)
        number, event = (1, "dead letter") if message is request else (2, "held: refused")
        spans = await asyncio.to_thread(
            collector.until, lambda spans, number=number: [one for one in spans if one.name == "send"][number - 1 :]
        )
        send = [one for one in spans if one.name == "send"][-1]
        assert [one.name for one in send.events] == ["not taken", event]
        assert send.status.code == 2
        assert attributes_of(send.events[-1].attributes)["uprotocol.code"] == "PERMISSION_DENIED"


async def test_a_collector_that_is_away_costs_spans_and_nothing_else(
    make_world: MakeWorld, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "COLLECTOR_PAUSE_S", 0.01)
    collector.status = 503
    world = await published(make_world, collector)
    await world.until(lambda: any("503" in note for note in world.parts.notes()))
    assert world.parts.of(Readiness).states.worst == "ready"
    collector.status = 200
    node = await world.node("vehicle", "vehicle1", 0x8002)
    await node.send(publication(SPEED, "again", traceparent=TRACEPARENT))
    await asyncio.to_thread(collector.named, "send")
    await world.until(lambda: not any("503" in note for note in world.parts.notes()))


async def test_a_reload_begins_and_ends_tracing(make_world: MakeWorld, collector: Collector) -> None:
    world = await make_world(TWO, AT_CLOUD)
    node = await world.node("vehicle", "vehicle1")
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(SPEED))

    async def reload(section: dict[str, Any]) -> list[str]:
        given = {name: getattr(world.config, name) for name in world.config.model_fields_set}
        world.parts.of(Reloader).read = lambda: Config.model_validate(given | {"tracing": section})
        return [str(one) for one in await world.parts.of(Reloader).reload()]

    assert await reload({"otlp": collector.url}) == [f"~ tracing.otlp: none -> {collector.url}"]
    await node.send(publication(SPEED, "1", traceparent=TRACEPARENT))
    await asyncio.to_thread(collector.named, "receive", "append", "send")
    await reload({})
    assert all(endpoint.spans is None for endpoint in world.assembly.endpoints)
    await node.send(publication(SPEED, "2", traceparent=TRACEPARENT))
    await heard.expect(2)
    assert len(collector.spans) == 3


async def test_a_token_for_the_collector_is_read_from_a_file(
    make_world: MakeWorld, collector: Collector, tmp_path: Path
) -> None:
    (tmp_path / "headers").write_text("Authorization: Bearer t0ken\n\nX-Scope-OrgID: fleet\n")
    await published(make_world, collector, f'headers_file = "{tmp_path}/headers"\nservice_name = "gateway"')
    await asyncio.to_thread(collector.named, "send")
    assert (collector.headers["Authorization"], collector.headers["X-Scope-OrgID"]) == ("Bearer t0ken", "fleet")
    assert collector.resources[0]["service.name"] == "gateway"


# -- which spans a message has


class Made:
    def __init__(self, share: float = 1.0) -> None:
        self.found: list[TraceSpan] = []
        self.spans = MessageSpans(self.found.append, share)

    def answer(self, message: EncodedMessage, *statuses: UStatus) -> None:
        for status in statuses:
            self.spans.ready("cloud", [message])
            self.spans.answered("cloud", [message], [status])


@pytest.mark.parametrize(
    ("traceparent", "share", "spans"),
    [
        (f"00-{TRACE}-{PARENT}-00", 1.0, 0),
        (f"00-{TRACE}-{PARENT}-03", 1.0, 1),
        (TRACEPARENT, 0.0, 0),
        (f"00-{TRACE[:18]}{'0' * 13}1-{PARENT}-01", 0.001, 1),
        (f"00-{TRACE[:18]}{'f' * 14}-{PARENT}-01", 0.999, 0),
        (f"00-{TRACE[:18]}{'f' * 14}-{PARENT}-01", 1.0, 1),
    ],
)
def test_only_sampled_messages_and_the_wanted_share_of_their_traces_have_spans(
    traceparent: str, share: float, spans: int
) -> None:
    made = Made(share)
    made.answer(traced(traceparent), OK)
    made.spans.received("vehicle", traced(traceparent))
    assert len(made.found) == 2 * spans


def test_a_message_without_a_traceparent_has_none() -> None:
    made, message = Made(), EncodedMessage.of(publication(SPEED))
    made.answer(message, OK)
    made.spans.received("vehicle", message)
    made.spans.dead("cloud", message, UCode.INTERNAL, "why")
    offer = [].append
    assert made.spans.appended("vehicle", "durable", [message], offer) is offer
    assert made.found == []


def test_what_is_sent_again_is_one_span_with_all_its_attempts() -> None:
    made, away = Made(), UStatus(code=UCode.UNAVAILABLE, message="away")
    behind = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)
    made.answer(traced(), *[away] * (EVENTS_MAX + 3), behind, OK)
    (span,) = made.found
    assert (span.name, span.attributes["uprotocol.attempts"], span.error) == ("send", EVENTS_MAX + 4, "")
    assert [name for _, name, _ in span.events] == ["not taken"] * EVENTS_MAX


async def test_what_is_refused_ends_and_says_what_becomes_of_it() -> None:
    denied = UStatus(code=UCode.PERMISSION_DENIED, message="no")
    for event in ("held: refused", "dead letter"):
        made, message = Made(), traced()
        made.answer(message, denied)
        assert made.found == [], "in the same step"
        if event == "dead letter":
            made.spans.dead("cloud", message, UCode.PERMISSION_DENIED, "no")
        else:
            made.spans.held("cloud", message, "refused", denied)
        (span,) = made.found
        assert [name for _, name, _ in span.events] == ["not taken", event]
        assert (span.error, span.attributes["uprotocol.code"]) == ("no", "PERMISSION_DENIED")
    made = Made()
    made.answer(traced(), nobody_listens("nobody"))
    await asyncio.sleep(0)
    assert [(span.name, span.attributes["uprotocol.code"]) for span in made.found] == [("send", "UNAVAILABLE")]


async def test_an_append_that_fails_says_why() -> None:
    made, answer = Made(), asyncio.get_running_loop().create_future()
    plain = EncodedMessage.of(publication(SPEED))
    made.spans.appended("vehicle", "durable", [plain, traced()], lambda _: None)(answer)
    assert [span.name for span in made.found] == ["receive"]
    answer.set_exception(UStatusError(UCode.RESOURCE_EXHAUSTED, "full"))
    await asyncio.sleep(0)
    _, append = made.found
    assert append.attributes["uprotocol.code"] == "RESOURCE_EXHAUSTED"
    assert "full" in append.error


def test_the_number_of_open_spans_is_bounded() -> None:
    made = Made()
    for number in range(SENDING_MAX + 2):
        made.spans.ready("cloud", [traced(payload=str(number))])
    assert [span.attributes["uprotocol.attempts"] for span in made.found] == [0, 0]


# -- the exporter


def test_a_full_queue_and_what_a_collector_rejects_are_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "QUEUE_SPANS_MAX", 2)
    monkeypatch.setattr(tracing, "SPANS_GATHER_S", 60.0)
    collector.rejected = 1
    exporter = SpanExporter(TracingSection(otlp=collector.url), "vehicle1")
    made = Made()
    made.answer(traced(), OK)
    for _ in range(3):
        exporter.put(made.found[0])
    assert exporter.lost == 1
    exporter.end()
    exporter.wait()
    assert (exporter.exported, exporter.lost, exporter.trouble) == (1, 2, "")


def test_a_wrong_section_is_refused(tmp_path: Path) -> None:
    endpoint = '[[endpoint]]\nname = "a"\ntransport = "local"\nauthorities = ["a"]\nsettings = { network = "n" }\n'
    for wrong, why in (("share = 0.5", "which is not set"), ('otlp = "127.0.0.1:4318"', "address of a collector")):
        with pytest.raises(UStatusError, match=why):
            loads(f"[tracing]\n{wrong}\n{endpoint}")
    (tmp_path / "headers").write_text("Authorization Bearer x\n")
    with pytest.raises(UStatusError, match="headers:1: expected NAME: VALUE"):
        headers_of(tmp_path / "headers")
    for section in (
        TracingSection(otlp="http://c:4318", headers_file=tmp_path / "headers"),
        TracingSection(otlp="https://c:4318", ca_file=tmp_path / "headers"),
    ):
        with pytest.raises(UStatusError, match="tracing") as caught:
            check_tracing(section)
        assert caught.value.code == UCode.FAILED_PRECONDITION


def test_without_the_package_the_check_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_tracing(TracingSection())
    with pytest.raises(UStatusError, match="pip install opentelemetry-proto"):
        check_tracing(TracingSection(otlp="http://127.0.0.1:4318"))


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    code = "import asyncio, sys, streamer.app; from types import SimpleNamespace as Made; "
    code += "from streamer.config import TracingSection; from streamer.parts.tracing import TracingPart; "
    code += "config = Made(authority='a', tracing=TracingSection()); "
    code += "part = TracingPart(Made(config=config, endpoints=[], dead_letters=Made()), None); "
    code += "asyncio.run(part.start()); print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
