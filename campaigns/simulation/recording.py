"""What the applications heard in one world, as one line of JSON, so that two versions of the product can be compared.

begin: all faults are over -> last_round: every publisher sends once more -> end: other faults begin (dead letters)

    {"seed": 7, "kind": "chain", "run": digest of all that happened, "violations": 0,
     "heard": {"L //vin1/8001/1/8001": {"digest": ..., "messages": ["vin 3", "vin 4*2", "vin +1"]}},
     "wanted": ["L //vin1/8001/1/8001"],
     "whole": {"L //vin1/8001/1/8001": ["vin 1", "vin 3", "vin 4*2", "vin +1"]}}

"heard" has what came between begin and end, in this order; `*2`: for the second time. "whole" has what came from the
first moment to the last, in the order of publishing; `*2`: twice. A place is a hearer, a source and perhaps a sink;
"wanted" has those of publishes that somebody wants in the last round.

A message has its text as its name: the ids come from clocks and random numbers. Texts that are sent several times get
`:2`, `:3`. In the last round the names count from 1 (`vin +1`), however many were sent before.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from uprotocol import uri as uris
from uprotocol.uri import Key
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from campaigns.simulation.checker import Sent


class Recording:
    """The checker calls `published` and `heard`; the world calls `begin`, `last_round` and `end`."""

    def __init__(self) -> None:
        self._is_on = self._is_last_round = False
        self._names: dict[bytes, str] = {}  # by id
        self._uses: Counter[str] = Counter()  # of a text; of a publisher in the last round
        self._heard: defaultdict[str, list[str]] = defaultdict(list)  # by place
        self._whole: defaultdict[str, Counter[bytes]] = defaultdict(Counter)  # by place: ids
        self._wanted: list[str] = []  # places

    def begin(self) -> None:
        self._is_on = True

    def last_round(self, wanted: Iterable[tuple[str, Key]]) -> None:
        """`wanted`: the hearers of publishes, and the topics that they want now."""
        self._is_last_round = True
        self._wanted = sorted(f"{hearer} {_written(uris.uri(*topic))}" for hearer, topic in wanted)

    def end(self) -> None:
        self._is_on = False

    def published(self, sent: Sent) -> None:
        text = sent.message.payload.decode()
        if self._is_last_round:
            text = text.rpartition(" ")[0] + " +"
        self._uses[text] += 1
        count = self._uses[text]
        self._names[sent.id] = f"{text}{count}" if self._is_last_round else f"{text}:{count}" if count > 1 else text

    def heard(self, hearer: str, sent: Sent, times: int) -> None:
        """`times`: this one included."""
        place = place_of(hearer, sent.message)
        self._whole[place][sent.id] += 1
        if self._is_on:
            self._heard[place].append(_times(self._names[sent.id], times))

    def line(self, seed: int, kind: str, run: str, violations: int) -> str:
        """Returns the line of JSON, without a line break. `run`: the digest of the world."""
        heard = {place: {"digest": _digest(names), "messages": names} for place, names in sorted(self._heard.items())}
        whole = {
            place: [_times(name, times[id]) for id, name in self._names.items() if id in times]
            for place, times in sorted(self._whole.items())
        }
        content = {
            "seed": seed,
            "kind": kind,
            "run": run,
            "violations": violations,
            "heard": heard,
            "wanted": self._wanted,
            "whole": whole,
        }
        return json.dumps(content, separators=(",", ":"))


def place_of(hearer: str, message: UMessage) -> str:
    """Returns the place at which `hearer` hears it."""
    attributes = message.attributes
    ends = [attributes.source, *([attributes.sink] if attributes.HasField("sink") else [])]
    return " ".join([hearer, *map(_written, ends)])


def _written(uri: UUri) -> str:
    return uris.format(uri).removeprefix("up:")


def _times(name: str, times: int) -> str:
    return f"{name}*{times}" if times > 1 else name


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
