"""A followed history that gives false answers: missing records are reported, and everything else continues."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from history.log.log import Log
from history.service.service import HistoryService
from tests.streamer.conftest import MakeWorld, World, publication
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Announcement, HandOver, PollResponse, Position
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

SPEED, DOOR = uris.parse("//vehicle1/8001/1/8001"), uris.parse("//vehicle1/8001/1/8002")
BANK, FOREIGN = uris.parse("//bank/8001/1/8001"), uris.parse("//vehicle2/8001/1/8001")
ANSWERS_MAX = 60  # of one that lies, within the second in which it does: more would be a loop without a pause
_links = itertools.count()

Spoil = Callable[[PollResponse], None]


class Willing:
    """Hands over to every caller."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def asked(self, caller: UUri, asked: HandOver) -> list[Position]:
        del caller, asked
        return [Position(incarnation=self._log.incarnation, seq=0, in_memory=True)]

    def acknowledged(self, caller: UUri, positions: Mapping[bytes, int]) -> None:
        del caller, positions


class Liar(HistoryService):
    """Alters its answers while `spoil` is set."""

    spoil: Spoil | None = None
    answers = 0

    async def _poll(self, request: UMessage) -> PollResponse:
        response = await super()._poll(request)
        if self.spoil is not None:
            self.answers += 1
            self.spoil(response)
        return response


class Lied:
    """A hub that follows vehicle1, a log with false answers; a uEntity behind the hub receives everything."""

    def __init__(self, world: World, log: Log, liar: Liar) -> None:
        self.world, self.log, self.liar = world, log, liar

    @property
    def followed(self) -> Any:
        (one,) = self.world.assembly.follows
        return one

    async def append(self, topics: Sequence[UUri], payload: str) -> None:
        messages = [EncodedMessage.of(publication(topic, payload)) for topic in topics]
        await self.log.append([self.log.stream_id(topic) for topic in topics], messages)


@pytest.fixture
async def lied(make_world: MakeWorld) -> Any:
    link = f"lies{next(_links)}"
    toml = f"""
[[endpoint]]
name = "office"
transport = "local"
authorities = ["hub", "tablet", "bank"]
settings = {{{{ network = "{link}-office" }}}}
[[endpoint]]
name = "link"
transport = "local"
authorities = ["vehicle1", "vehicle2"]
usubscription = "none"
settings = {{{{ network = "{link}" }}}}
[[follow]]
endpoint = "link"
service = "//*/4/1/0"
topics = ["//*/8001/1/FFFF"]
mode = "poll"
"""
    topics = map(uris.format, (SPEED, DOOR, BANK, FOREIGN))
    world: World = await make_world(toml, {topic.removeprefix("up:"): ["//tablet/9001/1/0"] for topic in topics})
    node = await world.node("link", "vehicle1", 4)
    log = await Log.open(None, name="liar")
    liar = Liar(node, LocalUriProvider("vehicle1", 4, 1), [log], handing_over=Willing(log))
    await liar.start()
    world.stack.push_async_callback(log.close)
    world.stack.push_async_callback(liar.stop)
    announcing = UMessageBuilder.notification(ids.at("vehicle1", ids.ANNOUNCEMENTS), ids.at("hub"))
    announcement = announcing.pack(Announcement(incarnations=[log.incarnation]))
    await node.send(announcement)
    found = Lied(world, log, liar)
    await world.until(lambda: [one for one in world.assembly.follows if one.is_handed_over and one.connected])
    return found


def unreported_predecessors(response: PollResponse) -> None:
    """Predecessors that it never reported."""
    for batch in response.batches:
        batch.prev_seq[:] = [seq - 1 for seq in batch.seq]
        batch.seq[:] = [seq + 1_000 for seq in batch.seq]


def not_before(response: PollResponse) -> None:
    for batch in response.batches:
        batch.prev_seq[:] = [seq + 5 for seq in batch.seq]


def goes_back(response: PollResponse) -> None:
    for place in response.next:
        place.seq = 0


def goes_far(response: PollResponse) -> None:
    for place in response.next:
        place.seq = (1 << 63) - 1


def other_log(response: PollResponse) -> None:
    """Another one with each answer."""
    for one in (*response.begin, *response.next, *response.batches):
        one.incarnation = uris.ANY.SerializeToString()[:1] * 15 + bytes([next(_links) % 256])


def short_name(response: PollResponse) -> None:
    for one in (*response.begin, *response.next, *response.batches):
        one.incarnation = b"x"


def torn(response: PollResponse) -> None:
    for batch in response.batches:
        del batch.prev_seq[:]


def garbage(response: PollResponse) -> None:
    for batch in response.batches:
        batch.message[:] = [b"\xff" * 7 for _ in batch.message]


def nothing_at_once(response: PollResponse) -> None:
    response.Clear()
    response.more = True


def gaps_without_end(response: PollResponse) -> None:
    for _ in range(100):
        response.gaps.add(incarnation=response.next[0].incarnation, after_seq=1, before_seq=1 << 62, reason=1)


LIES = [
    unreported_predecessors, not_before, goes_back, goes_far, other_log, short_name, torn, garbage, nothing_at_once,
    gaps_without_end,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_lie_costs_what_it_is_about_and_no_more(lied: Lied, lie: Spoil) -> None:
    """There is no loop without a pause, the gateway works, and so does following after the false answers."""
    office = await lied.world.node("office", "bank")
    tablet = await lied.world.node("office", "tablet", 0x9001)
    heard = await lied.world.hear(tablet, uris.pattern(uris.WILDCARD_AUTHORITY, 0x8001))
    lied.liar.spoil = lie
    lied.followed.announced()  # ask again
    for number in range(10):
        await lied.append([SPEED, DOOR], f"lie {number}")
    await asyncio.sleep(1.0)  # the time in which it lies
    assert lied.liar.answers <= ANSWERS_MAX
    await office.send(publication("//bank/8001/1/8001", "others are served"))
    lied.liar.spoil = None

    async def tell_the_truth() -> None:
        while True:  # the first of it may be within what it said to be lost
            await lied.append([SPEED], "the truth")
            await asyncio.sleep(0.05)

    telling = asyncio.create_task(tell_the_truth())
    await heard.until(lambda: "the truth" in heard.texts, "what it says when it has ended")
    telling.cancel()
    texts = [text for text in heard.texts if text.startswith("lie")]
    assert all(texts.count(text) <= 2 for text in texts), "of each topic one"


async def test_of_others_it_can_say_nothing(lied: Lied) -> None:
    """Neither of who lives elsewhere, nor of another vehicle."""
    tablet = await lied.world.node("office", "tablet", 0x9001)
    heard = await lied.world.hear(tablet, uris.pattern(uris.WILDCARD_AUTHORITY, 0x8001))
    await lied.append([BANK, FOREIGN, SPEED], "said by vehicle1")
    await heard.expect(1)
    assert [uris.format(one.attributes.source) for one in heard.messages] == [uris.format(SPEED)]
    assert (lied.followed.counts["spoofed"], lied.followed.counts["unwanted"]) == (1, 1)
