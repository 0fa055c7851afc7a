"""The commands as processes, on real Zenoh networks: a gateway, a uSubscription of the cloud, and somebody at a
terminal.

terminal -- Zenoh -- vehicle1 -- gateway -- cloud -- Zenoh -- terminal, uSubscription
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.demo.processes import Child
from tests.tiers import full
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids

WAIT_S = 60
TOPIC = "up://vehicle1/8001/1/8002"

CONFIG = """
[streamer]
data_dir = "{folder}/data"
admin = "127.0.0.1:0"
log_level = "warning"
[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["vehicle1"]
settings = {{ mode = "router", listen = ["tcp/127.0.0.1:{inside}"] }}
[[endpoint]]
name = "cloud"
transport = "zenoh"
authorities = ["cloud"]
settings = {{ mode = "router", listen = ["tcp/127.0.0.1:{outside}"] }}
[[rule]]
from = "cloud"
to = "vehicle"
deny = ["//vehicle1/8001/1/66"]
[[rule]]
from = "vehicle"
to = "cloud"
[history]
record = ["//vehicle1/8001/FF/FFFF"]
[[epochs]]
name = "minute"
topics = ["//vehicle1/8002/1/FFFF"]
width_ms = 60000
timeout_ms = 600000
"""


class Terminal:
    """Commands, and what they print."""

    def __init__(self, stack: AsyncExitStack, folder: Path, inside: int, outside: int) -> None:
        self._stack, self.folder = stack, folder
        self.config = ["-c", str(folder / "gateway.toml"), "-e", "vehicle"]
        self.cloud = ["-t", "zenoh", "-a", "cloud", "-s", "mode=client", "-s", f'connect=["tcp/127.0.0.1:{outside}"]']
        self.vehicle = ["-t", "zenoh", "-s", "mode=client", "-s", f'connect=["tcp/127.0.0.1:{inside}"]']
        self.admin_port = 0

    async def background(self, *command: str) -> Child:
        child = await Child.start(command[0], "streamer.commands.cli", *command, "--json")
        self._stack.push_async_callback(child.stop)
        return child

    async def run(self, *command: str, code: int = 0) -> tuple[list[Any], str]:
        """The JSON lines on stdout, and stderr."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamer.commands.cli", *command, stdout=pipe, stderr=pipe
        )
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert process.returncode == code, err.decode()
        assert b"Traceback" not in err
        return [json.loads(line) for line in out.decode().splitlines()], err.decode()

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10) as answer:
            found = re.search(rf"^up_streamer_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found
        return float(found[1])

    async def until(self, name: str, value: float) -> None:
        """Until a metric of the gateway is at least so much."""
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(self._metric, name) < value:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with AsyncExitStack() as stack:
        inside, outside = free_port(), free_port()
        (tmp_path / "gateway.toml").write_text(CONFIG.format(folder=tmp_path, inside=inside, outside=outside))
        made = Terminal(stack, tmp_path, inside, outside)
        gateway = await made.background("run", "-c", str(tmp_path / "gateway.toml"))
        service = await made.background("usubscription", *made.cloud, "--store", str(tmp_path / "cloud.db"))
        assert (await service.say("ready"))["authority"] == "cloud"
        ready = await gateway.say("ready")
        assert ready["authority"] == "vehicle1"
        made.admin_port = ready["admin_port"]
        await made.until("ready", 1)
        yield made


@pytest.mark.timeout(240)
async def test_everything_from_a_terminal(terminal: Terminal) -> None:
    # subscribe, publish
    subscriber = await terminal.background("subscribe", TOPIC, *terminal.cloud, "--count", "3")
    await subscriber.say("listening")
    await terminal.until("interest_version", 1)
    (entry,), _ = await terminal.run("subscriptions", "--store", str(terminal.folder / "cloud.db"), "--json")
    assert entry["topic"] == TOPIC
    published, _ = await terminal.run("publish", TOPIC, *terminal.config, "--text", "hello", "--count", "3", "--json")
    heard = [await subscriber.say("source") for _ in range(3)]
    assert [message["id"] for message in heard] == [message["id"] for message in published]
    assert {message["payload"] for message in heard} == {"hello"}
    assert {message["source"] for message in heard} == {TOPIC}
    assert await asyncio.wait_for(subscriber.process.wait(), WAIT_S) == 0  # --count

    # a topic with wildcards is none that the service takes; without it, it is a filter like any other
    _, reported = await terminal.run("subscribe", "up://vehicle1/8001/1/FFFF", *terminal.cloud, code=1)
    assert "INVALID_ARGUMENT" in reported
    every = await terminal.background(
        "subscribe", "up://vehicle1/8001/1/FFFF", *terminal.vehicle, "-a", "vehicle1", "--no-usubscription"
    )
    await every.say("listening")

    # call, across the gateway
    (answer,), _ = await terminal.run("call", "up://vehicle1/4/1/1", *terminal.cloud, "--json")
    assert answer["method"] == "up://vehicle1/4/1/1"
    assert answer["milliseconds"] > 0
    assert answer["payload"]["logs"]  # of a method that is known, the response is
    topic = "up://vehicle1/8001/1/8001"
    request = json.dumps({"topic": topic, "peer": "nobody"})
    _, reported = await terminal.run("call", "up://vehicle1/4/1/5", *terminal.cloud, "--json-payload", request, code=1)
    assert "error PERMISSION_DENIED: " in reported
    request = json.dumps({"topic_filter": topic})
    (answer,), _ = await terminal.run(
        "call", "up://vehicle1/0/4/3", *terminal.cloud, "--json-payload", request, "--json"
    )
    assert answer["payload"] == {}
    _, reported = await terminal.run("call", "up://vehicle1/0/4/3", *terminal.cloud, "--json-payload", "[]", code=1)
    assert "with the fields topic_filter, subscriber_filter" in reported
    _, reported = await terminal.run("call", "up://vehicle1/8001/1/66", *terminal.cloud, code=1)
    assert "PERMISSION_DENIED" in reported
    assert "no rule" in reported

    # replay
    (*_, done), _ = await terminal.run("replay", "--seconds", "5", *terminal.config, "--json")
    assert done["done"] is True
    assert done["published"] == sum(done["topics"].values()) == 50
    assert (await every.say("source"))["source"] in done["topics"]
    assert await _interrupted(every) == 130

    # history
    expected = Counter(done["topics"]) + Counter({TOPIC: 3})
    await terminal.until('log_newest_seq{log="durable"}', 53)
    async with asyncio.timeout(WAIT_S):
        while await _records(terminal) != expected:  # uSubscription's own messages count in the numbers, too
            pass
    polled, _ = await terminal.run("history", "vehicle1", TOPIC, *terminal.cloud, "--poll", "--limit", "3", "--json")
    assert [message["id"] for message in polled] == [message["id"] for message in published]

    # epochs
    (nothing,), _ = await terminal.run("history", "vehicle1", *terminal.cloud, "--epochs", "--json")
    assert [(group["group"], group["open"]) for group in nothing["groups"]] == [("minute", [])]
    topic = ["up://vehicle1/8002/1/8001", *terminal.config]
    (sent,), _ = await terminal.run("publish", *topic, "--text", "one of a minute", "--json")
    await terminal.until('epochs_open{group="minute"}', 1)
    file = str(terminal.folder / "gateway.toml")
    for there in (terminal.cloud, ["--config", file], terminal.config):  # as docs/epochs.md says, and otherwise
        (reported,), _ = await terminal.run("history", "vehicle1", *there, "--epochs", "--json")
        (group,) = reported["groups"]
    minute = int(sent["id"].replace("-", "")[:12], 16) // 60_000 * 60_000
    assert (group["group"], group["by"], group["kept by"]) == ("minute", "bucket", "//vehicle1/4/1/0")
    assert group["upper"] == group["open"] == [[minute]]
    assert [[minute - 60_000], [minute]].count(group["lower"][0]) == 1, "by our clock, which may be a little behind"

    # dead letters
    letters, _ = await terminal.run("dead-letters", "-c", str(terminal.folder / "gateway.toml"), "--json")
    assert [letter["code"] for letter in letters] == ["PERMISSION_DENIED"], letters
    (letter,) = letters
    assert uris.parse(letter["sink"]) == uris.parse("up://vehicle1/8001/1/66")
    at = ["-c", str(terminal.folder / "gateway.toml"), "--json"]
    (whole,), _ = await terminal.run("dead-letters", "show", str(letter["number"]), *at)
    assert whole["message"]["type"] == "request"
    (purged,), _ = await terminal.run("dead-letters", "purge", "--endpoint", "cloud", *at)
    assert purged == {"purged": 1}
    (resent,), _ = await terminal.run("dead-letters", "resend", "--all", *at)
    assert resent == {"counts": {}}


async def _records(terminal: Terminal) -> Counter[str]:
    """Returns the number of records of each topic of applications."""
    (overview,), _ = await terminal.run("history", "vehicle1", *terminal.config, "--json")
    topics = ((one["topic"], one["records"]) for one in overview["topics"])
    return Counter({topic: records for topic, records in topics if uris.parse(topic).ue_id not in (0, ids.ENTITY)})


async def _interrupted(child: Child) -> int:
    child.process.send_signal(signal.SIGINT)
    return await asyncio.wait_for(child.process.wait(), WAIT_S)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=full), signal.SIGTERM])
async def test_a_streamer_ends_in_order(terminal: Terminal, number: signal.Signals) -> None:
    (terminal.folder / "second.toml").write_text(
        CONFIG.format(folder=terminal.folder / "second", inside=free_port(), outside=free_port())
    )
    second = await terminal.background("run", "-c", str(terminal.folder / "second.toml"))
    await second.say("ready")
    second.process.send_signal(number)
    assert await asyncio.wait_for(second.process.wait(), WAIT_S) == 0
    # beside one that has the same data
    _, reported = await terminal.run("run", "-c", str(terminal.folder / "gateway.toml"), code=1)
    assert "in use by process" in reported
