"""Targets for GRIP: what publishers send, what backends say in headers, and items in any order.

a body   -> items   -> ids and headers that can be sent
headers  -> what to hold -> Grip-Last, and the address of the link
offers   -> a channel's sequencer: each item is answered once
"""

from __future__ import annotations

from campaigns.fuzz.registry import refusing, target
from campaigns.fuzz.shapes import Dice
from streamer.grip.headers import CHANNELS_PER_HOLD_MAX, Instruction, grip_last
from streamer.grip.items import NO_TEXT, Item, StreamFormat, read_items
from streamer.grip.link import resolved
from streamer.grip.sequence import LastIds, Sequencer, Turn
from uprotocol.v1.ucode_pb2 import UCode

WAIT_S = 4


@target
def grip_items(data: bytes) -> None:
    with refusing(UCode.INVALID_ARGUMENT):
        for item in read_items(data, 100):
            assert len(item.content) <= 100
            assert item.size >= len(item.content)
            values = [value for pair in item.response.headers for value in pair] if item.response is not None else []
            for text in (item.channel, item.id or "", item.prev_id or "", *values):
                assert not NO_TEXT.search(text), "it would end a header line"


@target
def grip_headers(data: bytes) -> None:
    lines = data.decode(errors="surrogateescape").split("\n")
    with refusing(UCode.INVALID_ARGUMENT, UCode.FAILED_PRECONDITION):
        said = Instruction.of((name, value) for name, _, value in (line.partition(":") for line in lines))
        assert len({channel.name for channel in said.channels}) == len(said.channels) <= CHANNELS_PER_HOLD_MAX
        last = {channel.name: channel.prev_id for channel in said.channels if channel.prev_id is not None}
        again = Instruction.of(
            ("Grip-Channel", value.replace("; last-id=", "; prev-id=", 1)) for value in grip_last(last)
        )
        if not any(set(name) & set('<;,"') for name in last):
            assert dict(again.channels) == last, "Grip-Last says what was held"
        if said.link is not None:
            assert resolved("http://back:8000/a", said.link.url).startswith("http://back:8000/")


@target
def grip_sequence(data: bytes) -> None:
    """Each octet is an offer with ids of two bits, or the time goes on."""
    dice, turns, offers = Dice(data), list[Turn[int]](), 0
    made = Sequencer[int](LastIds("0"), WAIT_S, waiting_max=4, waiting_bytes_max=64)
    for now in range(min(dice.left, 200)):
        choice = dice.octet()
        match choice >> 6:
            case 0:
                turns += made.expire(now)
            case 1 if made.overdue(now) is not None:
                turns += made.recover(str(choice & 3), now)
            case _:
                id, prev_id = str(choice & 3), str(choice >> 2 & 3)
                content = StreamFormat(bytes(choice >> 5 & 1))
                turns += made.offer(Item("a", id, prev_id, choice & 31 == 31, content, None), offers, now)
                offers += 1
    while len(made):
        later = made.expire(1_000)
        assert later, "what waits goes on at last"
        turns += later
    assert sorted(tag for turn in turns for tag in turn.tags) == list(range(offers)), "each is answered once"
