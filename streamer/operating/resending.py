"""Sends stored dead letters again, to the endpoint where each has failed and nowhere else.

store -> batch -> may it go, and where? -> at the endpoint's pace -> taken:    leaves the store
                  |                                               |-> refused: stays, with the new reason
                  '-> expired, cut, denied, paused: stays         '-> not now: stays

A letter that failed on its way to a peer goes to this peer directly: the others have had it, and the log, too. One that
its own network could not hand over goes to the endpoint of its sink; a publish goes into the log, for all who want it.
Newer messages have overtaken it in any case. A crash after the network has taken it sends it once more, with its id.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from streamer.letters.dead_letter import DeadLetters, LetterStore, Refusal, Stored
from streamer.letters.selection import LetterFilter
from streamer.walk.endpoint import Endpoint
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Ingress
from streamer.walk.ledger import units_of
from streamer.walk.paused import Paused
from streamer.walk.view import View
from transports.base import NOT_TRIED
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.pacing import Pace
from uprotocol.status import RETRYABLE, UStatusError, code_name
from uprotocol.v1.ucode_pb2 import UCode

ONCE_MAX: Final = 1_000  # letters of one call
BATCH_LETTERS: Final = 256
BATCH_BYTES: Final = 4 << 20
CALL_S: Final = 5.0  # after which a call takes no further batch
# tries in a row of one call that got nothing through: the rest of its letters would only fail, too
FAILURES_MAX: Final = 8

log = structlog.get_logger()


class ResendResult(StrEnum):
    RESENT = "resent"  # it has left the store
    READY = "ready"  # would be sent (dry run)
    EXPIRED = "expired"  # its ttl is over
    CUT = "cut"  # stored without its payload
    DENIED = "denied"  # no rule allows it now
    REFUSED = "refused"  # by the network, again; or it can't go there
    WAITING = "waiting"  # the network does not take it now
    UNKNOWN = "unknown"  # no letter has this number


class LetterResult(NamedTuple):
    number: int
    result: ResendResult
    reason: str = ""


class LetterWay(NamedTuple):
    """`peer` None: through the ingress of `origin` into the log."""

    letter: Stored
    origin: Endpoint
    peer: Endpoint | None
    message: EncodedMessage


class Resender:
    """Sends dead letters again, one call at a time."""

    def __init__(
        self,
        letters: DeadLetters,
        view: View,
        paused: Paused,
        hosted: HostedTransport,
        ingresses: Mapping[str, Ingress],
        pace_of: Callable[[str], Pace | None],
        renamed: Callable[[], Mapping[str, str]],
    ) -> None:
        """`pace_of` the messages to an endpoint, shared with its pumps. `renamed`: the present names of endpoints by
        their former ones."""
        self._letters, self._endpoints, self._rules, self._paused = letters, view.endpoints, view.rules, paused
        self._hosted, self._ingresses, self._pace_of = hosted, ingresses, pace_of
        self._renamed = renamed
        self._turn = asyncio.Lock()

    async def resend(
        self, which: LetterFilter, *, to: str = "", count_max: int = ONCE_MAX, is_trial: bool = False
    ) -> dict[str, Any]:
        """Sends the first of these letters. `to`: the endpoint for letters whose own one is not configured.

        Returns the counts of letters by result, what has become of each, and `next`: the number after which to
        continue, None at the end. Raises NOT_FOUND for an unknown endpoint, UNAVAILABLE (another call is under way, or
        the store can't be used: then letters that have arrived may still be in it).
        """
        if to and to not in self._endpoints:
            known = ", ".join(endpoint.name for endpoint in self._endpoints)
            raise UStatusError(UCode.NOT_FOUND, f"unknown endpoint {to[:64]!r}; known: {known}")
        if self._turn.locked():
            raise UStatusError(UCode.UNAVAILABLE, "dead letters are being resent already: try again after that")
        async with self._turn:
            return await self._resend(which, to, min(max(count_max, 1), ONCE_MAX), is_trial)

    async def _resend(self, which: LetterFilter, to: str, count_max: int, is_trial: bool) -> dict[str, Any]:
        which = await self._letters.ask(partial(LetterStore.those_until_now, which=which))
        results: list[LetterResult] = []
        failures = Counter[str]()  # in a row, by peer
        begin, next_after = which.after, None
        ends = asyncio.get_running_loop().time() + CALL_S
        while True:
            if len(results) >= count_max or asyncio.get_running_loop().time() >= ends:
                next_after = which.after
                break
            count = min(BATCH_LETTERS, count_max - len(results))
            batch = await self._letters.ask(partial(_select, which, count))
            if not batch:
                break
            which = dataclasses.replace(which, after=batch[-1].number)
            results += await self._send_batch(batch, to, failures, is_trial=is_trial)
        known = {one.number for one in results}
        results += [
            LetterResult(number, ResendResult.UNKNOWN, "no such letter is stored")
            for number in sorted(set(which.numbers) - known)
            if begin < number and (next_after is None or number <= next_after)
        ]
        counts = Counter(str(one.result) for one in results)
        if results and not is_trial:
            log.info("dead letters were sent again", **counts)
        return {
            "counts": dict(counts),
            "letters": [one._asdict() for one in results],
            "next": next_after,
            "until": which.until,
        }

    async def _send_batch(
        self, batch: Iterable[Stored], to: str, failures: Counter[str], *, is_trial: bool
    ) -> list[LetterResult]:
        results: list[LetterResult] = []
        directly: dict[Endpoint, deque[LetterWay]] = {}
        for letter in batch:
            way = self._way(letter, to)
            if isinstance(way, LetterResult):
                results.append(way)
            elif is_trial:
                results.append(LetterResult(letter.number, ResendResult.READY))
            elif way.peer is None:
                results.append(await self._enter(way))
            else:
                directly.setdefault(way.peer, deque()).append(way)
        for peer, ways in directly.items():
            results += await self._send(peer, ways, failures)
        return sorted(results)

    # Where a letter goes

    def _way(self, letter: Stored, to: str) -> LetterWay | LetterResult:
        """Returns where the letter goes, or why it is not sent."""
        # 1: letters that can't be sent again at all
        attributes, result = letter.message.attributes, partial(LetterResult, letter.number)
        refused = partial(result, ResendResult.REFUSED)
        if letter.is_cut:
            return result(ResendResult.CUT, "it was stored without its payload: its sender has to send it again")
        if attrs.is_expired(attributes, uuids.now_ms()):
            return result(ResendResult.EXPIRED, f"its ttl of {attributes.ttl} ms is over")
        # 2: the endpoint `at` that it was for, by its present name; for a removed one, `to`
        name = letter.endpoint if letter.endpoint in self._endpoints else self._renamed().get(letter.endpoint, "")
        is_known = name in self._endpoints
        if not is_known and not to:
            return refused(f"there is no endpoint {letter.endpoint!r}: say where it goes (--to; to)")
        if is_known and to not in ("", name):
            return refused(f"endpoint {name!r} is configured: it goes there only")
        at = self._endpoints[name if is_known else to]
        # 3: the endpoint that it came from
        source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
        origin = self._endpoints.owner(source.authority_name)
        if origin is None:
            return result(ResendResult.DENIED, f"no endpoint has its source's authority {source.authority_name!r}")
        if sink is not None and self._hosted.owns(sink):
            return refused("it is for a service of this streamer: its sender has to send it again")
        # 4: a message that was not taken from its origin goes into the walk again, all others to one peer
        message = EncodedMessage.of(letter.message)
        if at is origin and sink is None:
            if not is_known:
                return refused(f"its source is at endpoint {at.name!r}: it has to go to another one")
            return LetterWay(letter, origin, None, message)
        peer = at if at is not origin or sink is None else self._endpoints.owner(sink.authority_name)
        if peer is None or peer is origin:
            return refused("no endpoint but that of its source has its sink's authority")
        # 5: a publish has the sink that its peer needs
        if attributes.type == attrs.PUBLISH:
            if sink is not None and not peer.needs_sink:
                message, sink = Readdressed(source, None).of(message), None
            elif sink is None and peer.needs_sink:
                if not peer.only_authority:
                    return refused(f"endpoint {peer.name!r} has several authorities, and the letter names none")
                sink = attrs.streamer_sink(peer.only_authority)
                message = Readdressed(source, sink).of(message)
        if sink is not None and self._endpoints.owner(sink.authority_name) is not peer:
            return refused(f"its sink's authority {sink.authority_name!r} is not at endpoint {peer.name!r}")
        return self._stopped(letter, origin, peer) or LetterWay(letter, origin, peer, message)

    def _stopped(self, letter: Stored, origin: Endpoint, peer: Endpoint) -> LetterResult | None:
        """Returns why rules or pauses stop the letter now."""
        attributes = letter.message.attributes
        is_call = attributes.type in (attrs.REQUEST, attrs.RESPONSE)
        address = attributes.sink if attributes.type == attrs.REQUEST else attributes.source
        is_ours = is_call and self._hosted.owns(attributes.source)  # services inside need no rule
        if not is_ours and not self._rules.allow(origin, peer, address):
            why = f"no rule lets {uris.format(address)} go from endpoint {origin.name!r} to {peer.name!r}"
            return LetterResult(letter.number, ResendResult.DENIED, why)
        if not is_call and self._paused.holds(peer, attributes.sink.authority_name, attributes.source):
            return LetterResult(letter.number, ResendResult.WAITING, f"its topic is paused toward {peer.name!r}")
        return None

    # Sending

    async def _enter(self, way: LetterWay) -> LetterResult:
        """Hands a publish to the log, which its own network could not: nobody has had it."""
        number, refused = way.letter.number, partial(LetterResult, way.letter.number, ResendResult.REFUSED)
        ingress = self._ingresses[way.origin.name]
        verdict = ingress.verdict_of(way.message)
        if len(way.message.payload) > verdict.bytes_max:
            return refused(f"its payload has more than {verdict.bytes_max} bytes (limits.message_bytes_max)")
        if verdict.log is None:
            return refused(verdict.reason or "nobody has subscribed to its topic, and it is not recorded")
        taken = ingress.on_receive_encoded([way.message])
        if taken is None:
            return refused("the log has it already, or its authority is above its quota")
        try:
            await taken
        except UStatusError as error:
            return LetterResult(number, ResendResult.WAITING, str(error))
        await self._settle([number], [])
        return LetterResult(number, ResendResult.RESENT)

    async def _send(self, peer: Endpoint, ways: deque[LetterWay], failures: Counter[str]) -> list[LetterResult]:
        results: list[LetterResult] = []
        why = ""
        while ways:
            if not peer.connected or failures[peer.name] >= FAILURES_MAX:
                why = f"endpoint {peer.name!r} " + ("takes nothing now" if peer.connected else "is not connected")
                break
            pace = self._pace_of(peer.name)
            most = BATCH_LETTERS if pace is None else max(1, min(BATCH_LETTERS, pace.per_s // 4))
            part = [ways.popleft() for _ in range(min(most, len(ways)))]
            if pace is not None:
                await pace.spend(sum(units_of(len(way.message.payload)) for way in part))
            now_ms = uuids.now_ms()
            late = {way.letter.number for way in part if way.message.is_expired(now_ms)}
            results += [LetterResult(number, ResendResult.EXPIRED, "its ttl is over") for number in late]
            part = [way for way in part if way.letter.number not in late]
            results += await self._try(peer, part, ways, failures) if part else ()
        return results + [LetterResult(way.letter.number, ResendResult.WAITING, why) for way in ways]

    async def _try(
        self, peer: Endpoint, part: list[LetterWay], ways: deque[LetterWay], failures: Counter[str]
    ) -> list[LetterResult]:
        """Sends one batch. What the network has not tried because of another message goes back to `ways`."""
        arrived: list[int] = []
        refused: list[Refusal] = []
        results: list[LetterResult] = []
        again: list[LetterWay] = []
        statuses = await peer.send_batch([way.message for way in part])
        for way, status in zip(part, statuses, strict=True):
            number, why = way.letter.number, status.message or code_name(status.code)
            if not status.code:
                arrived.append(number)
                results.append(LetterResult(number, ResendResult.RESENT))
            elif status.code in RETRYABLE and status.message == NOT_TRIED:
                again.append(way)
            elif status.code in RETRYABLE:
                results.append(LetterResult(number, ResendResult.WAITING, why))
            else:
                refused.append((number, status.code, why))
                results.append(LetterResult(number, ResendResult.REFUSED, why))
        ways.extendleft(reversed(again))
        peer.forwarded += len(arrived)
        failures[peer.name] = 0 if arrived else failures[peer.name] + 1
        await self._settle(arrived, refused)
        return results

    async def _settle(self, arrived: list[int], refused: list[Refusal]) -> None:
        if arrived or refused:
            now_ms = self._letters.now_ms()
            self._letters.resent += await self._letters.ask(lambda store: store.settle(arrived, refused, now_ms))


def _select(which: LetterFilter, count: int, store: LetterStore) -> list[Stored]:
    return store.select(which, count, BATCH_BYTES)
