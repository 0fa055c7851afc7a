"""`python -m campaigns.bench.load ROLE NETWORK:NUMBER ...`: one end of a benchmark, or both, in its own process.

    publisher ADDRESS TOPICS | subscriber ADDRESS TOPICS | round SOURCE DESTINATION

bench -> one JSON command per line on stdin -> load -> one JSON answer per line on stdout
The process ends when its stdin closes, so that it cannot outlive the bench.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from campaigns.bench import networks, wire

STALL_S: Final = 8.0  # if nothing arrives for so long, the missing messages are lost
Command = dict[str, Any]


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def publisher(address: networks.Address, topics: int) -> networks.Publisher:
    if address.network == "mqtt":
        from campaigns.bench.mqtt import MqttPublisher

        return MqttPublisher(address.number, topics)
    if address.network == "dds":
        return networks.DdsPublisher(address.number, topics)
    return networks.ZenohPublisher(address.number, topics)


def subscriber(address: networks.Address, tally: networks.Tally) -> networks.Subscriber:
    if address.network == "mqtt":
        from campaigns.bench.mqtt import MqttSubscriber

        return MqttSubscriber(address.number, tally)
    return networks.ZenohSubscriber(address.number, tally)  # no leg has DDS as destination


def publish(address: networks.Address, topics: int) -> Callable[[Command], None]:
    end = publisher(address, topics)

    def run(command: Command) -> None:
        started = time.perf_counter()
        end.send(wire.batches(command["run"], command["messages"], command["rate"], command["size"]))
        answer(sent=command["messages"], seconds=time.perf_counter() - started)

    return run


def subscribe(address: networks.Address, topics: int) -> Callable[[Command], None]:
    tally = networks.Tally(topics)
    end = subscriber(address, tally)

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

    run.keeps = end  # type: ignore[attr-defined]  # a Zenoh subscriber without a reference is undeclared
    return run


def go_round(source: networks.Address, destination: networks.Address) -> Callable[[Command], None]:
    """Sends each message after the previous one has arrived, to measure one message at a time."""
    tally = networks.Tally()
    ends = publisher(source, 1), subscriber(destination, tally)

    def run(command: Command) -> None:
        doubled, lost, started = 0, 0, time.perf_counter()
        for number in range(command["messages"]):
            tally.arm(command["run"] + number, 1, latency=False)
            ends[0].send(wire.batches(command["run"] + number, 1, 0))
            lost += not tally.done.wait(STALL_S)
            doubled += tally.doubled
        answer(lost=lost, doubled=doubled, seconds=time.perf_counter() - started)

    return run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends this process
    sys.setswitchinterval(0.001)
    role, address, other = sys.argv[1], networks.Address.parse(sys.argv[2]), sys.argv[3]
    if role == "round":
        run = go_round(address, networks.Address.parse(other))
    else:
        run = {"publisher": publish, "subscriber": subscribe}[role](address, int(other))
    answer(ready=True)
    for line in sys.stdin:
        run(json.loads(line))


if __name__ == "__main__":
    main()
