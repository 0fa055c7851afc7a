"""The traffic of each source authority, its quota while the streamer is behind, and our own rate toward networks with
quotas."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.building import PACE_OUTSIDE_PER_S
from streamer.operating import admin, control, metrics
from streamer.parts.senders import SenderPart
from streamer.walk.ledger import (
    BACKLOG_S,
    BURST_S,
    RELAXED_S,
    SLICES,
    TOP,
    Account,
    AuthorityLedger,
    Pressure,
    units_of,
)
from streamer.walk.sender import ANSWERS_MAX
from uprotocol import uri as uris
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Pace
from uprotocol.v1.ucode_pb2 import UCode

MakeWorld = Any
PER_S = 100
FLEET = {"vehicle": "", "cloud": "none"}


class Clock:
    """A clock, and a thread that is busy for the fraction `share` of the time."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.share = 0.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.busy += self.share * seconds


def ledger(clock: Clock, accounts_max: int = 1_000, named: str = "cloud") -> AuthorityLedger:
    return AuthorityLedger(
        accounts_max,
        PER_S,
        is_named=lambda authority, _: authority == named,
        now=lambda: clock.now,
        now_ms=lambda: int(clock.now * 1000),
        pressure=Pressure(lambda: clock.busy),
    )


def send(
    book: AuthorityLedger, account: Account, messages: int, payload_bytes: int = 0, *, is_kept: bool = False
) -> int:
    """As ingress does; how many were dropped."""
    dropped, quota = 0, account.kept if is_kept else account.passing
    for _ in range(messages):
        account.messages += 1
        account.bytes += payload_bytes
        quota.left -= units_of(payload_bytes)
        dropped += quota.left < 0 and book.is_over(account, quota)
    return dropped


def get_behind(book: AuthorityLedger, clock: Clock, share: float = 1.0) -> None:
    clock.share = share
    for _ in range(2):
        clock.pass_(0.25)
        book.pressure.look(clock.now)


def test_nobody_is_limited_while_the_streamer_keeps_up() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock, share=0.5)
    assert send(book, book.account("vin1", "fleet"), 100_000) == 0


def test_an_authority_beyond_its_quota_loses_its_own_messages_while_the_streamer_is_behind() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock)
    flood, honest, named = (
        book.account("vin1", "fleet"),
        book.account("vin2", "fleet"),
        book.account("cloud", "backend"),
    )
    burst = int(PER_S * BURST_S)
    assert send(book, flood, 10_000) == 10_000 - burst
    assert flood.dropped == 10_000 - burst
    assert send(book, honest, burst) == 0
    assert send(book, named, 10_000) == 0
    clock.pass_(1.0)
    assert 10_000 - PER_S - 1 <= send(book, flood, 10_000) <= 10_000, "a second later it has a second's quota at most"


def test_a_backlog_for_the_durable_log_is_taken_and_costs_the_calls_of_its_vehicle_nothing() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock)
    account, backlog = book.account("vin1", "fleet"), int(PER_S * BACKLOG_S)
    assert send(book, account, backlog, is_kept=True) == 0
    assert send(book, account, int(PER_S * BURST_S)) == 0, "its requests have a quota of their own"
    assert send(book, account, 1_000, is_kept=True) == 1_000, "a flood without end is bounded"


def test_large_messages_count_more() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock)
    assert send(book, book.account("vin1", "fleet"), 10, payload_bytes=99 << 10) == 10 - int(PER_S * BURST_S) // 100


def test_the_quota_counts_no_more_once_the_streamer_has_caught_up() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock)
    account = book.account("vin1", "fleet")
    assert send(book, account, 10_000)
    clock.share = 0.0
    clock.pass_(RELAXED_S - 1)
    book.pressure.look(clock.now)
    assert send(book, account, 10_000), "a flood that is dropped makes the streamer idle, and is one all the same"
    clock.pass_(RELAXED_S + 1)
    book.pressure.look(clock.now)
    assert send(book, account, 10_000) == 0


def test_what_a_transport_refuses_unread_is_counted_and_lifted_after_a_moment() -> None:
    clock = Clock()
    book = ledger(clock)
    get_behind(book, clock)
    account = book.account("vin1", "fleet")
    dropped = send(book, account, 10_000)
    clock.pass_(0.25)
    assert not book.refused(account, 50_000), "it owes what it was beyond"
    assert account.dropped == dropped + 50_000
    clock.pass_(2.0)
    assert book.refused(account, 0)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 300)), max_size=40))
