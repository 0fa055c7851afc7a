"""Compares what was heard in the same worlds with two versions of the product.

python -m campaigns.simulation.compare BEFORE AFTER        two files of `--record`, of the simulation or of one_pump.py

one line for each place (a hearer, a source, perhaps a sink) whose messages differ, and a summary; exit code 1 if any
--last-round    only the messages that were published once all faults were over and nothing waited any more, where both
                worlds want them
--whole         also what was heard before, without its order
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHOWN_MAX: Final = 3  # names of messages for each kind of difference


@dataclass(frozen=True)
class Difference:
    """What one place heard otherwise. `moved`: the first messages that came in another order, before and after."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    moved: tuple[str, str] | None = None
    more_repeats: tuple[str, ...] = ()
    fewer_repeats: tuple[str, ...] = ()
    repeats_elsewhere: bool = False

    @property
    def kinds(self) -> list[str]:
        """The names of the fields that say something."""
        return [name for name, value in vars(self).items() if value]

    def __str__(self) -> str:
        texts = []
        for name in self.kinds:
            value, word = getattr(self, name), name.replace("_", " ")
            if name == "moved":
                texts.append(f"other order ({value[1]!r} where {value[0]!r} was)")
            elif name == "repeats_elsewhere":
                texts.append(word)
            else:
                more = ", ..." if len(value) > SHOWN_MAX else ""
                texts.append(f"{len(value)} {word} ({', '.join(value[:SHOWN_MAX])}{more})")
        return "; ".join(texts)


def difference(before: Sequence[str], after: Sequence[str], *, ordered: bool = True) -> Difference | None:
    """Returns how two lists of messages differ; None: not at all. `name*2` is a repeat of `name`, which counts as
    heard by its repeat, too. With `ordered` False the lists are multisets: `name*2` stands for two of `name`."""
    if list(before) == list(after):
        return None
    old, new = _names(before), _names(after)
    old_repeats, new_repeats = _repeats(before, ordered=ordered), _repeats(after, ordered=ordered)
    both = set(old) & set(new)
    pairs = zip([name for name in old if name in both], [name for name in new if name in both], strict=True)
    found = Difference(
        missing=tuple(name for name in old if name not in both),
        extra=tuple(name for name in new if name not in both),
        moved=next(((one, other) for one, other in pairs if one != other), None) if ordered else None,
        more_repeats=tuple((new_repeats - old_repeats).elements()),
        fewer_repeats=tuple((old_repeats - new_repeats).elements()),
    )
    if found.kinds:
        return found
    return Difference(repeats_elsewhere=True) if ordered else None


def _names(messages: Sequence[str]) -> list[str]:
    """The names in the order in which they came first."""
    return list(dict.fromkeys(message.partition("*")[0] for message in messages))


def _repeats(messages: Sequence[str], *, ordered: bool) -> Counter[str]:
    """By name: how often it came again."""
    found: Counter[str] = Counter()
    for message in messages:
        name, _, times = message.partition("*")
        if times:
            found[name] += 1 if ordered else int(times) - 1
    return found


def of_last_round(messages: Sequence[str]) -> list[str]:
    return [message for message in messages if " +" in message]


def places_of(before: dict[str, Any], after: dict[str, Any], *, last_round: bool = False) -> list[str]:
    """Returns the places that are compared."""
    places = before["heard"].keys() | after["heard"].keys()
    if last_round:
        places &= {*before.get("wanted", ())} & {*after.get("wanted", ())}
    return sorted(places)


def differences(
    before: dict[str, Any], after: dict[str, Any], *, last_round: bool = False, whole: bool = False
) -> Iterator[tuple[str, Difference]]:
    """Compares two records of one world: each place that differs, and how. Places of `whole` are marked so."""
    chosen = of_last_round if last_round else list
    old, new = before["heard"], after["heard"]
    for place in places_of(before, after, last_round=last_round):
        messages = [chosen(heard[place]["messages"]) if place in heard else [] for heard in (old, new)]
        if (found := difference(*messages)) is not None:
            yield place, found
    if whole:
        old, new = before["whole"], after["whole"]
        for place in sorted(old.keys() | new.keys()):
            messages = [chosen(record.get(place, ())) for record in (old, new)]
            if (found := difference(*messages, ordered=False)) is not None:
                yield f"{place} (whole run)", found


def read(path: Path) -> dict[int, str]:
    """Returns the lines of a file by seed; a name that ends with .gz is that of a compressed file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return {json.loads(line)["seed"]: line for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.simulation.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--last-round", action="store_true")
    parser.add_argument("--whole", action="store_true")
    arguments = parser.parse_args()
    before, after = read(arguments.before), read(arguments.after)
    both = sorted(before.keys() & after.keys())
    same_runs, places, worlds, broken = 0, 0, set[int](), list[int]()
    counts: Counter[str] = Counter()
    for seed in both:
        old, new = json.loads(before[seed]), json.loads(after[seed])
        same_runs += old["run"] == new["run"]
        if old["violations"] or new["violations"]:
            broken.append(seed)
        places += len(places_of(old, new, last_round=arguments.last_round))
        for place, found in differences(old, new, last_round=arguments.last_round, whole=arguments.whole):
            worlds.add(seed)
            counts["places"] += 1
            counts.update(found.kinds)
            print(f"seed {seed} ({new['kind']}) {place}: {found}")
    kinds = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if name != "places")
    print(
        f"{len(both)} worlds in both files ({len(before) - len(both)} only in the first, {len(after) - len(both)} only "
        f"in the second), {same_runs} of them the same step by step; {places} places, of which {counts['places']} "
        f"differ in {len(worlds)} worlds" + (f": {kinds}" if kinds else "")
    )
    if broken:
        print(f"worlds with a fault, which end early: {', '.join(map(str, broken))}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
