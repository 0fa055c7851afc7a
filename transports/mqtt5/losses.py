"""What the broker has lost of what it had acknowledged to others for us, as far as that can be known.

CONNACK -> no session, though we had left one -> what came meanwhile is lost, and how much nobody knows
$SYS/broker/publish/messages/dropped -> Dropped -> it has risen: our queue at the broker was full (mosquitto),
                                                   or somebody else's

mosquitto answers PUBACK 0x00 for a message whose subscriber's queue is full, throws it away, and counts it: all
sessions in one number. We have that number in our session, like any other topic. So each of its updates waits in our
queue while we are away, and one that is missing there has been thrown away itself: then our queue was full. Of an
update that comes right after our return, or while we lag behind, nobody can tell whose messages it counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from transports.base import tell
from uprotocol.transport import LossCallback

DROPPED_TOPIC: Final = "$SYS/broker/publish/messages/dropped"
# after our return: an update may be as late as sys_interval (10 s unless set; up to a minute is allowed for here)
SETTLE_S: Final = 70.0
COUNT_DIGITS_MAX: Final = 18  # of the broker's count, which is of 64 bits: metrics can't say numbers of any length
# topic filters that are remembered for the next process, some 3 MB; those beyond it stay in the session until it ends
FILTERS_MAX: Final = 65_536
FILTER_BYTES_MAX: Final = 65_535  # what MQTT can say
# a broker that has ended the connection over our question for its count (rumqttd) is asked again after that, by any
# process: it may have been chance
ASKED_AGAIN_S: Final = 86_400
# the whole file is written for each change: with many filters that often, and no more, so that flash does not wear
SAVED_FILTERS_PER_S: Final = 1_000

log = structlog.get_logger()


class Loss(NamedTuple):
    messages: int  # at most: the broker counts all sessions together
    ours: bool  # our session's queue was full; else it may have been another's


class Dropped:
    """Reads the broker's count as it comes through our session. Pure; times are the loop's, in seconds."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._catching_up = self._others = False
        self._uncertain = 0  # what was counted while catching up
        self._settled_s = 0.0

    def returned(self, now_s: float) -> None:
        """A connection with the old session: what was queued comes first, then the present count, which is retained."""
        self._catching_up, self._others, self._uncertain = True, False, 0
        self._settled_s = now_s + SETTLE_S

    def seen(self, count: int, *, retained: bool, behind: bool, now_s: float) -> Loss | None:
        """`behind`: so much has been unacknowledged since the last count that the broker may have had to queue."""
        last, self.last = self.last, count
        if last is None:
            self._catching_up = self._catching_up and not retained
            return None
        risen = count - last if count >= last else count  # less than before: the broker has been started anew
        if retained:
            if self._catching_up:
                self._others, self._catching_up = self._uncertain > 0, False
                self._settled_s = now_s + SETTLE_S
            return Loss(risen, ours=count >= last) if risen else None
        if self._catching_up:
            # it was queued, so there was room: others' messages, unless the present count never comes
            self._uncertain += risen
            return None
        if risen and (behind or (now_s < self._settled_s and not self._others)):
            return Loss(risen, ours=False)
        return None

    def tick(self, now_s: float) -> Loss | None:
        """The present count does not come if the broker has just been started: then what was queued may be all that is
        told."""
        if not self._catching_up or now_s < self._settled_s:
            return None
        self._catching_up = False
        return Loss(self._uncertain, ours=False) if self._uncertain else None


