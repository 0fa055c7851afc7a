"""Targets for what HTTP brings in: parameters of a stream, positions, ids of epochs, payloads as JSON.

octets -> reader -> a value that can be written and read again | INVALID_ARGUMENT
"""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import parse_qsl

from campaigns.fuzz.registry import refusing, target
from history.records.record import Record
from streamer.edge.epoch_reader import cursor_in
from streamer.edge.events import json_of
from streamer.edge.positions import POSITION_MARK, StreamStart, position_of, position_text
from streamer.edge.query import Query
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.ucode_pb2 import UCode

INVALID: Final = UCode.INVALID_ARGUMENT
TOPIC: Final = uris.uri("vehicle", 0x20, 1, 0x8001)


@target
def edge_query(data: bytes) -> None:
    with refusing(INVALID):
        query = Query.of(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))
        assert query.topics
        StreamStart.of(query.since)
        if query.is_atomic:
            cursor_in(query.since)


@target
def edge_position(data: bytes) -> None:
    """Octets, and the text of a position whose last octets they are."""
    for text in (data.decode(errors="replace"), POSITION_MARK + data.decode(errors="replace")):
        with refusing(INVALID):
            state = position_of(text)
            again = position_of(position_text(state))
            assert (again.positions, again.idle) == (state.positions, state.idle)
    with refusing(INVALID):
        cursor_in("e" + data.decode(errors="replace"))


@target
def edge_payload(data: bytes) -> None:
    """One octet for the format, then the payload: JSON of one line comes out."""
    payload = UPayload(data[1:], data[0] % 9 if data else 0)
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(payload)
    line = json_of(Record(b"A" * 16, 1, 0, 1_700_000_000_000, message))
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line)["seq"] == 1
