"""Targets for files and command lines: the log, the mark, remembered JSON, configurations, drives, checkpoints,
addresses, HTTP.

octets -> a file in a folder of this process -> its reader -> a value | the documented refusal
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from campaigns.fuzz.registry import refusing, target
from campaigns.fuzz.services import loop, paused
from campaigns.fuzz.shapes import Dice
from history.file import rows
from history.log.log import Log
from history.records import chunk as chunks
from spark_ingest import offsets
from spark_ingest.decode import Decoder, RecordColumns
from storage import disk as disks
from streamer import config
from streamer.commands.demo import drive
from streamer.config import AdminSection
from streamer.config.edge import HttpSection
from streamer.edge.callers import Callers
from streamer.edge.server import EdgeServer
from streamer.edge.tokens import read_tokens
from streamer.http.lines import Line, Lines, Listener
from streamer.http.places import Places
from streamer.letters.dead_letter import LetterStore
from streamer.letters.selection import LetterFilter
from streamer.operating.http_port import LIMITS, HttpPort
from streamer.operation import Arguments
from streamer.walk import paused as pauses
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription_client.sources import SavedInterest, read_static

INVALID: Final = UCode.INVALID_ARGUMENT


@cache
def folder() -> Path:
    """Returns a folder that is deleted when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="fuzz-")
    _kept.append(made)
    return Path(made.name)


_kept: list[Any] = []


def file_of(data: bytes, name: str) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# The log


@target
def log_chunk(data: bytes) -> None:
    """Reads columns with the right checksum and any content: a wrong checksum is refused before anything else is
    read."""
    dice = Dice(data)
    records = dice.octet()
    first_seq, time_ms = (int.from_bytes(dice.take(8), "little") >> 1 for _ in range(2))
    streams, ids = dice.some(), dice.some()
    blob = dice.rest()
    crc = chunks._crc(first_seq, records, time_ms, streams, ids, blob)
    columns = chunks.Columns(first_seq, records, time_ms, len(streams + ids + blob), crc, streams, ids, blob)
    try:
        read = chunks.decode(columns)
    except chunks.CorruptChunkError:
        return
    assert len(read) == records == len(read.data)
    notes = chunks.pack_notes(read)
    assert 16 * records + sum(map(len, read.data)) + len(notes) == len(blob), "every octet belongs to a record"
    read.after(first_seq - 1)
    chunks.unpack_streams(streams)


_SQL_VALUES: Final = (None, 0, 1, -1, 2**62, -(2**63), 1.5, "", "text", "egress:cloud", b"", b"\x0a\x03vin", b"x" * 16)


@target
def log_rows(data: bytes) -> None:
    """Reads rows of a log whose values have any type, and whose checksums are right, wrong by one bit, or random."""
    dice = Dice(data)
    table = dice.one_of(rows.CHECKED)
    row = tuple(dice.one_of(_SQL_VALUES) if dice.octet() & 1 else _sql(dice) for _ in table.columns)
    crc = table.checksum(row) ^ dice.one_of((0, 0, 1, 1 << 31, 0xFFFF))
    db = sqlite3.connect(":memory:")
    try:
        db.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)}, crc)")
        places = ", ".join("CAST(? AS TEXT)" if isinstance(value, str) else "?" for value in (*row, crc))
        values = (value.encode(errors="surrogateescape") if isinstance(value, str) else value for value in (*row, crc))
        db.execute(f"INSERT INTO {table.name} VALUES ({places})", tuple(values))
        bad: list[rows.StoredRow] = []
        found = list(table.read(db, bad))
        assert len(found) + len(bad) == 1
        for one in found:
            assert table.checksum(one) == table.checksum(row) or one == row
    finally:
        db.close()


def _sql(dice: Dice) -> Any:
    data = dice.some()
    return dice.one_of((data, rows.any_text(data), int.from_bytes(data[:8], "little", signed=True)))


@cache
def small_log() -> dict[str, bytes]:
    """Returns the files of a log with some records, as a killed process leaves them."""

    async def make() -> dict[str, bytes]:
        path = folder() / "made" / "l.db"
        log = await Log.open(path, name="fuzz", now_ms=lambda: 1_800_000_000_000)
        for number in range(9):
            topic = uris.uri("vin", 0x10, 1, 0x8000 + number % 3)
            message = UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"record" * number, 5))
            await log.append([log.stream_id(topic, None)], [message])
        log.cursors.set("egress:cloud", 4, holds=True, holder="egress")
        await log.close()
        return {one.name: one.read_bytes() for one in path.parent.iterdir() if not one.name.endswith((".lock", "-shm"))}

    return loop().run_until_complete(make())


