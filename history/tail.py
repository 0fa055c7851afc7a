"""The newest chunks in memory, within a limit: what pumps and pollers at the head read, and all there is of a volatile
log.

push -> [ gone | oldest ... newest ] -> read(after): a slice
          pop: from the left
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from history.chunk import Chunk

RECORD_MEMORY_BYTES: Final = 800  # what a record costs in memory beside its bytes (message object, columns); measured


class Tail:
    """The newest chunks, within a limit of memory."""

    def __init__(self, after: int, bytes_max: int) -> None:
        self.after = after  # everything beyond it is here
        self.bytes_max = bytes_max
        self.bytes = 0
        self.chunks: list[Chunk] = []
        self._last_seqs: list[int] = []
        self._sizes: list[int] = []
        self._gone = 0  # places at the front that are free already; cut off now and then, since that moves all others

    def __len__(self) -> int:
        return len(self.chunks) - self._gone

    def push(self, chunk: Chunk, message_bytes: int) -> list[Chunk]:
        """Returns what has to go for it."""
        bytes = 2 * message_bytes + RECORD_MEMORY_BYTES * len(chunk)  # as objects, and as they are on disk
        self.chunks.append(chunk)
        self._last_seqs.append(chunk.last_seq)
        self._sizes.append(bytes)
        self.bytes += bytes
        gone: list[Chunk] = []
        while self.bytes > self.bytes_max and len(self) > 1:
            gone.append(self.pop())
        return gone

    def pop(self) -> Chunk:
        """Let the oldest chunk go."""
        place = self._gone
        chunk = self.chunks[place]
        self.after = self._last_seqs[place]
        self.bytes -= self._sizes[place]
        self.chunks[place] = None  # type: ignore[call-overload]
        self._gone += 1
        if self._gone > 256 and self._gone * 2 > len(self.chunks):
            del self.chunks[: self._gone], self._last_seqs[: self._gone], self._sizes[: self._gone]
            self._gone = 0
        return chunk

    @property
    def oldest(self) -> Chunk | None:
        return self.chunks[self._gone] if len(self) else None

    def read(self, after: int, chunks_max: int | None = None) -> list[Chunk]:
        place = bisect_right(self._last_seqs, after, lo=self._gone)
        found = self.chunks[place : None if chunks_max is None else place + chunks_max]
        if found and found[0].first_seq <= after:
            found[0] = found[0].after(after)
        return found
