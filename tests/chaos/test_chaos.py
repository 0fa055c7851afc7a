"""The campaigns' own parts: the hand-written wire against the product's, the ledger and the judge; then a short run of
both kinds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from campaigns.chaos import campaigns, damage, edge, wire
from campaigns.chaos.campaigns import PLANS
from campaigns.chaos.ledger import Ledger, Verdict
from campaigns.chaos.machine import DIE, NAMESPACE, IoFault, no_namespace, no_preload
from campaigns.chaos.plan import DOWN, ROAD, USER, Places, Refusal, access_rules, cloud_config, vehicle_config
from campaigns.chaos.processes import Broker
from campaigns.chaos.web import EventReader, HeldReader, ItemBackend, ItemPublisher, PageReader, Seen
from streamer.config import loads
from tests.tiers import full
from tests.transports import zenoh_attachments
from tests.transports.mqtt5_mapping import Mapping
from transports.mqtt5.mapping import FRESH_TTL, LATE_TTL, Mode
from transports.zenoh import mapping as zenoh_mapping
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType
from uprotocol.v1.umessage_pb2 import UMessage

SOURCE = wire.Uri("vehicle1", 0x2_8001, 1, 0x8001)
SINK = wire.Uri("cloud", 0x9001, 1, 0)

ENTITIES = st.builds(lambda kind, instance: instance << 16 | kind, st.integers(0, 0xFFFE), st.integers(0, 0xFFFE))
URIS = st.builds(
    wire.Uri, st.sampled_from(["vehicle1", "cloud"]), ENTITIES, st.integers(0, 0xFE), st.integers(0, 0xFFFE)
)
MESSAGES = st.builds(
    wire.Message,
    st.builds(wire.new_id),
    st.sampled_from([wire.PUBLISH, wire.NOTIFICATION, wire.REQUEST, wire.RESPONSE]),
    URIS,
    URIS,
    st.binary(max_size=40),
    ttl_ms=st.integers(1, 100_000),
    reqid=st.none() | st.builds(wire.new_id),
)


def as_umessage(message: wire.Message) -> UMessage:
    return UMessage(attributes=UAttributes.FromString(message.attributes()), payload=message.payload)


@given(MESSAGES)
def test_what_the_judges_write_is_what_the_product_reads_and_the_other_way_round(message: wire.Message) -> None:
    product = as_umessage(message)
    assert uris.parse(str(message.source)) == product.attributes.source
    assert wire.Message.of_umessage(product.SerializeToString()) == message
    assert zenoh_attachments.decode(message.payload, message.attachment()) == product
    assert wire.Message.of_attributes(zenoh_attachments.encode(product)[1:], message.payload) == message


@given(MESSAGES)
def test_both_name_the_same_topics_and_keys(message: wire.Message) -> None:
    product = as_umessage(message)
    if message.type != wire.PUBLISH:  # whose sink, if it has one, is a streamer's
        assert message.zenoh_key() == zenoh_mapping.message_key(product, "vehicle1")
    for off_vehicle, mode in ((False, Mode.IN_VEHICLE), (True, Mode.OFF_VEHICLE)):
        attributes = product.attributes
        assert message.topic(off_vehicle) == Mapping(mode, "vehicle1").topic(
            attributes.type, attributes.source, attributes.sink
        )


ROUTES = [
    (wire.PUBLISH, SOURCE, wire.Uri.any_of("cloud")),
    (wire.NOTIFICATION, SOURCE, SINK),
    (wire.REQUEST, SINK, SOURCE._replace(resource=7)),
    (wire.RESPONSE, SOURCE._replace(resource=7), SINK),
]


@pytest.mark.parametrize(("type", "source", "sink"), ROUTES)
@pytest.mark.parametrize("ttl_ms", [1_000, 1_001])
def test_mqtt_properties_say_the_same(type: int, source: wire.Uri, sink: wire.Uri, ttl_ms: int) -> None:
    message = wire.Message(
        wire.new_id(), type, source, sink, b"payload", ttl_ms, wire.new_id() if type == wire.RESPONSE else None
    )
    properties = message.properties()
    assert wire.Message.of_mqtt(properties, message.payload) == message
    packet = Mapping(Mode.OFF_VEHICLE, "vehicle1").encode(as_umessage(message))
    ours = {
        name: getattr(properties, name, None)
        for name in ("UserProperty", "MessageExpiryInterval", "ContentType", "CorrelationData")
    }
    said = [one for one in packet.user_properties if one[0] not in (FRESH_TTL, LATE_TTL)]  # ours, beside the spec's
    assert sorted(said) == sorted(ours["UserProperty"])
    assert (packet.topic, packet.expiry_s) == (message.topic(True), ours["MessageExpiryInterval"])
    assert (packet.content_type, packet.correlation) == (ours["ContentType"], ours["CorrelationData"])


def sent(ledger: Ledger, count: int, *, flow: str = "flow", acked: bool = True) -> list[bytes]:
    ids = [wire.new_id() for _ in range(count)]
    for id in ids:
        ledger.sent(id, flow, id)
        if acked:
            ledger.acked(id)
    return ids


def judged(ledger: Ledger) -> Verdict:
    verdict = Verdict()
    ledger.judge(verdict)
    return verdict


def test_an_acknowledged_message_that_did_not_arrive_is_lost_unless_it_was_reported() -> None:
    ledger = Ledger()
    first, second, third = sent(ledger, 3)
    sent(ledger, 2, acked=False)  # nobody has promised these
    ledger.arrived("push", first, "flow", first)
    ledger.tell([second])
    verdict = judged(ledger)
    assert (verdict.acked, verdict.delivered, verdict.reported, verdict.lost) == (3, 1, 1, 1)
    assert third.hex() in verdict.examples[0]
    assert not verdict.good
    ledger.gap_records = 1
    assert judged(ledger).lost == 0


def test_what_nobody_heard_is_owed_once_the_broker_knows_that_it_is_wanted() -> None:
    ledger = Ledger()
    early, late = sent(ledger, 2, acked=False)
    ledger.acked(early, unheard=True)
    other = sent(ledger, 1, flow="another")[0]
    ledger.not_known_yet(["flow"])
    ledger.acked(late, unheard=True)  # sent before, though its answer comes only now
    owed = sent(ledger, 1, acked=False)[0]
    ledger.acked(owed, unheard=True)
    assert [entry.id for entry in ledger.missing()] == [other, owed]
    verdict = judged(ledger)
    assert (verdict.excluded, verdict.lost) == (2, 2)


def test_on_networks_that_acknowledge_nothing_what_poll_has_shown_is_owed() -> None:
    ledger = Ledger()
    shown, _ = sent(ledger, 2, acked=False)
    ledger.shown(shown)
    assert [entry.id for entry in ledger.missing()] == [shown]


def test_order_counts_within_a_flow_and_duplicates_are_counted() -> None:
    ledger = Ledger()
    one, two, three = sent(ledger, 3)
    other = sent(ledger, 1, flow="other")[0]
    for id in (one, three, two, three, one):
        ledger.arrived("push", id, "flow", id)
    ledger.arrived("push", other, "other", other)
    verdict = judged(ledger)
    assert (verdict.reordered, verdict.duplicated, verdict.lost) == (1, 2, 0)


def test_a_message_that_nobody_sent_or_that_changed_on_the_way_is_wrong() -> None:
    ledger = Ledger()
    one, two = sent(ledger, 2)
    ledger.arrived("push", one, "flow", b"something else")
    ledger.arrived("push", two, "another flow", two)
    ledger.arrived("push", wire.new_id(), "flow", b"")
    assert judged(ledger).wrong == 3


def test_what_was_under_way_when_a_broker_was_killed_does_not_count() -> None:
    ledger = Ledger()
    arrived, under_way = sent(ledger, 2)
    elsewhere = sent(ledger, 1, flow="elsewhere")[0]
    ledger.arrived("push", arrived, "flow", arrived)
    assert ledger.exclude(lambda flow: flow == "flow", acked_only=True) == 1
    verdict = judged(ledger)
    assert (verdict.excluded, verdict.lost, verdict.delivered) == (1, 1, 1)
    assert [entry.id for entry in ledger.missing()] == [elsewhere]
    assert under_way != elsewhere


def test_what_a_broker_refused_all_along_is_owed_though_it_was_killed() -> None:
    ledger, flow = Ledger(), f"{SOURCE}"
    before, other = sent(ledger, 1, flow=flow)[0], sent(ledger, 1, flow="up://vehicle1/28001/1/8002")[0]
    refusal = Refusal("cloud", ledger.now(), frozenset([flow]))
    refused = sent(ledger, 1, flow=flow)[0]
    excluded = ledger.exclude(
        lambda _: True, acked_only=False, but_for=lambda entry: refusal.has_kept(entry.flow, entry.sent_at)
    )
    assert (excluded, [entry.id for entry in ledger.missing()]) == (2, [refused])
    assert before != other


@pytest.mark.parametrize(
    ("side", "kept"), [("cloud", [True, False]), ("vehicle1", [False, True]), ("road", [True, True])]
)
def test_a_broker_that_refuses_everything_keeps_what_is_sent_to_it(side: str, kept: list[bool]) -> None:
    refusal = Refusal(side, 1.0, None)
    flows = [f"{SOURCE} > {SINK}", str(DOWN[0])]
    assert [refusal.has_kept(flow, 2.0) for flow in flows] == kept
    assert not any(refusal.has_kept(flow, 1.0) for flow in flows)


REFUSING = [name for name, plan in PLANS.items() if plan.access]


@pytest.mark.parametrize("name", REFUSING)
def test_rules_name_the_topics_and_the_user_that_gateways_have(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    at = Places(tmp_path, 1_001, dict.fromkeys(plan.brokers, 1_883), 7_447, tmp_path / "none.json")
    configs = [loads(vehicle_config(plan, at)), *([loads(cloud_config(plan, at))] if plan.two else [])]
    assert {end.settings["username"] for config in configs for end in config.endpoint} == {USER}
    for side in plan.brokers:
        mode = Mode.OFF_VEHICLE if side == ROAD or plan.off_vehicle[side] else Mode.IN_VEHICLE
        for flow in plan.flows:
            if not plan.is_sent_to(side, flow.source):
                continue
            source = uris.parse(str(flow.source))
            other = "cloud" if flow.side == "vehicle1" else "vehicle1"
            publish = flow.sink is None or flow.sink.is_any
            sink = uris.parse(str(flow.sink)) if flow.sink is not None and not publish else None
            if publish and mode == Mode.OFF_VEHICLE:
                sink = attrs.streamer_sink(other)
            type = UMessageType.UMESSAGE_TYPE_PUBLISH if publish else UMessageType.UMESSAGE_TYPE_NOTIFICATION
            assert plan.topic_at(side, flow.source, flow.sink) == Mapping(mode, other).topic(type, source, sink)


@pytest.mark.skipif(bool(campaigns.no_mosquitto()), reason=campaigns.no_mosquitto())
@pytest.mark.broker
@pytest.mark.timeout(60)
def test_a_changed_access_file_is_in_force_at_once_for_who_is_connected(tmp_path: Path) -> None:
    broker = Broker("broker", tmp_path, Counter(), access_rules(()))
    answers: SimpleQueue[int] = SimpleQueue()
    clients: list[paho.Client] = []

    def client(user: str | None) -> paho.Client:
        made, connected = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5), threading.Event()
        if user is not None:
            made.username_pw_set(user)
        made.on_connect = lambda *_: connected.set()
        made.on_publish = lambda _, __, ___, reason, ____: answers.put(reason.value)
        made.connect("127.0.0.1", broker.port)
        made.loop_start()
        assert connected.wait(10)
        clients.append(made)
        return made

    def may(who: paho.Client, topic: str) -> bool:
        who.publish(topic, b"", qos=1)
        return answers.get(timeout=10) < 0x80

    try:
        broker.start()
        broker.wait_ready()
        gateway, judge = client(USER), client(None)
        seen = [may(gateway, "a/b")]
        for rules in (access_rules(["a/b"]), access_rules(None), access_rules(())):
            broker.change_access(rules)
            seen += [may(gateway, "a/b"), may(gateway, "a/c")]
            assert may(judge, "a/b")
        assert seen == [True, False, True, False, False, True, True]
        assert gateway.is_connected()
        broker.stop()
        broker.change_access(access_rules(None))  # read at the start
        broker.start()
        broker.wait_ready()
        assert not may(client(USER), "a/b")
    finally:
        for one in clients:
            one.loop_stop()
        broker.close()


def test_what_is_followed_is_once_in_the_log_of_who_follows() -> None:
    ledger = Ledger()
    once, twice, missing = sent(ledger, 3)
    other = sent(ledger, 1, flow="other")[0]
    for id in (once, twice, twice):
        ledger.logged(id, "flow", id)
    verdict = judged(ledger)
    assert (verdict.doubled, verdict.good) == (1, False)
    assert twice.hex() in verdict.examples[0]
    assert [entry.id for entry in ledger.unlogged(lambda flow: flow == "flow")] == [missing]
    assert verdict.lost == 4  # that it is in a log is no delivery
    assert other not in {entry.id for entry in ledger.unlogged(lambda flow: flow == "flow")}


def test_a_copy_of_what_is_followed_is_excused_only_by_a_kill_before_it() -> None:
    def heard_twice(*deaths: float) -> int:
        ledger = Ledger()
        (id,) = sent(ledger, 1)
        died = [time.monotonic() + death for death in deaths]
        for _ in range(2):
            ledger.arrived("push", id, "flow", id)
        ledger.judge_copies(lambda _: True, died)
        return judged(ledger).doubled

    assert heard_twice() == 1
    assert heard_twice(-60.0, 60.0) == 1
    assert heard_twice(0.0) == 0


def test_what_is_followed_are_the_publishes_of_who_is_followed() -> None:
    up, down, note = (flow.name for flow in (PLANS["following-mqtt"].flows[at] for at in (0, 4, 6)))
    followed = {name: PLANS[name].is_followed for name in ("following-mqtt", "following-zenoh", "two-gateways")}
    assert [followed["following-mqtt"](flow) for flow in (up, down, note)] == [True, False, False]
    assert [followed["following-zenoh"](flow) for flow in (up, down, note)] == [True, True, False]
    assert not followed["two-gateways"](up)
    assert not followed["following-zenoh"]("up://vehicle1/0/3/8000")  # its uSubscription's


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.follows])
def test_who_follows_is_named_by_who_is_followed(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    at = Places(tmp_path, 1_001, dict.fromkeys(plan.brokers, 1_883), 7_447, tmp_path / "none.json", road_port=7_448)
    vehicle, cloud = loads(vehicle_config(plan, at)), loads(cloud_config(plan, at)) if plan.two else None
    if cloud is None:  # a publisher announces itself
        assert vehicle.follow == []
        return
    asked = [(one.service, {"up": "//*/4/1/0"}.get(plan.follows, "//vehicle1/4/1/0")) for one in cloud.follow]
    assert [there == expected for there, expected in asked] == [True]
    assert [one.followed_by for one in vehicle.endpoint] == [None, "//cloud/4/1/0"]
    mutual = plan.follows == "both"
    assert [one.service for one in vehicle.follow] == (["//cloud/4/1/0"] if mutual else [])
    assert [one.followed_by for one in cloud.endpoint] == [None, "//vehicle1/4/1/0" if mutual else None]


DATAGRAMS = """
import socket
from campaigns.chaos.proxy import Datagrams
link, here = Datagrams(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server = socket.create_server(("127.0.0.1", 0))
here.bind(("127.0.0.1", 0))
for do in (link.mend, link.cut, link.cut, link.mend):
    do()
    socket.create_connection(server.getsockname()).close()
    try:
        here.sendto(b"x", here.getsockname())
        print("passes")
    except OSError:
        print("cut")
"""


@pytest.mark.skipif(bool(no_namespace()), reason=no_namespace())
def test_datagrams_are_cut_in_a_network_of_their_own_and_connections_are_not() -> None:
    run = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", DATAGRAMS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stdout.split()) == (0, ["passes", "cut", "cut", "passes"]), run.stderr


def damaged(**seen: object) -> list[str]:
    """What the judge says of a log of three records, of which the cloud has not had the last two."""
    records = {seq: (bytes([seq]) * 16, b"topic", b"payload") for seq in (1, 2, 3)}
    base = damage.Base(Path(), b"i" * 16, records, {2, 3})
    fresh = [(bytes([9, place]) * 8, b"topic", damage.AFTER) for place in range(len(damage.TOPICS))]
    whole: dict[str, object] = {"delivered": [records[2], records[3], *fresh], "polled": dict(records)}
    given = {name: value(records, fresh) if callable(value) else value for name, value in seen.items()}
    return damage.judge(base, damage.Seen(**(whole | given)))  # type: ignore[arg-type]


def test_the_judge_of_damage_hears_silence() -> None:
    assert damaged() == []
    assert "never delivered" in damaged(delivered=lambda records, fresh: [records[3], *fresh])[0]
    assert damaged(delivered=lambda records, fresh: [records[3], *fresh], peer_gaps=1) == []
    assert damaged(delivered=lambda records, fresh: [records[3], *fresh], problems=["the log lost 1 record"]) == []
    assert "can't be read" in damaged(polled=lambda records, _: {1: records[1], 3: records[3]})[0]
    gap = Gap(reason=Gap.REASON_CORRUPTION, after_seq=1, before_seq=3)
    assert damaged(polled=lambda records, _: {1: records[1], 3: records[3]}, gaps=[gap]) == []
    assert (
        "not what was published"
        in damaged(delivered=lambda records, fresh: [*records.values(), (b"x" * 16, b"", b""), *fresh])[0]
    )
    assert "name other records" in damaged(polled=lambda records, fresh: records | {3: fresh[0]})[0]
    assert "not forwarded any more" in damaged(delivered=lambda records, fresh: [*records.values(), *fresh[1:]])[0]


@pytest.mark.skipif(bool(no_preload()), reason=no_preload())
def test_writes_fail_from_the_call_on_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    fault = IoFault(tmp_path, tmp_path / "root")
    program = "import os; f = os.open('root/file', os.O_CREAT | os.O_WRONLY)\n"
    program += "for _ in range(3): os.pwrite(f, b'0123456789', 0)"

    def run() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=fault.environment, capture_output=True, check=False
        )

    assert run().returncode == 0
    fault.arm(5, skip=3)
    assert run().returncode == 0  # three are left alone
    assert b"Input/output error" in run().stderr
    fault.arm(DIE, skip=1, times=1)
    (tmp_path / "root" / "file").unlink()
    assert run().returncode == -9
    assert fault.hits == 2
    assert run().returncode == 0  # once was asked for


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", sorted(damage.KINDS))
def test_no_damage_of_the_log_is_silent(kind: str, tmp_path: Path) -> None:
    structlog.reset_defaults()
    verdict = asyncio.run(damage.campaign(kind, seed=1, seconds=3, folder=tmp_path, only=damage.LOG_FILE))
    structlog.reset_defaults()
    assert sum(verdict.faults.values()) > 0
    assert (verdict.unreported, verdict.problems) == (0, []), verdict.examples


@dataclass
class EdgeParties:
    """Two items of each channel, which all readers have."""

    plain: ItemPublisher
    linked: ItemPublisher
    events: EventReader
    pages: PageReader
    held: HeldReader


Change = Callable[[EdgeParties, list[Seen]], object]
EDGE_FAILURES: list[tuple[Change, dict[str, int]]] = [
    (lambda at, records: None, {}),
    (lambda at, records: at.plain.answered.append(3), {"lost": 1}),
    (lambda at, records: at.plain.lost.append(at.plain.answered.pop()), {"wrong": 1}),
    (lambda at, records: at.linked.lost.append(at.linked.answered.pop()), {"reported": 1}),
    (lambda at, records: records[1].update(json=1), {"lost": 1, "doubled": 1, "wrong": 2}),
    (lambda at, records: records[0].update(json=7), {"lost": 1, "wrong": 3, "reordered": 1}),
    (lambda at, records: at.events.seen.pop(), {"lost": 1}),
    (lambda at, records: at.pages.seen.append(at.pages.seen[-1]), {"doubled": 1}),
    (lambda at, records: at.pages.seen.insert(0, at.pages.seen.pop()), {"reordered": 1}),
    (lambda at, records: setattr(at.held, "last", 1), {"lost": 1}),
]


@pytest.mark.parametrize(("change", "counts"), EDGE_FAILURES)
def test_the_judge_of_the_edge_counts_each_failure(change: Change, counts: dict[str, int]) -> None:
    publishers = [ItemPublisher(0, ItemBackend(0), name, pause_s=0) for name in (edge.PLAIN, edge.LINKED)]
    at = EdgeParties(
        *publishers, EventReader("e", 0, [edge.ALL]), PageReader("p", 0, [edge.ALL]), HeldReader("h", 0, edge.PLAIN)
    )
    places = enumerate((topic, number) for topic in edge.TOPICS.values() for number in (1, 2))
    records: list[Seen] = [{"topic": f"up:{topic}", "seq": seq, "json": number} for seq, (topic, number) in places]
    for publisher in publishers:
        publisher.answered = [1, 2]
    at.events.seen, at.pages.seen = ([dict(one) for one in records] for _ in range(2))
    at.held.last = 2
    change(at, records)
    judge = edge.EdgeJudge(Verdict())
    for publisher in publishers:
        judge.channel(publisher, records)
    judge.events(at.events, records)
    judge.events(at.pages, records)
    judge.held(at.held, 2)
    found = {name: getattr(judge.verdict, name) for name in ("lost", "doubled", "reordered", "wrong", "reported")}
    assert {name: count for name, count in found.items() if count} == counts, judge.verdict


@full
@pytest.mark.skipif(bool(campaigns.no_mosquitto()), reason=campaigns.no_mosquitto())
@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["kill-record", "refused", "following-mqtt", "following-publisher", "http-edge"])
def test_a_short_campaign_loses_nothing(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "campaigns.chaos",
        "--only",
        name,
        "--seed",
        "1",
        "--json",
        str(tmp_path / "result.json"),
    ]
    for minutes in ("0.1", "0.4", "1"):  # a busy machine gets to fewer faults
        done = subprocess.run([*command, "--minutes", minutes], capture_output=True, text=True, check=False)
        result = json.loads(done.stdout.splitlines()[-1])
        assert json.loads((tmp_path / "result.json").read_text()) == result
        assert done.returncode == 0, done.stderr
        total = result["total"]
        if sum(result["faults"].values()) and (name != "kill-record" or total["kills"]):
            break
    assert sum(result["faults"].values()) > 0
    assert name != "kill-record" or total["kills"] > 0
    assert total["acked"] > 100
    assert [total[key] for key in ("lost", "doubled", "reordered", "wrong", "unreported")] == [0] * 5
