"""The origins of followed records: in a chunk, on disk, on the wire. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.records import chunk as chunks
from history.records.chunk import Chunk, Columns, CorruptChunkError, Origin, Scan
from history.records.record import Record, decode
from history.service.poll import add_records
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import RecordBatch
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload

LOGS = [bytes([number]) * 16 for number in range(4)]
MESSAGES = [
    EncodedMessage.of(
        UMessageBuilder.publish(uris.uri("vin", 0x10, 1, 0x8000)).build_from_upayload(UPayload(bytes(size), 5))
    )
    for size in range(0, 300, 50)
]
ORIGINS = st.none() | st.builds(Origin, st.sampled_from(LOGS), st.integers(1, chunks.SEQ_MAX))
# stream, place in MESSAGES, origin
RECORDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), ORIGINS), min_size=1, max_size=30)
Given = Sequence[tuple[int, int, Origin | None]]


def made(records: Given, first_seq: int = 1) -> Chunk:
    seqs = range(first_seq, first_seq + len(records))
    messages = [MESSAGES[place] for _, place, _ in records]
    origins = [origin for _, _, origin in records]
    prev_seqs = [0] * len(records)
    streams = [stream for stream, *_ in records]
    return Chunk(seqs, 7, streams, prev_seqs, None, messages, origins if any(origins) else None)


def origins_of(chunk: Chunk) -> list[Origin | None]:
    assert chunk.origins is None or any(chunk.origins), "none of them was followed: then there is no column"
    return chunk.origins or [None] * len(chunk)


def content(chunk: Chunk) -> list[tuple[Any, ...]]:
    return list(zip(chunk.seqs, chunk.streams, chunk.prev_seqs, chunk.data, origins_of(chunk), strict=True))


# -- on disk


@given(RECORDS)
def test_what_is_stored_comes_back(records: Given) -> None:
    chunk = made(records)
    assert content(chunks.decode(chunks.encode(chunk))) == content(chunk)


@given(RECORDS)
def test_a_chunk_without_followed_records_is_stored_as_ever(records: Given) -> None:
    plain = [(stream, place, None) for stream, place, _ in records]
    columns, with_origins = chunks.encode(made(plain)), chunks.encode(made(records))
    assert len(columns.data) == 16 * len(records) + sum(map(len, made(records).data))
    assert with_origins.data.startswith(columns.data)


def with_right_checksum(columns: Columns, data: bytes) -> Columns:
    fields = (columns.first_seq, columns.records, columns.time_ms, columns.streams, columns.ids, data)
    return columns._replace(data=data, crc=chunks._crc(*fields))


@given(RECORDS, st.data())
def test_what_no_chunk_is_stored_as_is_refused_though_its_checksum_is_right(
    records: Given, dice: st.DataObject
) -> None:
    columns = chunks.encode(made(records))
    begin = 16 * len(records) + sum(map(len, made(records).data))  # of the origins
    place = dice.draw(st.integers(begin, len(columns.data)))
    end = dice.draw(st.integers(place, len(columns.data)))
    changed = columns.data[:place] + dice.draw(st.binary(max_size=40)) + columns.data[end:]
    try:
        read = chunks.decode(with_right_checksum(columns, changed))
    except CorruptChunkError:
        assert changed != columns.data
        return
    assert columns.data[:begin] + (b"" if read.origins is None else chunks.pack_origins(read.origins)) == changed


@pytest.mark.parametrize(
    "packed",
    [
        b"\0",
        b"\0\0" + bytes(10),  # no log, and no record of one
        b"\1\0" + LOGS[1] + bytes(10),  # a log that no record names
        b"\1\0" + LOGS[1] + b"\2\0" + bytes(8),  # a record of another log
        b"\2\0" + LOGS[1] * 2 + b"\1\0" + bytes(8),  # a log that is named twice
        b"\1\0" + LOGS[1] + b"\1\0" + bytes(7),
        b"\1\0" + LOGS[1] + b"\1\0" + bytes(9),
    ],
)
def test_octets_that_name_no_origins(packed: bytes) -> None:
    assert chunks.unpack_origins(packed, 1) is None
    assert chunks.unpack_origins(packed, 0) is None
    columns = chunks.encode(made([(0, 0, None)]))
    with pytest.raises(CorruptChunkError):
        chunks.decode(with_right_checksum(columns, columns.data + packed))


# -- parts


@given(RECORDS, st.integers(0, 31), st.integers(0, 31), st.frozensets(st.integers(0, 3)))
def test_each_part_keeps_them(records: Given, one: int, other: int, wanted: frozenset[int]) -> None:
    chunk, whole = made(records), content(made(records))
    begin, end = sorted((one % len(records), other % len(records)))
    assert content(chunk.slice(begin, end + 1)) == whole[begin : end + 1]
    assert content(chunk.after(begin)) == whole[begin:]
    scan = Scan(0, end + 1, len(records), 1 << 30)
    scan.take(chunk, None)
    assert [row for part in scan.chunks for row in content(part)] == whole[: end + 1]
    selected = chunk.select(wanted)
    assert (content(selected) if selected else []) == [row for row in whole if row[1] in wanted]


@given(RECORDS, st.integers(1, 3_000))
def test_a_reply_has_room_for_them(records: Given, bytes_max: int) -> None:
    chunk = made(records)
    scan = Scan(0, len(records), 100, bytes_max, strict=True)
    scan.take(chunk, None)
    batch = RecordBatch()
    for part in scan.chunks:
        add_records(batch, part)
    columns = RecordBatch()
    for part in scan.chunks:
        add_records(columns, Chunk(part.seqs, part.time_ms, part.streams, part.prev_seqs, [b""] * len(part)))
    heads = 3 * 3  # the tag and the length of each column of origins
    assert batch.ByteSize() - columns.ByteSize() - 3 * len(batch.seq) - heads <= bytes_max


# -- on the wire


@given(st.lists(RECORDS, min_size=1, max_size=4))
def test_a_reply_has_them_in_columns(parts: list[Given]) -> None:
    batch, expected, first_seq = RecordBatch(incarnation=b"i" * 16), list[Origin | None](), 1
    for records in parts:
        add_records(batch, made(records, first_seq))
        expected += [origin for *_, origin in records]
        first_seq += len(records)
    found = decode(batch)
    assert found is not None
    assert [one.origin for one in found if isinstance(one, Record)] == expected
    assert [one.seq for one in found if isinstance(one, Record)] == list(range(1, first_seq))
    assert len(set(batch.origin_incarnation)) == len(batch.origin_incarnation)
    if not any(expected):
        assert len(batch.origin_incarnation) == len(batch.origin) == len(batch.origin_seq) == 0


def replied(**columns: Any) -> RecordBatch:
    batch = RecordBatch(incarnation=b"i" * 16)
    add_records(batch, made([(0, 0, None), (1, 1, None)]))
    batch.MergeFrom(RecordBatch(**columns))
    return batch


BAD: dict[str, dict[str, Any]] = {
    "no numbers": {"origin_incarnation": LOGS[:1]},
    "too few places": {"origin_incarnation": LOGS[:1], "origin": [1], "origin_seq": [1, 2]},
    "too few seqs": {"origin_incarnation": LOGS[:1], "origin": [1, 1], "origin_seq": [1]},
    "too many": {"origin_incarnation": LOGS[:1], "origin": [1, 1, 1], "origin_seq": [1, 2, 3]},
    "no place": {"origin_incarnation": LOGS[:1], "origin_seq": [1, 2]},
    "a place beyond": {"origin_incarnation": LOGS[:1], "origin": [1, 2], "origin_seq": [1, 2]},
    "no logs": {"origin": [0, 1], "origin_seq": [0, 1]},
    "a short name": {"origin_incarnation": [LOGS[0], b"short"], "origin": [1, 2], "origin_seq": [1, 2]},
    "a long name": {"origin_incarnation": [LOGS[0] + b"x"], "origin": [1, 0], "origin_seq": [1, 0]},
    "a seq beyond": {"origin_incarnation": LOGS[:1], "origin": [1, 1], "origin_seq": [1, chunks.SEQ_MAX + 1]},
    "no seq": {"origin_incarnation": LOGS[:1], "origin": [1, 1], "origin_seq": [1, 0]},
}


@pytest.mark.parametrize("columns", BAD.values(), ids=BAD.keys())
def test_columns_that_can_t_be_read_are_no_batch(columns: dict[str, Any]) -> None:
    assert decode(replied(**columns)) is None


def test_good_columns_are_one() -> None:
    found = decode(replied(origin_incarnation=LOGS[:2], origin=[2, 0], origin_seq=[chunks.SEQ_MAX, 0]))
    assert [one.origin for one in found or [] if isinstance(one, Record)] == [Origin(LOGS[1], chunks.SEQ_MAX), None]


@given(st.lists(st.binary(max_size=17), max_size=3), st.lists(st.integers(0, 4)), st.lists(st.integers(0, 2**64 - 1)))
def test_whatever_the_columns_hold_nothing_is_raised(logs: list[bytes], places: list[int], seqs: list[int]) -> None:
    found = decode(replied(origin_incarnation=logs, origin=places, origin_seq=seqs))
    for one in found or []:
        assert isinstance(one, Record)
        assert one.origin is None or (one.origin.incarnation in logs and 0 < one.origin.seq <= chunks.SEQ_MAX)
