"""`python -m bench.load publisher|subscriber NETWORK:NUMBER`: one end of a benchmark in a process of its own.

bench -> one JSON command per line on stdin -> load -> one JSON answer per line on stdout
The process ends when stdin does, so it can't outlive the bench.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from bench import networks, wire

STALL_S: Final = 8.0  # nothing came for so long: what is missing is lost
Command = dict[str, Any]


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def publish(address: networks.Address) -> Callable[[Command], None]:
    publisher = networks.NETWORKS[address.network][0](address.number)

    def run(command: Command) -> None:
        started = time.perf_counter()
        publisher.send(wire.payloads(command["run"], command["messages"], command["rate"]))
        answer(sent=command["messages"], seconds=time.perf_counter() - started)

    return run


def subscribe(address: networks.Address) -> Callable[[Command], None]:
    tally = networks.Tally()
    subscriber = networks.NETWORKS[address.network][1](address.number, tally)

    def run(command: Command) -> None:
        if "seen" in command:
            answer(seen=tally.last_run)
            return
        tally.arm(command["run"], command["messages"], latency=command["latency"])
        answer(armed=True)
        threading.Thread(target=wait, args=(command,), daemon=True).start()

    def wait(command: Command) -> None:
        tally.wait(STALL_S)
        answer(**tally.result())

    run.keeps = subscriber  # type: ignore[attr-defined]  # a Zenoh subscriber that nobody holds is undeclared
    return run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends us
    sys.setswitchinterval(0.001)
    role, address = sys.argv[1], networks.Address.parse(sys.argv[2])
    run = {"publisher": publish, "subscriber": subscribe}[role](address)
    answer(ready=True)
    for line in sys.stdin:
        run(json.loads(line))


if __name__ == "__main__":
    main()