class Losses:
    """Tells of losses once each: by a line in the log, a counter, and the callbacks. Lives on the event loop.

    `session` names the one that the broker keeps for us; None if its name is made up at each start, so that no later
    process returns to it.
    """

    def __init__(self, address: str, session: str | None, counters: Counter[str]) -> None:
        self._address, self._session, self._counters = address, session, counters
        self.callbacks: list[LossCallback] = []
        self._dropped = Dropped()
        self.behind = False  # so much is unacknowledged that the broker may have to queue
        self._is_told = True  # the broker may tell its count
        self._ask_at_s = 0  # not before that time (seconds since 1970)
        self._file: Path | None = None
        self._left: str | None = None  # the session that an earlier process has left, until we have connected
        self.filters_left: list[str] = []  # the topic filters in it
        self._saved: dict[str, Any] = {}  # what the file says
        self._is_saved = True  # the last try has succeeded
        self._saving: asyncio.Future[None] | None = None
        self._save_at_s = 0.0

    # Over a restart.

    def remember_in(self, file: Path) -> None:
        """What an earlier process has left there counts from now on. A file that can't be read is as good as none."""
        self._file = file
        try:
            found = json.loads(file.read_text())
            session, dropped, ask_at_s = found["session"], found["dropped"], int(found.get("ask_at_s", 0))
            filters = [one for one in found.get("filters", []) if _is_filter(one)][:FILTERS_MAX]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = (
                "what the last run knew of the broker can't be read: losses across this restart won't be told, nor the "
                "filters left that it had and we don't want"
            )
            log.warning(why, error=repr(error))
            return
        self._saved = {"session": session, "dropped": dropped, "filters": tuple(filters), "ask_at_s": ask_at_s}
        self._ask_at_s = ask_at_s if ask_at_s <= time.time() + ASKED_AGAIN_S else 0  # else the clock was ahead
        self._left = session if isinstance(session, str) else None
        if session is not None and session == self._session:
            self._dropped.last = dropped if type(dropped) is int else None
            self.filters_left = filters

    def _save(self, filters: tuple[str, ...]) -> None:
        """`filters`: all that the session has. Without any, nothing can be lost with it."""
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
        self._is_saved = _write(file, known)

    async def close(self, filters: tuple[str, ...]) -> None:
        if self._saving is not None:
            await asyncio.wait({self._saving})
        self._save(filters)
        if self._saving is not None:
            await asyncio.wait({self._saving})

    # What the transport tells.

    def connected(self, *, resumed: bool, had_session: bool, forgets: bool, now_s: float) -> None:
        """`had_session`: an earlier connection of this process has left one that listened; `forgets`: we have asked for
        a new one."""
        left, self._left = self._left, None
        if left is not None:
            lost = not forgets and not (resumed and left == self._session)
        else:
            lost, left = had_session and not resumed, self._session
        if resumed:
            self._dropped.returned(now_s)
        else:
            self._dropped = Dropped()
        if lost:
            self._counters["session_lost"] += 1
            what = f"the broker at {self._address} has not resumed the session {left or 'that we had'}"
            why = "(it expired, the broker forgot it, or the settings name another)"
            known = "what came for it while we were away is lost, and how much nobody knows"
            self._tell(f"{what} {why}: {known}", None)

    @property
    def may_ask(self) -> bool:
        """The broker may be asked for its count."""
        return self._is_told and time.time() >= self._ask_at_s

    def not_told(self, *, hung_up: bool) -> None:
        """The broker has refused to tell its count, or has ended the connection over the question."""
        if hung_up:
            self._ask_at_s = int(time.time()) + ASKED_AGAIN_S
        else:
            self._is_told = False

    def counted(self, payload: bytes, *, retained: bool, now_s: float) -> None:
        """A message on DROPPED_TOPIC."""
        try:
            count = int(payload[: COUNT_DIGITS_MAX + 1])
            if not 0 <= count < 10**COUNT_DIGITS_MAX:
                raise ValueError
        except ValueError:
            log.debug("the broker's count of dropped messages is no number", payload=payload[:40])
            return
        behind, self.behind = self.behind, False
        self._tell_dropped(self._dropped.seen(count, retained=retained, behind=behind, now_s=now_s))

    def tick(self, now_s: float, filters: tuple[str, ...]) -> None:
        """`filters`: the session has these now, as far as we know."""
        self._tell_dropped(self._dropped.tick(now_s))
        if now_s >= self._save_at_s and (self._saving is None or self._saving.done()):
            self._save(filters)
            self._save_at_s = now_s + len(filters) / SAVED_FILTERS_PER_S

    def _tell_dropped(self, loss: Loss | None) -> None:
        if loss is None:
            return
        self._counters["broker_dropped"] += loss.messages
        what = (
            f"the broker at {self._address} has dropped up to {loss.messages} messages that it had acknowledged to "
            "their senders"
        )
        if loss.ours:
            self._tell(f"{what}: its queue for our session was full", loss.messages)
        else:
            self._tell(f"{what}, while we were away or lagged behind; whether they were for us it does not say", None)

    def _tell(self, text: str, messages: int | None) -> None:
        log.error("the broker has lost messages", what=text)
        tell(self.callbacks, text, messages)


def _is_filter(found: object) -> bool:
    try:
        return isinstance(found, str) and 0 < len(found.encode()) <= FILTER_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _write(file: Path, known: dict[str, Any]) -> bool:
    """The whole file or none of it, whenever we end. False if it can't be written."""
    new = file.with_name(file.name + ".new")
    try:
        with new.open("w") as out:
            out.write(json.dumps(known))
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
        return True
    except OSError as error:
        why = "what is known of the broker can't be kept: after a restart losses may not be told, nor old filters left"
        log.warning(why, file=str(file), error=str(error))
        return False