def test_what_passes_is_never_more_than_burst_and_quota(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    clock.share = 1.0
    book = ledger(clock)
    get_behind(book, clock)
    account, passed, begin = book.account("vin1", "fleet"), 0, clock.now
    for seconds, messages in steps:
        clock.pass_(seconds)
        book.pressure.look(clock.now)
        passed += messages - send(book, account, messages)
    assert passed <= PER_S * (BURST_S + clock.now - begin) + 1


def test_accounts_are_bounded_and_nothing_counted_is_lost() -> None:
    clock = Clock()
    book = ledger(clock, accounts_max=100)
    evictions: list[int] = []
    book.on_evicted(lambda: evictions.append(len(book)))
    for number in range(1_000):
        send(book, book.account(f"vin{number}", "fleet"), 3, payload_bytes=10)
        clock.pass_(0.01)
        book.sample(clock.now)
    assert len(book) <= 100
    assert 80 <= len(evictions) <= 100, "holders of accounts are notified, and not for each account"
    for _ in range(2 * SLICES):
        clock.pass_(0.25)
        book.sample(clock.now)
    named = [account.own for account in book.top]
    assert book.others.messages + sum(messages for messages, _, _ in named) == 3_000
    assert book.others.bytes + sum(size for _, size, _ in named) == 30_000


@pytest.mark.parametrize("seed", range(5))
def test_what_was_dropped_is_the_sum_over_the_labels_at_any_time(seed: int) -> None:
    """Also while authorities enter the top list, leave it, or are evicted."""
    rng, clock = random.Random(seed), Clock()
    book = ledger(clock, accounts_max=TOP + 10)
    dropped = others = 0
    for _ in range(100):
        for _ in range(rng.randrange(TOP)):
            account, count = book.account(f"vin{rng.randrange(2 * TOP)}", "fleet"), rng.randrange(4)
            account.messages += count
            dropped += count
            if rng.random() < 0.5:
                book.drop(account, count)
            else:
                book.refused(account, count)
        for _ in range(rng.choice([1, SLICES])):
            clock.pass_(0.25)
            book.sample(clock.now)
        assert book.others.dropped + sum(dropped for _, _, dropped in (one.own for one in book.top)) == dropped
        assert book.others.dropped >= others, "a counter never falls"
        others = book.others.dropped


def test_the_one_who_floods_is_on_top_within_ten_seconds_and_others_never_fall() -> None:
    clock = Clock()
    book = ledger(clock)
    fleet = [book.account(f"vin{number}", "fleet") for number in range(500)]
    seen: list[tuple[int, int]] = []
    for turn in range(4 * SLICES):
        for account in fleet:
            account.messages += 1
        if turn > 2 * SLICES:
            fleet[123].messages += 1_000
        clock.pass_(0.25)
        book.sample(clock.now)
        seen.append((book.others.messages, book.others.bytes))
    assert book.top[0] is fleet[123]
    assert book.top[0].rate == pytest.approx(4_004, rel=0.05)
    assert seen == sorted(seen)
    assert len(book.top) == TOP


def test_a_name_claimed_on_another_network_costs_its_owner_nothing() -> None:
    book = ledger(Clock())
    assert book.account("vin1", "fleet") is not book.account("vin1", "elsewhere")


async def test_a_pace_holds_in_the_mean_and_a_second_may_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.pass_(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = Pace(PER_S, lambda: clock.now)
    await pace.spend(PER_S)
    assert clock.now == 0
    for _ in range(10):
        await pace.spend(PER_S)
    assert clock.now == pytest.approx(10)
    clock.pass_(100)
    await pace.spend(3 * PER_S)
    assert clock.now == pytest.approx(112), "what was not used for long is not saved up"


# In a whole streamer


async def fleet_world(make_world: MakeWorld, more: str = "") -> Any:
    networks = (
        '[[endpoint]]\nname = "home"\ntransport = "local"\nauthorities = ["cloud"]\nsettings = {{ network = '
        '"{n}-home" }}\n'
        '[[endpoint]]\nname = "fleet"\ntransport = "local"\nauthorities = ["*"]\nsettings = {{ network = "{n}-fleet" '
        "}}\n"
    )
    return await make_world(
        networks, subscriptions={"//*/8001/1/8001": ["//cloud/9001/1/0"]} if not more else None, more=more
    )


async def test_a_flood_is_that_vehicles_trouble(
    make_world: MakeWorld, publish: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world = await fleet_world(
        make_world,
        more='[history]\nrecord = ["//*/8001/1/FFFF"]\nvolatile = ["//*/8001/1/FFFF"]\n'
        "[limits]\nauthority_messages_per_s = 10\n",
    )
    streamer = world.streamer
    streamer.assembly.ledger.pressure.is_on = lambda _: True
    node = await world.node("fleet", "vin1")
    other = await world.node("fleet", "vin2")
    await node.send_batch([publish("//vin1/8001/1/8001", f"{n}") for n in range(100)])
    await other.send_batch([publish("//vin2/8001/1/8001", f"{n}") for n in range(15)])
    await world.taken("fleet")
    dropped = streamer.assembly.endpoints["fleet"].dropped["over_quota"]
    assert 75 <= dropped <= 80
    by_authority = {one["authority"]: one for one in streamer.parts.of(SenderPart).vehicles()}
    assert by_authority["vin1"]["dropped"] == dropped
    assert (by_authority["vin1"]["messages"], by_authority["vin2"]["messages"], by_authority["vin2"]["dropped"]) == (
        100,
        15,
        0,
    )
    assert streamer.assembly.logs.volatile.newest_seq == 115 - dropped
    assert by_authority["vin2"]["topics"] == 1
    for _ in range(2 * SLICES):
        streamer.assembly.ledger.sample(asyncio.get_running_loop().time())
    text = metrics.expose(streamer.parts.samples).decode()
    assert f'up_streamer_authority_dropped_total{{authority="vin1",endpoint="fleet"}} {dropped}.0' in text
    assert any("vin1" in note for note in streamer.parts.notes())


async def test_a_backlog_enters_the_durable_log_whole_while_the_streamer_is_behind(
    make_world: MakeWorld, publish: Any
) -> None:
    world = await fleet_world(
        make_world, more='[history]\nrecord = ["//*/8001/1/FFFF"]\n[limits]\nauthority_messages_per_s = 10\n'
    )
    streamer = world.streamer
    streamer.assembly.ledger.pressure.is_on = lambda _: True
    node = await world.node("fleet", "vin1")
    backlog = int(10 * BACKLOG_S)
    await node.send_batch([publish("//vin1/8001/1/8001", f"{n}") for n in range(backlog)])
    await world.taken("fleet")
    assert streamer.assembly.endpoints["fleet"].dropped["over_quota"] == 0
    assert streamer.assembly.logs.durable.newest_seq == backlog


async def test_a_request_above_the_quota_is_answered(make_world: MakeWorld) -> None:
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 1\n")
    world.assembly.ledger.pressure.is_on = lambda _: True
    node = await world.node("fleet", "vin1")
    answers = await world.hear(node, uris.ANY, uris.parse("//vin1/8001/1/0"))
    method = uris.parse("//cloud/9001/1/1")
    for _ in range(10):
        await node.send(UMessageBuilder.request(uris.parse("//vin1/8001/1/0"), method, 10_000).build())
    await answers.expect(1)
    assert answers.messages[0].attributes.commstatus == UCode.RESOURCE_EXHAUSTED


async def test_each_of_thousands_of_refused_calls_is_answered(make_world: MakeWorld) -> None:
    """Though all come at once while the way back takes nothing; an authority gets no more answers than its share."""
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 100\n")
    world.assembly.ledger.pressure.is_on = lambda _: True
    node = await world.node("fleet", "vin1")
    answers = await world.hear(node, uris.ANY, uris.parse("//vin1/8001/1/0"))
    caller, method = uris.parse("//vin1/8001/1/0"), uris.parse("//cloud/9001/1/1")
    calls = [UMessageBuilder.request(caller, method, 60_000).build() for _ in range(2_000)]
    world.assembly.ingresses["fleet"].on_receive_batch(calls)
    refused = world.assembly.endpoints["fleet"].dropped
    assert refused["over_quota"] > 1_024

    def answered() -> int:
        """How many calls were refused. On a slow machine the others are answered meanwhile: nobody serves them."""
        attributes = [message.attributes for message in answers.messages]
        assert {one.commstatus for one in attributes} <= {UCode.RESOURCE_EXHAUSTED, UCode.UNAVAILABLE}
        refusals = [one for one in attributes if one.commstatus == UCode.RESOURCE_EXHAUSTED]
        return len({one.reqid.SerializeToString() for one in refusals})

    await world.until(lambda: answered() == refused["over_quota"])
    assert refused["answers_full"] == 0
    await world.until(lambda: not len(world.assembly.express.queues["fleet"]))
    before, share = refused["over_quota"], ANSWERS_MAX // CALLERS_SHARE
    many = [UMessageBuilder.request(caller, method, 60_000).build() for _ in range(share + 1_000)]
    world.assembly.ingresses["fleet"].on_receive_batch(many)
    refusals = refused["over_quota"] - before  # not all: the quota allows some again by now
    assert refusals > share
    assert refused["answers_full"] == refusals - share


async def test_a_payload_that_is_too_large_is_not_taken(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(
        make_world, more='[history]\nrecord = ["//*/8001/1/FFFF"]\n[limits]\nmessage_bytes_max = 65536\n'
    )
    node = await world.node("fleet", "vin1")
    await node.send_batch([publish("//vin1/8001/1/8001", "x" * size) for size in (65_536, 65_537, 10)])
    await world.taken("fleet")
    assert world.assembly.logs.durable.newest_seq == 2
    assert world.assembly.endpoints["fleet"].dropped["too_large"] == 1


async def test_the_command_line_and_the_admin_port_tell_who_sends(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(make_world)
    for name, count in (("vin1", 5), ("vin2", 9)):
        node = await world.node("fleet", name)
        await node.send_batch([publish(f"//{name}/8001/1/8001", "x") for _ in range(count)])
    await world.taken("fleet")
    folder = world.config.streamer.data_dir
    async with control.ControlSocket(folder, world.streamer.operations):
        top = (await asyncio.to_thread(control.require, folder, "vehicles", {"count": 1}))["vehicles"]
    assert [one["authority"] for one in top] == ["vin2"]
    one = admin.Admin("127.0.0.1:0", list, vehicles=world.parts.of(SenderPart).vehicles)
    async with one:
        answer = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{one.port}/vehicles", None, 20)
        with answer:
            body = await asyncio.to_thread(answer.read)
    counts = {line["authority"]: line["messages"] for line in map(json.loads, body.splitlines())}
    assert counts["vin1"] == 5
    assert counts["vin2"] == 9


@pytest.mark.parametrize(
    ("of_all", "of_endpoint", "paces"),
    [
        ("", "", {"inside": None, "out": PACE_OUTSIDE_PER_S}),
        ("", "messages_per_s = 70\n", {"inside": None, "out": 70}),
        ("messages_per_s = 50\n", "", {"inside": 50, "out": 50}),
        ("messages_per_s = 50\n", "messages_per_s = 70\n", {"inside": 50, "out": 70}),
    ],
)
async def test_the_pace_of_an_endpoint(
    make_world: MakeWorld, of_all: str, of_endpoint: str, paces: dict[str, int | None]
) -> None:
    networks = (
        '[[endpoint]]\nname = "inside"\ntransport = "local"\nauthorities = ["ecu1"]\nsettings = {{ network = '
        '"{n}-inside" }}\n'
        '[[endpoint]]\nname = "out"\ntransport = "local"\nsuffix = "vin1"\nauthorities = ["cloud"]\nsettings = {{ '
        'network = "{n}-out" }}\n'
    )
    world = await make_world(networks + of_endpoint, egress=of_all)
    pumps = world.assembly.pumps
    found = {pump.peer.name: None if (pace := pump.sender.pace) is None else pace.per_s for pump in pumps}
    assert found == paces


async def test_a_transport_learns_which_sources_to_refuse_unread(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 10\n")
    streamer = world.streamer
    streamer.assembly.ledger.pressure.is_on = lambda _: True
    transport, ingress = streamer.assembly.endpoints["fleet"].transport, streamer.assembly.ingresses["fleet"]
    ingress.on_receive_batch([publish("//vin1/8001/1/8001", "x") for _ in range(100)])
    assert transport.refused == {"vin1": 0}
    transport.refused["vin1"] += 7
    before = streamer.assembly.endpoints["fleet"].dropped["over_quota"]
    ingress.gather_refused()
    assert streamer.assembly.endpoints["fleet"].dropped["over_quota"] == before + 7
    account = streamer.assembly.ledger.account("vin1", "fleet")
    account.passing.left = 10_000
    ingress.gather_refused()
    assert transport.refused == {}