@target
def log_file(data: bytes) -> None:
    """Opens a log with changed or missing octets. It must open, and each record that it returns is a message of a known
    topic."""
    files = {name: bytearray(content) for name, content in small_log().items()}
    dice = Dice(data)
    while dice.left:
        content = files[sorted(files)[dice.octet() % len(files)]]
        place = int.from_bytes(dice.take(3), "little")
        value = dice.octet()
        if content and value == 0xFF:
            del content[place % len(content) :]
        elif content:
            content[place % len(content)] = value
    where = folder() / "damaged"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    for name, content in files.items():
        (where / name).write_bytes(content)
    with refusing(UCode.FAILED_PRECONDITION, UCode.UNAVAILABLE):
        loop().run_until_complete(_read_log(where / "l.db"))


async def _read_log(path: Path) -> None:
    log = await Log.open(path, name="fuzz", now_ms=lambda: 1_800_000_000_000)
    try:
        after = log.floor_seq
        while after < log.newest_seq:
            scan = await log.scan(after, max_records=100, max_bytes=1 << 20)
            assert scan.covered > after, "it goes on"
            for chunk in scan.chunks:
                assert len(chunk.messages) == len(chunk.seqs)
                for stream in chunk.streams:
                    uris.validate(log.stream(stream).source)
            after = scan.covered
    finally:
        await log.close()


@target
def mark(data: bytes) -> None:
    path = file_of(data, "l.mark")
    try:
        found = disks.read_mark(path.with_suffix(""))
    except disks.BadMarkError:
        return
    if found is not None:
        with contextlib.closing(disks.Mark(path)) as mark:
            mark.write(*found)
        assert path.read_bytes() == data


# JSON


@target
def remembered_interest(data: bytes) -> None:
    for one in SavedInterest(file_of(data, "interest.json"), list).load():
        uris.validate(one.topic)
        assert one.sample_period_ms is None or 0 <= one.sample_period_ms < 1 << 32


@target
def static_interest(data: bytes) -> None:
    with refusing(INVALID):
        for one in read_static(file_of(data, "static.json")):
            assert uris.is_topic(one.topic) or one.topic.resource_id == uris.WILDCARD_RESOURCE
            assert one.subscriber.authority_name


@target
def paused_file(data: bytes) -> None:
    file = pauses.file_of(file_of(data, "paused.json"))
    with refusing(UCode.FAILED_PRECONDITION):
        found = pauses.read(file)
        file.save([*found])
        assert sorted(pauses.read(file)) == sorted(found)
        paused()._put_in_force(found)
        paused()._put_in_force([])


@target
def spark_offsets(data: bytes) -> None:
    with refusing(INVALID):
        found = offsets.parse(data.decode(errors="surrogateescape"), "gateway")
        if isinstance(found, offsets.Offset):
            assert offsets.parse(json.dumps(found.json())) == found
            ranges = list(offsets.ranges(offsets.Offset(), found, ()))
            assert ranges == list(offsets.ranges(offsets.Offset(), found, ()))
            if sum(one.until - one.after for one in ranges) < 1_000_000:
                offsets.divide(ranges, {}, 20_000, 1)
            for history in found.histories.values():
                offsets.needed(history)


@target
def spark_records(data: bytes) -> None:
    """Converts records of a Poll: one row for each, and the same rows each time."""
    dice = Dice(data)
    records = []
    while dice.left and len(records) < 8:
        records.append(dice.some())
    for data_of, format in ((records[-1:], 2), (records[-1:], 1), (records[-1:], 3), (records[-1:], 7)):
        for payload in data_of:
            message = UMessageBuilder.publish(uris.uri("vin", 1, 1, 0x8000)).build_from_upayload(
                UPayload(payload, format)
            )  # type: ignore[arg-type]
            records.append(message.SerializeToString())
    decoder = Decoder()
    columns = RecordColumns(range(len(records)), [1_800_000_000_000] * len(records), records)
    first = decoder.decode(columns, "")
    assert first.batch.num_rows == len(records)
    again = decoder.decode(columns, "")
    assert str(first.batch.to_pylist()) == str(again.batch.to_pylist()), "what was seen before reads otherwise"
    first.batch.validate(full=True)


