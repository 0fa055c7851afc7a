"""DDS over a network whose cable is pulled and whose addresses change: two network namespaces and a cable between them.

alpha, a process that publishes 0, 1, 2 ... -- namespace -- cable -- namespace -- beta, a process that listens
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

DEADLINE_S = 60.0
LOOK_S = 0.05
LEASE_MS = 1_000
TOPIC = 0x8001
BATCH = 16  # of dds_steady_publisher.py


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=DEADLINE_S)


class Cable:
    """Two namespaces, each with one end of the cable, an interface of this name."""

    INTERFACE = "cable0"

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:8]
        self.alpha, self.beta = f"up-{name}-a", f"up-{name}-b"

    def lay(self) -> None:
        for namespace in (self.alpha, self.beta):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ends = ("name", self.INTERFACE, "netns", self.alpha), ("name", self.INTERFACE, "netns", self.beta)
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for namespace, address in ((self.alpha, "10.99.0.1/24"), (self.beta, "10.99.0.9/24")):
            ip("-n", namespace, "address", "add", address, "dev", self.INTERFACE)
            ip("-n", namespace, "link", "set", self.INTERFACE, "up")

    def remove(self) -> None:
        for namespace in (self.alpha, self.beta):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=DEADLINE_S)

    def pull(self) -> None:
        ip("-n", self.beta, "link", "set", self.INTERFACE, "down")

    def plug_in(self) -> None:
        ip("-n", self.beta, "link", "set", self.INTERFACE, "up")

    def move_alpha(self, old: str, new: str) -> None:
        ip("-n", self.alpha, "address", "delete", old, "dev", self.INTERFACE)  # others of its network go with it
        ip("-n", self.alpha, "address", "add", new, "dev", self.INTERFACE)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the ip command")
    cable = Cable()
    try:
        cable.lay()
    except subprocess.CalledProcessError as error:
        cable.remove()
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    yield cable
    cable.remove()


class Process:
    """A process in a namespace that answers each line with JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, namespace: str, script: str, *arguments: str) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        file = str(Path(__file__).with_name(script))
        pipe = asyncio.subprocess.PIPE
        command = ["ip", "netns", "exec", namespace, sys.executable, file, *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=1 << 24
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S) == b"ready\n"
        return cls(process)

    async def ask(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), DEADLINE_S))

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait_for(self._process.wait(), DEADLINE_S)


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise AssertionError(f"expected within {DEADLINE_S} s: {what}") from None


async def acknowledged_beyond(alpha: Process, number: int) -> int:
    """Returns how many messages of alpha are acknowledged, once they are more than `number`."""
    count = 0

    async def more() -> bool:
        nonlocal count
        count = int(await alpha.ask())
        return count > number

    await eventually(more, f"more than {number} acknowledged messages")
    return count


Fault = Callable[[Cable, Process], Awaitable[None]]


async def pull_for_longer_than_the_lease(cable: Cable, _: Process) -> None:
    cable.pull()
    await asyncio.sleep(3 * LEASE_MS / 1_000)
    cable.plug_in()


async def pull_for_a_moment(cable: Cable, _: Process) -> None:
    cable.pull()
    await asyncio.sleep(0.3 * LEASE_MS / 1_000)
    cable.plug_in()


async def change_the_address_twice(cable: Cable, alpha: Process) -> None:
    cable.move_alpha("10.99.0.1/24", "10.99.0.2/24")
    await acknowledged_beyond(alpha, int(await alpha.ask()) + 5 * BATCH)
    cable.move_alpha("10.99.0.2/24", "10.99.0.3/24")


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [pull_for_longer_than_the_lease, pull_for_a_moment, change_the_address_twice],
    ids=lambda fault: fault.__name__,
)
async def test_no_message_is_lost(cable: Cable, fault: Fault) -> None:
    """The order is kept, and only what was in flight at the fault comes twice."""
    settings = json.dumps({"domain_id": 0, "interface": Cable.INTERFACE, "lease_ms": LEASE_MS})
    beta = await Process.start(cable.beta, "dds_subscriber.py", settings, "beta", str(TOPIC))
    alpha = await Process.start(cable.alpha, "dds_steady_publisher.py", settings, str(TOPIC))
    before = await acknowledged_beyond(alpha, 5 * BATCH)
    await fault(cable, alpha)
    after = await acknowledged_beyond(alpha, before + 10 * BATCH)
    end = await acknowledged_beyond(alpha, after + 10 * BATCH)
    seen: list[int] = []

    async def all_came() -> bool:
        seen[:] = (await beta.ask())["seen"]
        return bool(seen) and max(seen) >= end - 1

    await eventually(all_came, f"message {end - 1}")
    await alpha.end()
    await beta.end()
    first = list(dict.fromkeys(seen))
    assert first == list(range(len(first)))
    twice = {number for number in first if seen.count(number) > 1}
    assert all(before - BATCH <= number <= after + BATCH for number in twice)
