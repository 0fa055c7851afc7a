"""A publisher that has a REST history, and whose messages to the gateway are lost: recovery sources.

RestPublisher -> history, then network -> lost: those of CHAINED at random, those of PLAIN while V is away
                    '- RestSource: away, slow, wrong for a while -> V's gates -> its log: once, in order, or in a gap
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

import streamer.recovery_source as sources
from campaigns.simulation.apps import Publisher
from streamer.recovery.source import Fetched, RecoveryPlugin, RecoverySource
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import decoded
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from campaigns.simulation.world import World
    from history.log.log import Log
    from transports.local import LocalTransport

CHAINED: Final = "//vin1/8007/1/8001"  # its source knows predecessors
PLAIN: Final = "//vin1/8007/1/8002"
REST: Final = 0x8007
LOSE: Final = 0.2  # of the messages of CHAINED
TIMEOUT_S: Final = 3.0
IDLE_S: Final = 5.0
PAGE: Final = 4
WRONG: Final = ("away", "slow", "raises", "others", "invalid", "all", "endless", "nothing")
WRONG_ORDER: Final = "reversed"  # only predecessors show it


def sections() -> list[dict[str, Any]]:
    """The [[recovery]] sections of V."""
    return [
        {
            "topics": [topic],
            "source": "simulated",
            "timeout_s": TIMEOUT_S,
            "idle_s": IDLE_S,
            "settings": {"chained": on},
        }
        for topic, on in ((CHAINED, True), (PLAIN, False))
    ]


class RestPublisher(Publisher):
    """Puts each message into its history, and then sends it. `modes`: what is wrong with its history, by topic."""

    def __init__(self, world: World, transport: LocalTransport) -> None:
        super().__init__(world, transport, "rest", [uris.parse(CHAINED), uris.parse(PLAIN)], [], 0.0)
        self.histories: dict[uris.Key, list[UMessage]] = {uris.key(topic): [] for topic in self._topics}
        self.mode = ""
        self.checker = RecoveryChecker(world, self)
        world.networks["vehicle"].loses = self._loses

    def _loses(self, message: UMessage) -> bool:
        """Returns whether V gets this message neither now nor later."""
        if message.attributes.source.ue_id != REST or self._world.healed:
            return False
        if uris.key(message.attributes.source) == uris.key(uris.parse(CHAINED)):
            return bool(self._world.recovery_dice.random() < LOSE)
        streamer = self._world.machines["V"].streamer
        return streamer is None or not next(iter(streamer.assembly.endpoints)).transport.connected

    async def _publish(self, topic: UUri, sink: UUri | None, priority: int, short_lived: bool) -> UMessage | None:
        history = self.histories[uris.key(topic)]
        text = str(len(history) + 1).encode()
        builder = UMessageBuilder.publish(topic)
        message = builder.build_from_upayload(UPayload(text, UPayloadFormat.UPAYLOAD_FORMAT_TEXT))
        history.append(message)
        while not self._world.given_up:
            try:
                status = (await self._transport.send_batch([message]))[0]
            except UStatusError as error:
                status = error.status
            if status.code == UCode.OK or status.code not in RETRYABLE:
                refused = status.code != UCode.OK
                if refused and uris.key(topic) == uris.key(uris.parse(PLAIN)):
                    self.checker.unnoticed.add(int(text))  # it was lost, and V was not away
                return message
            await asyncio.sleep(0.02 + self._world.recovery_dice.random() * 0.1)
        return None


class RestSettings(BaseModel):
    chained: bool


class PlainRestSource(RecoverySource):
    """The history of the publisher, as V asks it."""

    def __init__(self) -> None:
        from campaigns.simulation.world import World

        assert World.current is not None
        assert World.current.rest is not None
        self._world, self._rest = World.current, World.current.rest

    def _after(self, topic: UUri, after: str | None) -> list[UMessage]:
        history = self._rest.histories[uris.key(topic)]
        positions = [self.position(message) for message in history]
        return history[positions.index(after) + 1 if after in positions else 0 :]

    async def fetch(self, topic: UUri, after: str | None) -> Fetched:
        await asyncio.sleep(self._world.recovery_dice.random() * 0.05)
        found, mode = self._after(topic, after), self._rest.mode
        self._world.note("rest", mode or "answers", after, len(found))
        match mode:
            case "away":
                raise UStatusError(UCode.UNAVAILABLE, "the history is away")
            case "slow":
                await asyncio.sleep(TIMEOUT_S * 2 * self._world.recovery_dice.random())
            case "raises":
                raise ValueError("the history is broken")
            case "others":
                other = UMessageBuilder.publish(uris.parse(CHAINED.replace("8001", "8003", 2))).build()
                return Fetched([other, *found])
            case "invalid":
                return Fetched([UMessage(), *found])
            case "all":
                return Fetched(self._after(topic, None))
            case "endless":
                return Fetched(found, more=True)
            case "nothing":
                return None  # type: ignore[return-value]
            case "reversed" if type(self) is ChainedRestSource:
                return Fetched(found[::-1])
        return Fetched(found[:PAGE], more=len(found) > PAGE)


class ChainedRestSource(PlainRestSource):
    """It knows predecessors: positions are numbers."""

    def position(self, message: UMessage) -> str:
        return message.payload.decode()

    def predecessor(self, message: UMessage) -> str | None:
        return str(int(message.payload) - 1)


def _create(settings: RestSettings) -> RecoverySource:
    return ChainedRestSource() if settings.chained else PlainRestSource()


PLUGIN: Final = RecoveryPlugin("simulated", RestSettings, _create)
POINT: Final = EntryPoint("simulated", f"{__name__}:PLUGIN", sources.SOURCE_GROUP)


class RecoveryChecker:
    """Each message of the two topics is in V's log once and in order, or in a gap that was reported."""

    def __init__(self, world: World, rest: RestPublisher) -> None:
        self._world, self._rest = world, rest
        self._stored: dict[uris.Key, dict[tuple[bytes, int], int]] = defaultdict(dict)  # number, by place
        self._reported: dict[uris.Key, list[str | int]] = defaultdict(
            list
        )  # gaps, and up to where the source has answered
        self.unnoticed = set[int]()
        self.has_torn = False

    def appended(self, incarnation: bytes, seq: int, message: UMessage) -> None:
        if message.attributes.source.ue_id == REST:
            self._stored[uris.key(message.attributes.source)][incarnation, seq] = int(message.payload)

    async def read(self, log: Log) -> None:
        """Also what the last process has committed, and was killed before it could say so. Retention may delete that
        before the end."""
        after = 0
        while chunks := await log.read(after):
            after = chunks[-1].last_seq
            for chunk in chunks:
                for seq, message in zip(chunk.seqs, map(decoded, chunk.messages), strict=True):
                    self.appended(log.incarnation, seq, message)

    def torn(self) -> None:
        """The end of the log is lost: the source has it, and it is stored again."""
        self.has_torn = True

    def gap(self, topic: UUri, what: str) -> None:
        self._world.note("recovery gap", uris.format(topic), what)
        self._reported[uris.key(topic)].append(what)

    def answered(self, topic: UUri, position: str | None) -> None:
        key = uris.key(topic)
        self._reported[key].append(self._numbers(key).get(position or "", 0))

    def _numbers(self, key: uris.Key) -> dict[str, int]:
        history = self._rest.histories[key]
        by_id = {uuids.format(message.attributes.id): int(message.payload) for message in history}
        return by_id | {message.payload.decode(): int(message.payload) for message in history}

    def _gaps(self, key: uris.Key, *, is_late: bool) -> set[int]:
        numbers, found, reported = self._numbers(key), set[int](), self._reported[key]
        for at, gap in enumerate(reported):
            if isinstance(gap, int):
                continue
            ends = re.match(
                r"messages may be lost \w+ (?:position )?(.*?)(?: and (\S+)|, until its source answers): ", gap
            )
            assert ends is not None, gap
            after = numbers.get(ends[1], 0)
            until = next((one for one in reported[at:] if isinstance(one, int)), len(self._rest.histories[key]))
            before = until + 1 if ends[2] is None else numbers[ends[2]]
            found.update(range(after + 1, before))
            if is_late and before <= after:
                found.update(range(before, after + 1))
        return found

    def owed(self, key: uris.Key) -> set[int]:
        """The messages that are neither stored nor in a gap."""
        stored = set(self._stored[key].values())
        missing = set(range(1, len(self._rest.histories[key]) + 1)) - stored - self._gaps(key, is_late=False)
        return missing - self.unnoticed if key == uris.key(uris.parse(PLAIN)) else missing

    async def finish(self, log: Log) -> None:
        """Compare with what the log has in the end."""
        last = dict.fromkeys(self._rest.histories, 0)
        late = {key: self._gaps(key, is_late=True) | self.unnoticed for key in last}
        await self.read(log)
        for key, places in self._stored.items():
            found = sorted((place, number) for place, number in places.items() if place[0] == log.incarnation)
            seen = set[int]()
            for _, number in found:
                if number in seen and not self.has_torn:
                    self._world.checker.fail("recovered twice", f"message {number} of {key}")
                seen.add(number)
                if number < last[key] and number not in late[key] and not self.has_torn:
                    self._world.checker.fail("recovered out of order", f"message {number} of {key} after {last[key]}")
                last[key] = max(last[key], number)
        for key in self._rest.histories:
            if owed := self.owed(key):
                self._world.checker.fail("neither recovered nor reported", f"messages {sorted(owed)[:5]} of {key}")
