"""How far epochs have come where a poll begins to read: the newest frontiers up to there, in pages.

for each log: topics of frontiers that match -> the first one behind the place names the one before it -> that record
                     told in several logs, and followed into one? -> further back, until each of them is found
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from history.log.log import Log
from history.records.batch import add_records
from history.records.chunk import Chunk
from history.service.request import FRONTIERS_PAGE, Poll
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, RecordBatch

TOPICS_MAX: Final = 1_024  # of one answer; each costs two reads
BACK_MAX: Final = 8  # frontiers of one topic: who tells in several logs tells in all of them at once
BESIDE_BYTES_MAX: Final = 128 << 10  # with more of them an answer has no records: it has room for one of any size


async def add_frontiers(poll: Poll) -> bool:
    """To the response: as of where it begins to read, as many as it has room for. True: all of them are there, and it
    has room for records."""
    response, page = poll.response, poll.asked.frontiers_page
    logs = {log.incarnation: log for log in poll.places}
    begin, known = FRONTIERS_PAGE.unpack(page) if page else (b"", -1)
    left, room = TOPICS_MAX, poll.bytes_max
    for incarnation, log in list(logs.items())[[*logs].index(begin) if begin in logs else 0 :]:
        after = known if incarnation == begin else -1
        batch = RecordBatch(incarnation=incarnation)
        for id in sorted(id for id in log.frontier_ids if id > after and id in poll.matches[log].ids):
            if not left or room <= 0:
                response.next_frontiers_page = FRONTIERS_PAGE.pack(incarnation, after)
                break
            told = len(batch.message)
            for chunk in await _newest(log, id, poll.places[log]):
                add_records(batch, chunk)
            left, room, after = left - 1, room - sum(map(len, batch.message[told:])), id
        if batch.seq:
            response.frontiers.append(batch)
        if response.next_frontiers_page:
            return False
    response.has_frontiers = True
    return poll.bytes_max - room <= BESIDE_BYTES_MAX


async def _newest(log: Log, id: int, place: int) -> list[Chunk]:
    """One of each log in which it was told first, the newest one first."""
    found: list[Chunk] = []
    told, expected = set[bytes](), set[bytes]()
    seq = await _seq_before(log, id, place)
    for _ in range(BACK_MAX):
        if seq <= log.floor_seq:
            break
        chunks = await log.read(seq - 1, until=seq, streams={id})
        if not chunks:  # retention was faster, or it is damaged
            break
        (chunk,) = chunks
        origin = chunk.origins[0] if chunk.origins is not None else None
        where = log.incarnation if origin is None else origin.incarnation
        if where not in told:
            told.add(where)
            found.append(chunk)
            expected |= _logs_of(chunk)
        if expected <= told or origin is None:
            break
        seq = chunk.prev_seqs[0]
    return found


async def _seq_before(log: Log, id: int, place: int) -> int:
    """Of its newest record up to and with `place`; 0: there is none."""
    newest = log.stream(id).newest_seq if log.knows_stream(id) else 0
    if newest <= place:
        return newest
    for chunk in await log.read(place, max_records=1, streams={id}):
        return chunk.prev_seqs[0]
    return newest


def _logs_of(chunk: Chunk) -> set[bytes]:
    try:
        return {one for group in Frontier.FromString(chunk.messages[0].payload).groups for one in group.logs}
    except DecodeError:
        return set()
