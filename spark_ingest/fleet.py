"""The histories of a query: those that are named, and those that are found while it runs.

named --------------------------------.
announcements to us ------------------+--> join --> Member, watched by HistoryPolls
the hub: which histories it follows --'
answers, refresh: wait for the plans of all histories, a bounded time     hold: move the cursors
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog

from spark_ingest.client import HistorySession
from spark_ingest.members import Member, QueryRun, new_query
from spark_ingest.offsets import Offset
from spark_ingest.polls import HistoryPolls
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.status import UStatusError
from uprotocol.tasks import end, wait_within
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.uuid import now_ms
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

FIRST_ANSWERS_S: Final = 0.8  # rounds wait so long, once, for a history that has not answered yet
REFRESHED_S: Final = 0.2  # a plan is not made again if the history takes longer to answer
DISCOVERY_S: Final = 10.0  # between two questions to the hub
PLAN_AGE_S: Final = 0.01  # an older plan is made again before it becomes a batch
LISTEN_S: Final = 6.0  # a streamer announces itself every five seconds
MEMBERS_MAX: Final = 10_000

log = structlog.get_logger()


class Fleet:
    """The histories of one run. One that does not answer holds up no other one. On the loop of `session`."""

    def __init__(self, session: HistorySession) -> None:
        self._session = session
        self.run = QueryRun(session.options)
        self.members: dict[str, Member] = {}
        self._polls = HistoryPolls(session, self.run)
        self._has_listened = asyncio.Event()  # members that are present have announced themselves by then
        self._discovering: asyncio.Task[None] | None = None

    def open(self, query: str, began_ms: int) -> None:
        self.run.query, self.run.began_ms = query or new_query(), began_ms
        for authority in self.run.options.named:
            self.join(authority)
        if self._discovering is None and any(map(uris.is_pattern, self.run.options.authorities)):
            self._session.on_open.append(self._listen)
            self._discovering = asyncio.create_task(self._discover())

    def join(self, authority: str) -> Member | None:
        """Watch a history, if the query reads it. Called for each announcement."""
        member = self.members.get(authority)
        if member is not None or not self.run.options.has_member(authority) or len(self.members) >= MEMBERS_MAX:
            return member
        member = self.members[authority] = Member(authority)
        self.run.histories = len(self.members)
        member.task = asyncio.create_task(self._polls.watch(member))
        member.task.add_done_callback(lambda _: self.run.news.set())  # it fails by a bug only, which is raised below
        return member

    def resume(self, start: Offset) -> None:
        """Go on from `start`, if that is not where the latest batch ended."""
        if not self.run.began_ms:
            self.open(start.query, start.began_ms or now_ms())
            self.run.has_begun = True
        elif start.query not in ("", self.run.query):  # its first batch was cut off, so Spark asked for its begin anew
            self.run.query, self.run.began_ms, self.run.has_begun = start.query, start.began_ms, True
            for known in self.members.values():
                known.acked = known.held = None
        for authority, history in start.histories.items():
            member = self.join(authority)
            if member is not None and member.offset != history:
                member.reset(history)

    async def find_members(self) -> None:
        """In a run that ends, wait for the members that are there."""
        if self.run.is_ending and self._discovering is not None:
            await self._has_listened.wait()

    async def _discover(self) -> None:
        """Open the session, so that announcements arrive, and ask the hub which histories it follows."""
        asyncio.get_running_loop().call_later(LISTEN_S, self._has_listened.set)
        while True:
            try:
                if self.run.options.hub:
                    services = await self._session.call(self.run.options.hub, lambda client: client.followed())
                    for service in services:
                        if service.ue_id == ids.ENTITY:
                            self.join(service.authority_name)
                    self._has_listened.set()
                else:
                    await self._session.open()
            except UStatusError as error:
                log.warning("no members of the fleet can be found", hub=self.run.options.hub or None, error=str(error))
            await asyncio.sleep(DISCOVERY_S)

    async def _listen(self, transport: UTransport, local: LocalUriProvider) -> None:
        """Listen for the announcements of streamers, which are notifications to us."""
        announcements = uris.uri(uris.WILDCARD_AUTHORITY, ids.ENTITY, ids.VERSION, ids.ANNOUNCEMENTS)
        to_us = uris.uri(local.get_authority(), uris.ANY.ue_id, uris.ANY.ue_version_major, 0)
        await transport.register_listener(announcements, self, to_us)

    def on_receive(self, message: UMessage) -> None:
        """A streamer announces its history."""
        self.join(message.attributes.source.authority_name)

    async def answers(self, limit_s: float, *, must_answer: bool = False) -> None:
        """Wait until each history has answered or failed, at most `limit_s` since it was first asked. `must_answer`:
        wait for the first answer that long from now, and then for the others FIRST_ANSWERS_S; raise UNAVAILABLE if none
        comes. Raises what is refused."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            self.raise_refused()
            members = self.members.values()
            has_answer = any(member.answered_ms for member in members)
            missing = [member for member in members if not member.asked]
            if not missing and (has_answer or not must_answer):
                return
            is_short = has_answer and must_answer and self.run.has_cursors  # without cursors all are read now, or never
            left_s = began + (min(limit_s, FIRST_ANSWERS_S) if is_short else limit_s) - loop.time()
            if not must_answer:  # the rounds before may have waited for it
                left_s = min(left_s, max(one.began_s for one in missing) + limit_s - time.monotonic())
            if left_s <= 0:
                break
            self.run.news.clear()
            await wait_within(self.run.news, left_s)
        if must_answer and not has_answer:
            which = ", ".join(self.run.options.named or self.run.options.authorities)
            errors = "; ".join(member.error.message for member in members if member.error is not None)
            why = errors or "no streamer has announced itself"
            raise UStatusError(UCode.UNAVAILABLE, f"no answer from {which} within {limit_s:g} s: {why}")

    async def refresh(self) -> None:
        """Make the plans at hand again, so that a batch has the records up to now; a plan was made when its first
        record came. Waits at most FIRST_ANSWERS_S; not for a history that is slow."""
        if self.run.is_ending:
            return
        oldest_s, deadline = time.monotonic() - PLAN_AGE_S, asyncio.get_running_loop().time() + FIRST_ANSWERS_S
        stale = [one for one in self.members.values() if one.cuts and not one.is_full and one.planned_s < oldest_s]
        stale = [one for one in stale if one.answer_s < REFRESHED_S and one.error is None]
        for member in stale:
            member.is_stale = True
            member.wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while any(member.is_stale for member in stale):
                    self.run.news.clear()
                    await self.run.news.wait()

    def raise_refused(self, *, is_away_refused: bool = False) -> None:
        """Raise what a history refuses, unless a pattern found it: then it is in the log. `is_away_refused`: also
        the error of one that is away, if it is read whole or is the only one."""
        for watched in self.members.values():
            if watched.task is not None and watched.task.done():
                watched.task.result()
        is_away_refused = is_away_refused and (not self.run.has_cursors or not self.run.options.authorities)
        for authority in self.run.options.named:
            member = self.members.get(authority)
            if member is not None and member.error is not None and (member.is_refused or is_away_refused):
                raise member.error

    def is_planning(self) -> bool:
        """Returns whether a run that ends still waits for a plan."""
        self.raise_refused(is_away_refused=True)
        return any(not one.has_news and not one.is_at_target and one.error is None for one in self.members.values())

    async def end_at_present(self) -> None:
        """From now on plan the records that are there now, and no later ones: Trigger.AvailableNow."""
        self.run.is_ending = True
        authorities = {*self.run.options.named, *self.members}
        found = await asyncio.gather(*map(self._polls.newest, authorities), return_exceptions=True)
        self.run.targets = {one: seqs for one, seqs in zip(authorities, found, strict=True) if isinstance(seqs, dict)}
        for member in self.members.values():
            member.target = None
            member.plan_again()

    async def hold(self, acked: Offset, members: Sequence[Member], *, keeps: bool = False) -> None:
        """Move the cursors of `members` to what a query needs that has stored all batches up to `acked`. Waits at most
        FIRST_ANSWERS_S. A history that is away still keeps its records; its next poll moves its cursor. `keeps`: only
        make those that are not there yet."""
        if not self.run.has_cursors:
            return
        renewing = list[asyncio.Task[None]]()
        for member in members:
            position = acked.histories.get(member.authority, member.offset)
            if position is None or not member.next:
                continue
            member.acked, member.keeps = position, keeps
            if member.error is None and member.renewing is None and member.cursor() != member.held:
                member.renewing = asyncio.create_task(self._renew(member))
                renewing.append(member.renewing)
        if renewing:
            done, _ = await asyncio.wait(renewing, timeout=FIRST_ANSWERS_S)
            for task in done:
                task.result()
        self.raise_refused()

    async def _renew(self, member: Member) -> None:
        try:
            await self._polls.renew(member)
        except UStatusError as error:
            self._polls.failed(member, error)
            member.wake.set()
        finally:
            member.renewing = None

    async def close(self) -> None:
        members = self.members.values()
        await end(self._discovering, *(task for one in members for task in (one.task, one.renewing)))
        self.members.clear()
        self._discovering = None

    def lag(self) -> dict[str, Any]:
        """By authority: `records`, planned ones that are in no batch yet, `seconds` since the oldest of them was
        appended, and `away` with seconds and reason."""
        time_ms = now_ms()
        return {name: member.lag(time_ms) for name, member in sorted(self.members.items())}
