"""Notices publishers with an older layout of keys, whose messages cannot be read.

up/A/8001/1/8002/{}/{}/{}/{}   four segments for each address -> counted; the authority is logged once, and in `notes`
                               after OLDER_COUNTED_MAX messages  -> the subscription ends: they need not cross it

Ours has five segments for each address (mapping.py), so no subscription of ours matches such a key: the publisher
reports success, and nobody would know why nothing arrives. Which libraries write it: docs/interop.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import structlog
import zenoh
from zenoh.handlers import Callback

from uprotocol import uri as uris
from uprotocol import uuid as uuids

OLDER_KEYS: Final = "up/*/*/*/*/*/*/*/*"
OLDER_COUNTED_MAX: Final = 1_000  # messages of one session: enough to name their senders
LOGGED_AUTHORITIES_MAX: Final = 100  # that are logged; anybody can invent more
AUTHORITIES_SHOWN_MAX: Final = 5  # in the note

log = structlog.get_logger()


class OlderLayout:
    """The publishers with an older layout that one transport has noticed. `messages` and the authorities outlive a
    session."""

    def __init__(self, local_authority: str) -> None:
        self._local_authority = local_authority
        self.messages = 0
        """Messages with such keys. Counting ends at OLDER_COUNTED_MAX in a session."""
        self._left = 0  # messages that are still counted in this session
        self._authorities: dict[str, None] = {}
        self._since = ""  # of the first message, ISO 8601
        self._subscriber: Any = None
        self._declaring = threading.Lock()

    def declare(self, session: zenoh.Session, later: Callable[[Callable[[], None]], object]) -> None:
        """Listen to keys of the older layout. Blocks. `later(call)` runs `call()` on a thread that may block. Does
        nothing if the session is closed, or has such a subscription already."""

        def on_sample(sample: zenoh.Sample) -> None:
            self._on_sample(sample, later)

        with self._declaring, contextlib.suppress(zenoh.ZError):
            if self._subscriber is None:
                self._left = OLDER_COUNTED_MAX
                self._subscriber = session.declare_subscriber(
                    OLDER_KEYS, Callback(on_sample, indirect=False), allowed_origin=zenoh.Locality.REMOTE
                )

    def undeclare(self) -> None:
        """Blocks."""
        with self._declaring, contextlib.suppress(zenoh.ZError):
            if self._subscriber is not None:
                self._subscriber.undeclare()

    def forget_session(self) -> None:
        """The session is closed: `declare` may be called with the next one."""
        self._subscriber = None

    def _on_sample(self, sample: zenoh.Sample, later: Callable[[Callable[[], None]], object]) -> None:
        """On Zenoh's thread."""
        if self._left <= 0:
            return
        self._left -= 1
        self.messages += 1
        # no authority has been checked here: a segment of a key may be long, and have control characters
        authority = ascii(str(sample.key_expr).split("/", 2)[1][: uris.AUTHORITY_LENGTH_MAX])[1:-1]
        if authority not in self._authorities and len(self._authorities) < LOGGED_AUTHORITIES_MAX:
            self._authorities[authority] = None
            later(lambda: self._report(authority))
        if not self._left:
            later(self.undeclare)

    def _report(self, authority: str) -> None:
        self._since = self._since or datetime.fromtimestamp(uuids.now_ms() / 1_000, UTC).isoformat(timespec="seconds")
        log.warning(
            "messages with an older Zenoh key layout cannot be read",
            authority=self._local_authority,
            source_authority=authority,
            hint="update the Zenoh transport of the publisher, see docs/interop.md",
        )

    @property
    def notes(self) -> list[str]:
        if not self._since:
            return []
        authorities = list(self._authorities)
        shown = ", ".join(authorities[:AUTHORITIES_SHOWN_MAX])
        more = len(authorities) - AUTHORITIES_SHOWN_MAX
        return [
            f"since {self._since} messages with an older Zenoh key layout (up/ and four segments for each address) "
            f"come from {shown}{f' and {more} more' if more > 0 else ''}: they cannot be read; update the Zenoh "
            "transport of these publishers (docs/interop.md)"
        ]
