"""Two gateways, a link that is cut, kill -9 at both: every publish in the vehicle arrives behind the hub exactly once.

HistoryPublisher -- Zenoh -- vehicle gateway == Zenoh, through a proxy == hub -- Zenoh -- GaplessSubscriber
   vehicle1                                       that cuts

    python -m examples.following --messages 2000 --cuts 20 --kills 4 --seed 1

Exit code 1 unless every message arrived, once and in order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from history.publisher import HistoryPublisher
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from storage import logs
from streamer.commands.demo.processes import Child
from transports.conformance.proxy import TcpProxy
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.message import UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from usubscription_client import USubscriptionClient

HERE: Final = Path(__file__).parent
SPEED: Final = uris.parse("//vehicle1/8001/1/8001")
PUBLISHER: Final = LocalUriProvider("vehicle1", 0x8001, 1)
SUBSCRIBER: Final = LocalUriProvider("hub", 0x9001, 1)
FIRST, LAST = "first", "last"
WAIT_S: Final = 120.0  # a timeout, not a measure of speed
AWAY_S_MAX: Final = 0.5  # duration of a cut, and of the pause before a killed gateway starts again


class Heard:
    """The messages that have arrived behind the hub."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.texts: set[str] = set()
        self.origins: set[bytes] = set()  # logs to which these records were appended first
        self.gaps: list[Gap] = []
        self._came = asyncio.Event()

    async def listen(self, subscriber: GaplessSubscriber) -> None:
        async for record in subscriber:
            text = record.message.payload.decode()
            self.texts.add(text)
            self.origins.update({record.origin.incarnation} if record.origin is not None else ())
            if text.isdecimal():
                self.numbers.append(int(text))
            self._came.set()

    async def until(self, *, text: str = "", more_than: int = -1) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while (text and text not in self.texts) or len(self.numbers) <= more_than:
                self._came.clear()
                await self._came.wait()

    def verdict(self, sent: int) -> tuple[str, bool]:
        heard = set(self.numbers)
        lost, doubled = sent - len(heard), len(self.numbers) - len(heard)
        newest, disordered = -1, 0
        for number in self.numbers:
            disordered += number < newest
            newest = max(newest, number)
        text = f"sent {sent}, heard {len(heard)}, lost {lost}, doubled {doubled}, out of order {disordered}"
        return text, not (lost or doubled or disordered)


class Stage:
    """The gateways in processes of their own, with the TOML files of this folder, their own ports and folders."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.ports = {"7447": free_port(), "7448": free_port(), "7449": free_port()}
        self.link = TcpProxy("127.0.0.1", self.ports["7449"])
        self._folder, self._stack = folder, stack
        self._gateways: dict[str, Child] = {}

    async def start(self, name: str) -> None:
        text = (HERE / f"{name}.toml").read_text().replace(f'"{name}-data"', f'"{self._folder / name}"')
        text = text.replace('connect = ["tcp/127.0.0.1:7449"]', f'connect = ["tcp/127.0.0.1:{self.link.port}"]')
        for port, instead in self.ports.items():
            text = text.replace(f'"tcp/127.0.0.1:{port}"', f'"tcp/127.0.0.1:{instead}"')
        path = self._folder / f"{name}.toml"
        path.write_text(text)
        child = await Child.start(name, "streamer.commands.cli", "run", "--config", str(path), "--json")
        self._gateways[name] = child
        self._stack.push_async_callback(child.stop)
        await child.say("ready")

    @property
    def tails(self) -> str:
        """The last lines of the gateways' output."""
        return "\n".join(f"{child.name}:\n{child.tail}" for child in self._gateways.values())

    async def kill(self, name: str) -> None:
        await self._gateways[name].kill()

    def end(self, port: str, local: LocalUriProvider) -> ZenohTransport:
        """A uEntity of an application on a gateway's network."""
        settings = {"connect/retry": {"period_init_ms": 200, "period_max_ms": 1_000}}
        config = ZenohConfig(mode="client", connect=(f"tcp/127.0.0.1:{self.ports[port]}",), settings=settings)
        return ZenohTransport(config, local)