@target
def spark_sample(data: bytes) -> None:
    """Converts a sample in plain protobuf behind another one: our parser and protobuf return the same row."""
    topic = uris.uri("vin", 1, 1, 0x8000)
    sample = ustreamer_pb2.Sample(path="Vehicle.Speed", double_value=1.5)
    sample.time.seconds = 1_800_000_000
    made = [
        UMessageBuilder.publish(topic).build_from_upayload(UPayload(one, 2))
        for one in (sample.SerializeToString(), data)
    ]  # type: ignore[arg-type]
    records = [one.SerializeToString() for one in made]
    both = Decoder().decode(RecordColumns([1, 2], [0, 0], records), "").batch.to_pylist()
    alone = Decoder().decode(RecordColumns([2], [0], records[1:]), "").batch.to_pylist()
    assert str(both[1]) == str(alone[0])


# Text


@target
def config_toml(data: bytes) -> None:
    with refusing(INVALID):
        config.loads(data.decode(errors="replace"))


@target
def edge_tokens(data: bytes) -> None:
    with refusing(INVALID):
        found = read_tokens(data)
        assert found
        assert all(len(digest) == 32 and uris.parse(uris.format(one)) == one for digest, one in found.items())


@target
def csv_drive(data: bytes) -> None:
    with refusing(INVALID):
        found = drive.read(data.decode(errors="replace"))
        samples = list(found.samples(0))
        assert len(samples) == sum(len(row) - row.count(None) for row in found.rows)
        for sample in samples[:10]:
            UMessageBuilder.publish(drive.message(sample).attributes.source).build()


@target
def uri_text(data: bytes) -> None:
    with refusing(INVALID):
        found = uris.parse(data.decode(errors="surrogateescape"))
        uris.validate(found)
        assert uris.parse(uris.format(found)) == found
        assert uris.matches(found, found)
        list(uris.owners(found.authority_name))


@target
def uuid_text(data: bytes) -> None:
    with refusing(INVALID):
        found = uuids.parse(data.decode(errors="surrogateescape"))
        assert uuids.parse(uuids.format(found)) == found
        assert uuids.from_bytes(uuids.to_bytes(found)) == found
    with refusing(INVALID):
        assert uuids.to_bytes(uuids.from_bytes(data)) == data


TURNS: Final = 30  # turns of the loop; an answer takes some ten


class _Client(asyncio.Transport):
    """A connection whose other end has sent something and receives the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.closed = b"", False
        self.line: asyncio.BaseProtocol | None = None

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.line is not None
        return self.line

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed


def _answers(make: Callable[[], Listener], data: bytes) -> bytes:
    """What a client gets that sends `data` to a port, within some turns of the loop."""

    async def run() -> bytes:
        listener, client = make(), _Client()
        client.line = line = Line((await listener.serve())(), listener.lines)
        line.connection_made(client)
        line.data_received(data)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        line.connection_lost(None)
        await listener.close()
        return client.data

    return loop().run_until_complete(run())


@target
def edge_request(data: bytes) -> None:
    section = HttpSection(listen="127.0.0.1:0", origins=["https://app.example.com"])

    def make() -> Listener:
        callers, places = Callers(section, "vehicle1"), Places(10)

        async def stream(request: web.Request) -> web.StreamResponse:
            return web.Response(text=uris.format(await callers.of(request)))

        async def proxied(request: web.Request) -> web.StreamResponse:
            return web.Response(body=await request.read())

        return EdgeServer(section, stream, proxied, callers=callers, places=places).listener()

    answer = _answers(make, data)
    assert not answer or answer.startswith(b"HTTP/")
    assert b"this request has failed" not in answer


@target
def admin_request(data: bytes) -> None:
    def make() -> Listener:
        port = HttpPort({"/metrics": lambda: (200, "text/plain", b"metric 1\n")}, {}, None, AdminSection())
        return port.listener("127.0.0.1:0", Lines(LIMITS))

    answer = _answers(make, data)
    assert not answer or answer.startswith(b"HTTP/")
    if answer:
        head, body = answer.split(b"\r\n\r\n", 1)
        if not data.lstrip().startswith(b"HEAD"):
            assert f"Content-Length: {len(body)}".encode() in head, "a client knows where it ends"


@cache
def letters() -> LetterStore:
    store = LetterStore(folder() / "letters.db")
    store.write([(1, 7, "refused", "cloud", UMessage().SerializeToString())])
    return store


@target
def letter_arguments(data: bytes) -> None:
    """Selects dead letters with arguments of an operation."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        with refusing(INVALID):
            which = LetterFilter.of(Arguments(given))
            assert letters().count(which) == len(letters().select(which, 2))
