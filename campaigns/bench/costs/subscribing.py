"""The cost of a change of interest in a running streamer, and of a start with many subscriptions."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from campaigns.bench import subject, wire
from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.networks import Address
from campaigns.bench.processes import BenchError, Child
from campaigns.bench.subject import Scene
from tools.broker import Broker
from transports.ports import free_port
from usubscription.state import Status
from usubscription.store.database import Database

KNOWN: Final = (5_000, 50_000)
ONE_MORE: Final = 10  # Subscribes in a row, repeated ...
ONE_MORE_MAX: Final = 500  # ... while they take less than ONE_MORE_S: CPU is counted in hundredths of a second
ONE_MORE_S: Final = 4.0
STARTED_WITH: Final = 5_000
TOLD: Final = 200
START_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 120.0


def fill(path: Path, topics: int) -> None:
    """Writes the store that the service would leave if one subscriber had all of the first `topics`."""
    path.parent.mkdir(parents=True)
    database = Database(path, wire.INGRESS_AUTHORITY)
    database.open()
    database.close()
    db = sqlite3.connect(path, isolation_level=None)
    names = [wire.topic(number) for number in range(topics)]
    rows = [
        (1 + n, one.authority_name, one.ue_id, one.ue_version_major, one.resource_id) for n, one in enumerate(names)
    ]
    subscriber = wire.SUBSCRIBER
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO uri(id, authority, ue_id, version, resource) VALUES(?, ?, ?, ?, ?)",
        [*rows, (1 + topics, subscriber.authority_name, subscriber.ue_id, subscriber.ue_version_major, 0)],
    )
    db.executemany(
        "INSERT INTO subscription(topic, subscriber, status, major) VALUES(?, ?, ?, 4)",
        [(row[0], 1 + topics, int(Status.SUBSCRIBED)) for row in rows],
    )
    db.execute("COMMIT")
    db.close()


@contextmanager
def running(
    directory: Path, source: str, topics: int, sections: dict[str, dict[str, Any]] | None = None
) -> Iterator[tuple[Child, Child, float]]:
    """Starts a streamer whose inner uSubscription knows `topics` subscriptions. Returns it, an application beyond it,
    and the seconds until the streamer was ready."""
    fill(directory / "data" / "usubscription.db", topics)
    with ExitStack() as stack:
        port = stack.enter_context(Broker()).port if source == "mqtt" else free_port()
        out = Address("zenoh", free_port())
        scene = Scene(topics=topics, embedded=True, sections=sections or {}, start_timeout_s=START_TIMEOUT_S)
        began = time.monotonic()
        streamer = stack.enter_context(
            subject.start(directory, Address(source, port), out, scene=scene, log_dir=directory)
        )
        start_s = time.monotonic() - began
        asker = stack.enter_context(Child.module("asker", "campaigns.bench.asker", out, log_dir=directory))
        yield streamer, asker.wait_for("ready"), start_s


def ask(asker: Child, **command: Any) -> dict[str, Any]:
    asker.tell(**command)
    given = asker.answer(ANSWER_TIMEOUT_S)
    if "error" in given:
        raise BenchError(f"{command['do']}: {given['error']}")
    return given


def one_more(setting: Setting) -> Figures:
    """Returns the ms of a Subscribe while the streamer knows `topics` topics on an MQTT network, and the CPU that it
    takes in the streamer, mostly in its event loop."""

    def at(topics: int, directory: Path) -> Figures:
        with running(directory, "mqtt", topics) as (streamer, asker, _):
            ask(asker, do="subscribe", first=topics, count=1)  # a first call, so that the connection is ready
            cpu_s = streamer.cpu_s()
            ms: list[float] = []
            while len(ms) < ONE_MORE_MAX and sum(ms) < ONE_MORE_S * 1_000:
                ms += ask(asker, do="subscribe", first=topics + 1 + len(ms), count=ONE_MORE)["ms"]
            return {
                "ms": round(statistics.median(ms), 2),
                "most_ms": round(max(ms), 2),
                "cpu_ms": round((streamer.cpu_s() - cpu_s) / len(ms) * 1_000, 2),
            }

    return points(KNOWN, setting, at)


def start(setting: Setting) -> Figures:
    """Returns seconds until ready with 5,000 subscriptions to topics on Zenoh, minus those without subscriptions."""
    starts = {}
    for topics in (0, STARTED_WITH):
        with running(setting.directory / str(topics), "zenoh", topics) as (_, _, start_s):
            starts[topics] = start_s
        setting.say(f"{topics:,} subscriptions: ready after {start_s:.1f} s")
    more = starts[STARTED_WITH] - starts[0]
    return {"subscriptions": STARTED_WITH, "s": round(more, 2), "without_s": round(starts[0], 2)}


def notifications(setting: Setting) -> Figures:
    """Changes 200 subscriptions by one request. Returns the ms from the first to the last of its 200 notifications, and
    from the request to the last."""
    with running(setting.directory / "told", "zenoh", TOLD) as (_, asker, _):
        ask(asker, do="register")
        given = ask(asker, do="reset", count=TOLD)
    setting.say(
        f"{given['told']} notifications within {given['ms']:.1f} ms, {given['whole_ms']:.1f} ms after the request"
    )
    return {"notifications": given["told"], "ms": round(given["ms"], 1), "whole_ms": round(given["whole_ms"], 1)}