async def play(stage: Stage, publisher: HistoryPublisher, heard: Heard, asked: argparse.Namespace) -> None:
    """Publish all messages, and cut and kill meanwhile."""
    rng = random.Random(asked.seed)
    troubles = ["cut"] * asked.cuts + [("hub", "vehicle", "both")[number % 3] for number in range(asked.kills)]
    rng.shuffle(troubles)
    sent = 0

    async def publish(until: int) -> None:
        nonlocal sent
        while sent < until:
            await publisher.publish(SPEED.resource_id, text_of(str(sent)))
            sent += 1

    for done, trouble in enumerate(troubles):
        begin, end = (asked.messages * place // len(troubles) for place in (done, done + 1))
        had = len(heard.numbers)
        await publish(rng.randint(begin, end))
        publishing = asyncio.create_task(publish(end))  # before and during the faults
        if trouble == "cut":
            stage.link.cut()
            await asyncio.sleep(rng.random() * AWAY_S_MAX)
            stage.link.mend()
        else:
            names = ["hub", "vehicle"] if trouble == "both" else [trouble]
            await asyncio.gather(*map(stage.kill, names))
            await asyncio.sleep(rng.random() * AWAY_S_MAX)
            for name in names:
                await stage.start(name)
        await publishing
        if sent > had:
            await heard.until(more_than=had)  # so that the next fault meets a working link
        print(f"{done + 1:4}: {trouble:8} sent {sent}, heard {len(heard.numbers)}", flush=True)
    await publish(asked.messages)


def text_of(text: str) -> UPayload:
    return UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)


async def run(asked: argparse.Namespace, folder: Path) -> int:
    async with contextlib.AsyncExitStack() as stack:
        stage = Stage(folder, stack)
        await stage.link.start()
        stack.push_async_callback(stage.link.stop)
        for name in ("hub", "vehicle"):
            await stage.start(name)
        behind_hub = await stack.enter_async_context(stage.end("7448", SUBSCRIBER))
        rpc = await stack.enter_async_context(InMemoryRpcClient(behind_hub, SUBSCRIBER))
        heard = Heard()
        # it has every record of the hub's log exactly once; a message that arrived twice is twice in that log
        subscriber = GaplessSubscriber(HistoryClient(rpc, uris.uri("hub", 4, 1)), [SPEED], on_gap=heard.gaps.append)
        listening = asyncio.create_task(heard.listen(await stack.enter_async_context(subscriber)))
        stack.callback(listening.cancel)
        await (await stack.enter_async_context(USubscriptionClient(behind_hub, SUBSCRIBER))).subscribe(SPEED)
        in_vehicle = await stack.enter_async_context(stage.end("7447", PUBLISHER))
        publisher = await stack.enter_async_context(HistoryPublisher(in_vehicle, PUBLISHER, folder / "speed.db"))
        began = time.monotonic()
        try:
            async with asyncio.timeout(WAIT_S):
                # messages that are published before all parts follow may be lost
                while not heard.origins:  # no record comes from another log than the hub's yet
                    await publisher.publish(SPEED.resource_id, text_of(FIRST))
                    await asyncio.sleep(0.1)
                (own,) = await HistoryClient(rpc, publisher.service).logs()
                while own.incarnation not in heard.origins:  # the vehicle's gateway has received plain messages so far
                    await publisher.publish(SPEED.resource_id, text_of(FIRST))
                    await asyncio.sleep(0.1)
            print("all parts follow", flush=True)
            await play(stage, publisher, heard, asked)
            await publisher.publish(SPEED.resource_id, text_of(LAST))
            await heard.until(text=LAST)
        except TimeoutError:
            print(f"nothing came for {WAIT_S:.0f} s", file=sys.stderr)
            if listening.done():
                listening.result()
        text, is_right = heard.verdict(asked.messages)
        print(f"{text}   ({asked.cuts} cuts, {asked.kills} kills, {time.monotonic() - began:.0f} s, seed {asked.seed})")
        if not is_right:
            missing = sorted(set(range(asked.messages)) - set(heard.numbers))
            print(f"missing: {missing}\nreported as gaps: {heard.gaps}\n{stage.tails}", file=sys.stderr)
        return 0 if is_right else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.following", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--cuts", type=int, default=20, help="of the link between the gateways")
    parser.add_argument("--kills", type=int, default=4, help="kill -9: of the hub, the vehicle's gateway, both, ...")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults")
    asked = parser.parse_args()
    logs.configure("error")  # absent gateways are normal here
    with tempfile.TemporaryDirectory(prefix="following-") as folder:
        return asyncio.run(run(asked, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
