"""Replay a drive: publish each sample in order, as fast as the network accepts them or at a given rate.

Drive -> the publisher's own samples -> batches -> send_batch, retries -> counts per topic
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from streamer.demo import drive as drives
from uprotocol import uri as uris
from uprotocol.pacing import Backoff
from uprotocol.status import RETRYABLE, UStatusError, invalid
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

BATCH_MAX: Final = 256  # messages per send_batch
RETRY_MIN_MS, RETRY_MAX_MS = 20, 2_000


def load(data: Path | None, seed: int, seconds: int) -> drives.Drive:
    """Returns the recorded drive in `data`, or a simulated one. Raises INVALID_ARGUMENT for an unreadable file."""
    if data is None:
        return drives.simulate(seed, seconds)
    try:
        text = data.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise invalid(f"can't read {data}: {error.strerror}") from None
    return drives.read(text)


async def replay(
    transport: UTransport,
    samples: Iterable[drives.SignalSample],
    *,
    rate: float | None = None,
    on_progress: Callable[[int], None] = lambda published: None,
) -> Counter[str]:
    """Publish every sample; `rate` is in samples per second. Returns the number of messages by topic.

    Raises the UStatusError of a message that the network refuses permanently.
    """
    counts: Counter[str] = Counter()
    started, published = time.monotonic(), 0
    iterator = iter(samples)
    while batch := list(itertools.islice(iterator, BATCH_MAX)):
        messages = [drives.message(sample) for sample in batch]
        await send_all(transport, messages)
        counts.update(uris.format(message.attributes.source) for message in messages)
        published += len(messages)
        on_progress(published)
        if rate is not None:
            ahead = published / rate - (time.monotonic() - started)
            if ahead > 0:
                await asyncio.sleep(ahead)
    return counts


async def send_all(transport: UTransport, messages: list[UMessage]) -> None:
    """Send until the network accepts all. Raises the UStatusError of a permanent refusal."""
    backoff = Backoff(RETRY_MIN_MS, RETRY_MAX_MS)
    while messages:
        statuses = await transport.send_batch(messages)
        failed = [index for index, status in enumerate(statuses) if status.code != UCode.OK]
        for index in failed:
            if statuses[index].code not in RETRYABLE:
                raise UStatusError.from_status(statuses[index])
        messages = [messages[index] for index in failed]
        if messages:
            await backoff.wait()
