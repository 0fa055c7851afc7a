"""Messages for us that the broker has acknowledged to their senders and then lost, as far as that can be known.

CONNACK -> no session, though we had left one -> messages that came meanwhile are lost; how many is unknown
$SYS/broker/publish/messages/dropped -> DropCount -> it has risen: our queue at the broker was full (mosquitto),
                                                     or somebody else's

If a subscriber's queue is full, mosquitto answers PUBACK 0x00, drops the message, and counts it, in one number for all
sessions. Our session subscribes to that number like to any other topic. So its updates wait in our queue while we are
away; if one is missing there, it was dropped itself, so our queue was full. For an update that comes right after our
return, or while we lag behind, it is unknown whose messages it counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from transports.base import tell
from uprotocol.transport import LossCallback

ADDRESS: Final = " at "  # between the client_id and the broker's address, in the name of a session
DROPPED_TOPIC: Final = "$SYS/broker/publish/messages/dropped"
# after our return: an update may be late by sys_interval (10 s unless set; up to a minute is allowed here)
COUNT_SETTLES_S: Final = 70.0
COUNT_DIGITS_MAX: Final = 18  # of the broker's count, which has 64 bits; metrics need a bound
# topic filters that are saved for the next process, some 3 MB; those beyond it stay in the session until it ends
FILTERS_MAX: Final = 65_536
FILTER_BYTES_MAX: Final = 65_535  # the limit of MQTT
# if the broker has ended the connection over the request for its count (rumqttd), it is asked again after this time, by
# any process: it may have been chance
ASK_FOR_COUNT_S: Final = 86_400
# each change writes the whole file: with many filters so seldom that flash does not wear out
SAVED_FILTERS_PER_S: Final = 1_000

log = structlog.get_logger()


class Loss(NamedTuple):
    messages: int  # at most: the broker counts all sessions together
    ours: bool  # our session's queue was full; else it may have been another's


class DropCount:
    """Interprets the broker's count as it arrives through our session. Pure; times are those of the loop, in
    seconds."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._catching_up = self._others = False
        self._uncertain = 0  # what was counted while catching up
        self._settled_s = 0.0

    def returned(self, now_s: float) -> None:
        """There is a connection with the old session: queued messages come first, then the present count, which is
        retained."""
        self._catching_up, self._others, self._uncertain = True, False, 0
        self._settled_s = now_s + COUNT_SETTLES_S

    def seen(self, count: int, *, retained: bool, behind: bool, now_s: float) -> Loss | None:
        """The count has arrived. `behind`: since the last one, so many messages were unacknowledged that the broker may
        have had to queue. Returns the loss, if any."""
        last, self.last = self.last, count
        if last is None:
            self._catching_up = self._catching_up and not retained
            return None
        risen = count - last if count >= last else count  # less than before: the broker was restarted
        if retained:
            if self._catching_up:
                self._others, self._catching_up = self._uncertain > 0, False
                self._settled_s = now_s + COUNT_SETTLES_S
            return Loss(risen, ours=count >= last) if risen else None
        if self._catching_up:
            # it was queued, so our queue was not full: others' messages, unless the present count never comes
            self._uncertain += risen
            return None
        if risen and (behind or (now_s < self._settled_s and not self._others)):
            return Loss(risen, ours=False)
        return None

    def tick(self, now_s: float) -> Loss | None:
        """If the broker was just started, the present count does not come: then the queued counts may be all there
        are."""
        if not self._catching_up or now_s < self._settled_s:
            return None
        self._catching_up = False
        return Loss(self._uncertain, ours=False) if self._uncertain else None


