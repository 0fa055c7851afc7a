"""One pump in virtual time, through the random runs of tests/streamer/test_positions.py: pauses, refusals, absent
listeners, stuck streams, restarts and hand-overs, some of each in every run, and 30 runs a second.

python -m campaigns.simulation.one_pump --seeds 3000 --record A.jsonl        compare.py compares two files

A line is one of recording.py. "heard" has what the network has taken, by topic, and "run" is the digest of everything
that was sent, with its answers and the time, and of all rows of the log's cursors after each batch.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import structlog

from campaigns.simulation.loop import VirtualLoop
from campaigns.simulation.pool import HASH_SEED
from campaigns.simulation.recording import place_of
from streamer.egress import address_holds, hold_state, reading_back
from tests.streamer.test_positions import Network, _Run
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

AWAY: Final = (0.0, 0.02, 0.2)  # how often a batch is cut off, or a message fails


class _Recorded(Network):
    """A network that notes each message that is sent (`lines`), and each that it takes (`heard`, by place)."""

    run: _Run

    def __init__(self, draw: random.Random, loop: VirtualLoop) -> None:
        super().__init__(draw, draw.choice(AWAY), is_far=draw.random() < 0.5)
        self._loop = loop
        self.lines: list[str] = []
        self.heard: defaultdict[str, list[str]] = defaultdict(list)
        self._times: Counter[str] = Counter()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = await super().send_batch(messages)
        for message, status in zip(messages, statuses, strict=True):
            text = message.payload.decode()
            self.lines.append(f"{text} {status.code}")
            if not status.code:
                self._times[text] += 1
                times = f"*{self._times[text]}" if self._times[text] > 1 else ""
                self.heard[place_of("net", message)].append(text + times)
        self.note_rows()
        return statuses

    def note_rows(self) -> None:
        self.lines.append(f"{self._loop.now:.6f} {sorted(self.run._log.cursors.all().items())}")


def line_of(seed: int) -> str:
    """Returns the line of one run, without a line break."""
    loop, draw = VirtualLoop(seed), random.Random(seed)
    asyncio.set_event_loop(loop)
    network, fault = _Recorded(draw, loop), ""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(hold_state, RETRY_S_MIN=0.002, RETRY_S_MAX=0.01),
        mock.patch.multiple(address_holds, YOUNG_S=0.02),
        mock.patch.multiple(reading_back, GATHER_S=0.002, TRY_EVERY_S=0.001),
        structlog.testing.capture_logs(),
    ):
        network.run = _Run(Path(folder), draw, network)
        try:
            loop.run_until_complete(network.run.run(draw.random() < 0.5))
        except (AssertionError, TimeoutError) as error:
            fault = repr(error)
        finally:
            network.note_rows()
            loop.finish([])
            asyncio.set_event_loop(None)
    heard: dict[str, Any] = {place: {"messages": messages} for place, messages in sorted(network.heard.items())}
    run = hashlib.blake2b("\n".join([*network.lines, fault]).encode(), digest_size=16).hexdigest()
    content = {"seed": seed, "kind": "pump", "run": run, "violations": int(bool(fault)), "heard": heard}
    return json.dumps(content, separators=(",", ":"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.simulation.one_pump", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=300, help="how many runs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--record", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "campaigns.simulation.one_pump", *sys.argv[1:]])
    failed = 0
    with arguments.record.open("w") as file:
        for seed in range(arguments.start, arguments.start + arguments.seeds):
            line = line_of(seed)
            failed += json.loads(line)["violations"]
            file.write(f"{line}\n")
    print(f"{arguments.seeds} runs, {failed} with a fault")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
