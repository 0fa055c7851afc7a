"""What the checker of epochs accepts, and what it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.simulation.epochs import EpochReader, EpochsChecker
from history.epochs.assembling import Assembled
from history.records.epoch import Epoch
from history.records.record import Record
from uprotocol import uri as uris

TOPIC = uris.parse("//vin1/8006/1/8001")
LOG = b"i" * 16
LAP = Epoch("laps", (1,))


@pytest.mark.parametrize("is_torn", [True, False])
def test_what_comes_of_an_epoch_after_a_tear_is_not_held_against_who_had_it_before(is_torn: bool) -> None:
    failures: list[Any] = []
    checker = SimpleNamespace(fail=lambda *what: failures.append(what), allowed_gaps=True)
    world: Any = SimpleNamespace(machines={"V": SimpleNamespace(torn=False)}, checker=checker)
    epochs = EpochsChecker(world)
    reader = EpochReader(world, "reader", SimpleNamespace(), ["//vin1/8006/1/8001"], None, 0)  # type: ignore[arg-type]
    epochs.readers.append(reader)
    reader.lives.append([Assembled(LAP, [Record(LOG, 1, 0, 0, None)])])
    if is_torn:
        epochs.torn()
    epochs.truth[LAP] = {(LOG, 2): TOPIC}
    epochs._look_at(reader, reader.lives[0])
    assert [kind for kind, _ in failures] == ([] if is_torn else ["a part of an epoch"])


@pytest.mark.parametrize("was_set_back", [True, False])
def test_after_the_clock_was_set_back_a_bucket_is_owed_only_if_it_is_later_than_those_from_before(
    was_set_back: bool,
) -> None:
    checker = SimpleNamespace(clock_was_set_back=was_set_back)
    epochs = EpochsChecker(SimpleNamespace(checker=checker))
    reader: Any = SimpleNamespace(machine="V", topics=[TOPIC], lives=[])
    before, earlier, later = (Epoch("signals", (second,)) for second in (7, 5, 9))
    for seq, epoch in enumerate([before, earlier, later, LAP], 1):
        epochs.truth[epoch] = {(LOG, seq): TOPIC}
    epochs.newest_healed = {LOG: 1}
    assert epochs.owed(reader) == {later, LAP} | (set() if was_set_back else {earlier})