class Losses:
    """Reports each loss once: a line in the log, a counter, and the callbacks. Lives on the event loop.

    `session` names the one that the broker keeps for us, "CLIENT_ID at ADDRESS"; None if its name is generated at each
    start, so that no later process resumes it.
    """

    def __init__(
        self, address: str, session: str | None, counters: Counter[str], callbacks: Sequence[LossCallback] = ()
    ) -> None:
        self._address, self._session, self._counters, self._callbacks = address, session, counters, callbacks
        self._dropped = DropCount()
        self.behind = False  # so many messages are unacknowledged that the broker may have to queue
        self._is_published = True  # the broker may publish its count
        self._ask_at_s = 0  # Unix seconds; the broker is not asked before
        self._file: Path | None = None
        self._left: str | None = None  # the session of an earlier process, until we have connected
        self.filters_left: list[str] = []  # its topic filters
        self._saved: dict[str, Any] = {}  # the content of the file
        self._is_saved = True  # the last attempt to write has succeeded
        self._saving: asyncio.Future[None] | None = None
        self._save_at_s = 0.0

    # Across restarts.

    def remember_in(self, file: Path) -> None:
        """Continue with what an earlier process has saved in `file`, and save there. An unreadable file counts as
        none."""
        self._file = file
        try:
            found = json.loads(file.read_text())
            session, dropped, ask_at_s = found["session"], found["dropped"], int(found.get("ask_at_s", 0))
            filters = [one for one in found.get("filters", []) if _is_filter(one)][:FILTERS_MAX]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = (
                "the saved state of the broker's session can't be read: losses across this restart won't be reported, "
                "and unwanted filters of the last run won't be unsubscribed"
            )
            log.warning(why, error=repr(error))
            return
        self._saved = {"session": session, "dropped": dropped, "filters": tuple(filters), "ask_at_s": ask_at_s}
        self._ask_at_s = ask_at_s if ask_at_s <= time.time() + ASK_FOR_COUNT_S else 0  # else the clock was ahead
        self._left = session if isinstance(session, str) else None
        if session is not None and session == self._session:
            self._dropped.last = dropped if type(dropped) is int else None
        if self._is_of_ours(self._left):
            self.filters_left = filters

    def _is_of_ours(self, left: str | None) -> bool:
        """The session has our client_id, at this address or at one that the broker had before."""
        if left is None or self._session is None:
            return False
        return left == self._session or left.rpartition(ADDRESS)[0] == self._session.rpartition(ADDRESS)[0] != ""

    def _save(self, filters: tuple[str, ...]) -> None:
        """`filters`: all that the session has. Without any, nothing can be lost with the session."""
        is_resumed = self._session is not None
        known = {
            "session": self._session if filters else None,
            "dropped": self._dropped.last,
            "filters": filters[:FILTERS_MAX] if is_resumed else (),
            "ask_at_s": self._ask_at_s,
        }
        is_empty = not filters and not self._ask_at_s and not self._saved
        if self._file is None or (known == self._saved and self._is_saved) or is_empty:
            return
        self._saved, self._is_saved = known, False
        self._saving = asyncio.ensure_future(asyncio.to_thread(self._write, self._file, known))

    def _write(self, file: Path, known: dict[str, Any]) -> None:
        """Write the file atomically. Blocks."""
        new = file.with_name(file.name + ".new")
        try:
            with new.open("w") as out:
                out.write(json.dumps(known))
                out.flush()
                os.fsync(out.fileno())
            new.replace(file)
            self._is_saved = True
        except OSError as error:
            why = "the state of the broker's session can't be saved: losses across a restart may not be reported"
            log.warning(why, file=str(file), error=str(error))

    async def close(self, filters: tuple[str, ...]) -> None:
        if self._saving is not None:
            await asyncio.wait({self._saving})
        self._save(filters)
        if self._saving is not None:
            await asyncio.wait({self._saving})

    # Events of the connection, reported by the transport.

    def connected(self, *, resumed: bool, had_session: bool, forgets: bool, now_s: float) -> None:
        """`had_session`: an earlier connection of this process has left a session with filters. `forgets`: we have
        asked for a new one."""
        left, self._left = self._left, None
        if left is not None:
            lost = not forgets and not (resumed and self._is_of_ours(left))
            if resumed and not lost and left != self._session:
                why = "the session goes on at another address; if that is another broker, what the first kept is lost"
                log.warning(why, session=self._session, former=left)
        else:
            lost, left = had_session and not resumed, self._session
        if resumed:
            self._dropped.returned(now_s)
        else:
            self._dropped = DropCount()
        if lost:
            self._counters["session_lost"] += 1
            what = f"the broker at {self._address} has not resumed the session {left or 'that we had'}"
            why = "(it expired, the broker forgot it, or the settings name another)"
            known = "messages that came for it while we were away are lost; how many is unknown"
            self._report(f"{what} {why}: {known}", None)

    @property
    def may_ask(self) -> bool:
        """True if the broker may be asked for its count."""
        return self._is_published and time.time() >= self._ask_at_s

    def not_published(self, *, hung_up: bool) -> None:
        """The broker has refused the subscription to its count, or has ended the connection over it."""
        if hung_up:
            self._ask_at_s = int(time.time()) + ASK_FOR_COUNT_S
        else:
            self._is_published = False

    def counted(self, payload: bytes, *, retained: bool, now_s: float) -> None:
        """A message on DROPPED_TOPIC."""
        try:
            count = int(payload[: COUNT_DIGITS_MAX + 1])
            if not 0 <= count < 10**COUNT_DIGITS_MAX:
                raise ValueError
        except ValueError:
            log.debug("the broker's count of dropped messages is not a number", payload=payload[:40])
            return
        behind, self.behind = self.behind, False
        self._report_dropped(self._dropped.seen(count, retained=retained, behind=behind, now_s=now_s))

    def tick(self, now_s: float, filters: tuple[str, ...]) -> None:
        """Called once a second. `filters`: those that the session has now, as far as is known."""
        self._report_dropped(self._dropped.tick(now_s))
        if now_s >= self._save_at_s and (self._saving is None or self._saving.done()):
            self._save(filters)
            self._save_at_s = now_s + len(filters) / SAVED_FILTERS_PER_S

    def _report_dropped(self, loss: Loss | None) -> None:
        if loss is None:
            return
        self._counters["broker_dropped"] += loss.messages
        what = (
            f"the broker at {self._address} has dropped up to {loss.messages} messages that it had acknowledged to "
            "their senders"
        )
        if loss.ours:
            self._report(f"{what}: its queue for our session was full", loss.messages)
        else:
            self._report(f"{what}, while we were away or lagged behind; it does not say whether they were for us", None)

    def _report(self, text: str, messages: int | None) -> None:
        log.error("the broker has lost messages", what=text)
        tell(self._callbacks, text, messages)


def _is_filter(found: object) -> bool:
    try:
        return isinstance(found, str) and 0 < len(found.encode()) <= FILTER_BYTES_MAX
    except UnicodeEncodeError:
        return False
