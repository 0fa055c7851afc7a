"""What the checker of the simulation lets pass, and what not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.simulation.checker import Checker, Sent
from campaigns.simulation.loop import TURNS_MAX, DeadlockError, VirtualLoop
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import Status

TOPIC = uris.parse("//vin1/8001/1/8003")
KEY = uris.key(TOPIC)


@pytest.fixture
def checker() -> Checker:
    """Of a world in which the gateway V sends what `vin1` publishes to the hearer L, and records it."""
    hops = (("V", "vehicle", "cloud"),)
    world = SimpleNamespace(
        loop=SimpleNamespace(now=1.0),
        note=lambda *_: None,
        hops=lambda *_: hops,
        passes=lambda _: {("vehicle", "cloud")},
        recorded=lambda machine: machine.records,
        excuses=lambda *_: False,
    )
    made = Checker(world)
    made.reader_topics = [TOPIC]
    made.ready(machine(TOPIC))
    return made


def machine(*records: Any) -> Any:
    return SimpleNamespace(name="V", records=list(records))


def published(checker: Checker, text: str, *, is_kept: bool = False) -> Sent:
    checker.world.loop.now += 1.0
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(text.encode(), 5))
    sent = checker.publishes(message, is_kept=is_kept)
    sent.acknowledged()
    return sent


def subscribed(checker: Checker) -> None:
    checker.wishes("L", TOPIC, True).answered(Status.SUBSCRIBED)


def test_messages_out_of_order_are_reported(checker: Checker) -> None:
    subscribed(checker)
    first, second = published(checker, "1"), published(checker, "2")
    checker.heard("L", second.message)
    checker.heard("L", first.message)
    assert [kind for kind, _ in checker.violations] == ["reordered"]


@pytest.mark.parametrize(("is_kept", "went_back"), [(True, True), (True, False), (False, True)])
def test_a_plain_copy_may_overtake_kept_records_once_ids_went_back(
    checker: Checker, is_kept: bool, went_back: bool
) -> None:
    subscribed(checker)
    checker.kept_ids_went_back = went_back
    record, copy = published(checker, "1", is_kept=is_kept), published(checker, "2", is_kept=is_kept)
    checker.heard("L", copy.message)
    checker.heard("L", record.message)
    assert [kind for kind, _ in checker.violations] == ([] if is_kept and went_back else ["reordered"])


def test_what_waited_when_its_subscription_was_ended_may_come_late(checker: Checker) -> None:
    """An endpoint that has its name again sends what it had not sent under that name."""
    subscribed(checker)
    first = published(checker, "1")
    checker.wishes("L", TOPIC, False).answered(Status.UNSUBSCRIBED)
    subscribed(checker)
    checker.heard("L", published(checker, "2").message)
    checker.heard("L", first.message)
    assert checker.violations == []


def test_commands_in_a_hurry_owe_nothing_from_before_their_unsubscribe(checker: Checker) -> None:
    """Subscribe, Unsubscribe, Subscribe: what waits for a network when they are sent is ended by the second."""
    subscribed(checker)
    published(checker, "before")
    wish = checker.wishes("L", TOPIC, True, is_hurried=True)
    published(checker, "between")
    checker.on_change("L", TOPIC, Status.SUBSCRIBED)  # by the first
    published(checker, "before the Unsubscribe was taken")
    wish.answered(Status.SUBSCRIBED)
    after = published(checker, "after")
    assert list(checker.owed["L"].values()) == [after]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_commands_in_a_hurry_of_which_the_last_is_refused_may_have_changed_something(
    checker: Checker, before: bool, wanted: bool
) -> None:
    if before:
        subscribed(checker)
    wish = checker.wishes("L", TOPIC, wanted, is_hurried=True)
    wish.unanswered()
    wish.refused(UCode.NOT_FOUND)
    assert checker.wants["L", KEY].unsure


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_command_that_is_refused_changes_nothing(checker: Checker, before: bool, wanted: bool) -> None:
    if before:
        subscribed(checker)
    checker.wishes("L", TOPIC, wanted).refused(UCode.NOT_FOUND)
    want = checker.wants["L", KEY]
    assert (want.wanted and not want.refused, want.unsure) == (before, False)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_command_that_was_refused_when_it_was_said_again_may_have_changed_something(
    checker: Checker, before: bool, wanted: bool
) -> None:
    if before:
        subscribed(checker)
    wish = checker.wishes("L", TOPIC, wanted)
    wish.unanswered()
    wish.refused(UCode.NOT_FOUND)
    assert checker.wants["L", KEY].unsure == (before != wanted)
    subscribed(checker)
    assert not checker.wants["L", KEY].unsure


def test_what_is_confirmed_by_a_gateway_that_starts_is_owed_once_that_is_ready(checker: Checker) -> None:
    """It has not opened all its networks yet."""
    checker.starts(machine(TOPIC))
    subscribed(checker)
    published(checker, "nobody listens yet")
    checker.ready(machine(TOPIC))
    after = published(checker, "after")
    assert list(checker.owed["L"].values()) == [after]


def test_what_was_confirmed_before_a_gateway_starts_is_owed_meanwhile(checker: Checker) -> None:
    subscribed(checker)
    checker.starts(machine(TOPIC))
    meanwhile = published(checker, "kept by the network")
    assert list(checker.owed["L"].values()) == [meanwhile]


def test_a_command_between_services_that_a_network_refuses_may_have_ended_a_subscription(checker: Checker) -> None:
    subscribed(checker)
    checker.no_for_good(KEY)
    assert checker.wants["L", KEY].unsure
    subscribed(checker)
    assert not checker.wants["L", KEY].unsure


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_waited_on_a_network_is_owed_to_no_reader_once_it_is_not_recorded(
    checker: Checker, is_recorded: bool
) -> None:
    published(checker, "waits for the gateway")
    checker.starts(machine(TOPIC) if is_recorded else machine())
    assert checker.outstanding == int(is_recorded)


def test_a_loop_without_progress_in_time_is_reported() -> None:
    loop = VirtualLoop(0)

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(DeadlockError, match=f"{TURNS_MAX} turns"):
        loop.run_until_complete(loop.create_future())
    loop.finish([])
