"""Networks within the process that have faults on demand, all drawn from seeds.

FaultyNetwork      send -> hangs? far away? drops the connection? -> is the address refused? -> Faults: refuse, fail,
                   unsure, duplicate, late -> LocalNetwork.carry
SimulatedNetwork   in between: lost (a network without acknowledgement)? refused with any UCode?
                   a request for a uSubscription: overloaded?
                   of a history that is followed: lost, late (behind what was sent after it), or twice, per member
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from campaigns.simulation.loop import PROCESS
from transports.base import NOT_TRIED, stopped
from transports.local import LocalNetwork, LocalTransport, is_of_the_network, size
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.message import error_response
from uprotocol.status import OK
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

IN_FLIGHT_MESSAGES: Final = 1_024  # unanswered at once, on a network far away

USUBSCRIPTION = 0  # its ue_id
COMMANDS = frozenset({1, 2})  # Subscribe, Unsubscribe: the resources of both versions
KEEPER = 0x8004  # the ue_id of the publisher that keeps its own history
LATE_S_MAX = 3.0
LOSER: Final = "V-vehicle"  # the session of the vehicle's gateway


@dataclass(frozen=True)
class Faults:
    """Faults, each with a probability from 0 to 1, all drawn from one seed: the same sends get the same faults.

    No fault reorders a stream: messages of one (source, sink) stay in order.
    """

    seed: int = 0
    fail_send: float = 0.0  # per message: UNAVAILABLE, and it was not sent
    unsure_send: float = 0.0  # per message: UNAVAILABLE, though it was sent (a retry makes a duplicate)
    refuse: float = 0.0  # per message: PERMISSION_DENIED, no retry
    drop_connection: float = 0.0  # per batch: the sender loses the network for `away_ms` before the batch leaves
    away_ms: int = 20
    duplicate: float = 0.0  # per message and member: delivered twice in a row
    delay_ms_max: int = 0  # each message is delayed by a random time up to this; streams overtake one another


NO_FAULTS: Final = Faults()
REFUSED: Final = UStatus(
    code=UCode.PERMISSION_DENIED, message="the network refuses this message (a fault was asked for)"
)
NOT_SENT: Final = UStatus(code=UCode.UNAVAILABLE, message="the message was not sent (a fault was asked for): try again")
UNSURE: Final = UStatus(
    code=UCode.UNAVAILABLE, message="whether the message was sent is unknown (a fault was asked for): try again"
)
BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)


@dataclass(eq=False, slots=True)
class _Call:
    """One `send_batch` on a network far away."""

    failed: bool = False  # some status will be a failure of the network
    lost: bool = False  # the connection was lost meanwhile: it is unknown whether the messages have arrived
    absent: set[str] = field(default_factory=set)  # see LocalNetwork.send
    refused: set[str] = field(default_factory=set)  # addresses, by `refuse`


@dataclass(eq=False, slots=True)
class _Calls:
    """Those of one member that are not answered yet. One at a time leaves."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set[_Call] = field(default_factory=set)
    leaving: _Call = field(default_factory=_Call)  # or the one that left last


class FaultyNetwork(LocalNetwork):
    """`hangs`: members whose `send_batch` does not return, before or after sending, until they are opened again.
    `answer_s`: delay of the statuses of a batch, as on a network far away."""

    def __init__(self, name: str = "", faults: Faults | None = None) -> None:
        super().__init__(name)
        self._context = contextvars.copy_context()  # belongs to no process that could be killed
        self.hangs: dict[LocalTransport, Literal["before", "after"]] = {}
        self.answer_s = 0.0
        self._calls: WeakKeyDictionary[LocalTransport, _Calls] = WeakKeyDictionary()
        self._refused: dict[tuple[str, str], re.Pattern[str]] = {}  # (address, sender), as given to `refuse`
        # due, order, receiver, message, sender
        self._delayed: list[tuple[float, int, LocalTransport, UMessage, LocalTransport]] = []
        self._count = 0
        self._release_at: dict[Any, float] = {}  # stream -> when its last delayed message is due
        self.set_faults(faults)

    def set_faults(self, faults: Faults | None) -> None:
        """Use these faults from now on; None: none. Delayed messages stay delayed, and later ones of their stream stay
        behind them."""
        self.faults = faults
        self._random = random.Random(faults.seed if faults is not None else 0)

    @property
    def has_late(self) -> bool:
        """True if messages are delayed."""
        return bool(self._delayed)

    def break_(self) -> None:
        """Disconnect every member, until `heal`."""
        for member in self.members:
            member.disconnect()

    def heal(self) -> None:
        for member in self.members:
            member.reconnect()

    def cut(self, authority: str) -> None:
        """The member of that authority is disconnected, now or when it joins, until `mend`."""
        self.cut_off.add(authority)
        for member in self._of(authority):
            member.disconnect()

    def mend(self, authority: str) -> None:
        self.cut_off.discard(authority)
        for member in self._of(authority):
            member.reconnect()

    def _of(self, authority: str) -> list[LocalTransport]:
        return [member for member in self.members if member.authority == authority]

    def refuse(self, address: str, sender: str = "") -> None:
        """From now on, messages from the authority `sender` ("": any) to `address` are answered PERMISSION_DENIED and
        delivered to nobody. `address`: as LocalTransport.address_of makes it; `*` in it matches any text. Far away,
        it is refused after `allow`, too, until each refusal is answered: no message overtakes a refused one."""
        self._refused[address, sender] = re.compile(".*".join(map(re.escape, address.split("*"))))

    def allow(self, address: str | None = None, sender: str = "") -> None:
        """Undo `refuse` with the same arguments; None: all of `sender`."""
        for rule in [one for one in self._refused if one[1] == sender and address in (None, one[0])]:
            del self._refused[rule]

    def _refuses(self, address: str, sender: LocalTransport) -> bool:
        return any(
            of in ("", sender.authority) and pattern.fullmatch(address) is not None
            for (_, of), pattern in self._refused.items()
        ) or any(address in call.refused for call in self._running(sender))

    def inject(self, message: UMessage) -> None:
        """Deliver `message` unchecked, as if a misbehaving member had sent it."""
        for member in self.members:
            member.arrive(message)

    # -- what LocalNetwork calls

    def join(self, member: LocalTransport) -> None:
        super().join(member)
        self.hangs.pop(member, None)
        member.in_flight_messages = IN_FLIGHT_MESSAGES if self.answer_s else 0

    def _calls_of(self, member: LocalTransport) -> _Calls:
        return self._calls.setdefault(member, _Calls())

    def _running(self, member: LocalTransport) -> Collection[_Call]:
        return self._calls[member].running if member in self._calls else ()  # keeps no member that has left

    def lose(self, member: LocalTransport) -> None:
        super().lose(member)
        for call in self._running(member):
            call.failed = call.lost = True

    async def send(
        self, sender: LocalTransport, messages: Sequence[UMessage], absent: set[str] | None = None
    ) -> list[UStatus]:
        if self.hangs.get(sender) == "before":
            await asyncio.get_running_loop().create_future()
        if self.answer_s:
            statuses = await self._send_far(sender, messages)
        else:
            self._drop(sender)
            statuses = await super().send(sender, messages, absent)
        if self.hangs.get(sender) == "after":
            await asyncio.get_running_loop().create_future()
        return statuses

    async def _send_far(self, sender: LocalTransport, messages: Sequence[UMessage]) -> list[UStatus]:
        call, calls = _Call(), self._calls_of(sender)
        if any(other.failed for other in calls.running):
            return stopped([], len(messages), BEHIND)
        calls.running.add(call)
        try:
            async with calls.turn:
                if any(other.failed for other in calls.running):
                    return stopped([], len(messages), BEHIND)
                self._drop(sender)
                calls.leaving = call
                statuses = await super().send(sender, messages, call.absent)
                call.failed = call.failed or any(map(is_of_the_network, statuses))
            await asyncio.sleep(self.answer_s)
            return [UNSURE if call.lost and not status.code else status for status in statuses]
        finally:
            calls.running.discard(call)

    def _drop(self, sender: LocalTransport) -> None:
        """If the fault strikes, disconnect `sender` for `away_ms`."""
        if self.faults is not None and sender.connected and self._strikes(self.faults.drop_connection):
            sender.disconnect()
            asyncio.get_running_loop().call_later(self.faults.away_ms / 1000, sender.reconnect)

    def is_heard(self, sender: LocalTransport, message: UMessage, address: str) -> bool:
        if self._refuses(address, sender):
            return True  # `carry` refuses it, so it does not matter whether anybody listens
        if any(address in call.absent for call in self._running(sender)):
            return False
        return super().is_heard(sender, message, address)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        if self._refused or self._running(sender):
            attributes = message.attributes
            address = sender.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)
            if self._refuses(address, sender):
                self._calls_of(sender).leaving.refused.add(address)
                why = f"Not authorized: {sender.authority} may not send to {address} on this network"
                return UStatus(code=UCode.PERMISSION_DENIED, message=why)
        return self.carry_allowed(sender, message)

    def carry_allowed(self, sender: LocalTransport, message: UMessage) -> UStatus:
        """Deliver `message` to every other member, unless a fault strikes."""
        if self.faults is None and not self._delayed:
            return super().carry(sender, message)
        for name, session in self.sessions.items():
            if (last := self._last_delayed(name, message)) is not None:
                self._late(NO_FAULTS, sender, last, message)
            else:
                session.keep(message)
        faults = self.faults or NO_FAULTS
        if self._strikes(faults.refuse):
            return REFUSED
        if self._strikes(faults.fail_send):
            return NOT_SENT
        for member in [member for member in self.members if member is not sender]:
            for _ in range(2 if self._strikes(faults.duplicate) else 1):
                if faults.delay_ms_max or self._delayed:
                    self._late(faults, sender, member, message)
                else:
                    member.arrive(message)
        return UNSURE if self._strikes(faults.unsure_send) else OK

    def _strikes(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _late(self, faults: Faults, sender: LocalTransport, member: LocalTransport, message: UMessage) -> None:
        """Deliver later, but not before an earlier message of the same stream."""
        loop = asyncio.get_running_loop()
        stream = (member.session or id(member), *_stream(message))
        due = loop.time() + self._random.random() * faults.delay_ms_max / 1000
        self._release_at[stream] = due = max(due, self._release_at.get(stream, 0.0))
        self._count += 1
        member.arrivals.count(size(message), 1)
        heapq.heappush(self._delayed, (due, self._count, member, message, sender))
        loop.call_at(due, self._release, due, context=self._context)

    def _last_delayed(self, session: str, message: UMessage) -> LocalTransport | None:
        """Returns the receiver of the last delayed message of the same stream for a session whose member has left; None
        if there is none."""
        stream = _stream(message)
        delayed = [one for one in self._delayed if one[2].session == session and _stream(one[3]) == stream]
        return max(delayed)[2] if delayed else None

    def _release(self, due: float) -> None:
        """Deliver one message that was due at `due` or before; the loop may call a little earlier. There is one call
        for each message; the heap chooses, which keeps the order of equal times."""
        if not self._delayed or self._delayed[0][0] > due:
            return  # the message of this call was forgotten
        _, _, member, message, _ = heapq.heappop(self._delayed)
        member.arrivals.count(-size(message), -1)
        self._deliver(member, message)
        if not self._delayed:
            self._release_at.clear()

    def forget(self, sender: LocalTransport, which: Callable[[UMessage], bool]) -> list[UMessage]:
        """Drop what `sender` has sent, and what was answered OK and is not delivered yet. Returns the messages, each
        once."""
        forgotten = [one for one in self._delayed if one[4] is sender and which(one[3])]
        for one in forgotten:
            self._delayed.remove(one)
            one[2].arrivals.count(-size(one[3]), -1)
        heapq.heapify(self._delayed)
        return list({id(message): message for _, _, _, message, _ in forgotten}.values())

    def _deliver(self, member: LocalTransport, message: UMessage) -> None:
        """Deliver to `member`, or to the member that has its session now."""
        if member.is_open or member.session is None:
            member.arrive(message)
        elif (session := self.sessions.get(member.session)) is not None:
            session.keep(message)
        else:
            for successor in self.members:
                if successor.session == member.session:
                    successor.arrive(message)


def _stream(message: UMessage) -> tuple[uris.Key, uris.Key | None]:
    attributes = message.attributes
    return uris.key(attributes.source), uris.key(attributes.sink) if attributes.HasField("sink") else None


@dataclass(frozen=True)
class Weather:
    """Faults of one network for a while, beside `Faults`."""

    faults: Faults = NO_FAULTS
    lose: float = 0.0  # per message and member: never arrives, though the sender got OK
    refuse: float = 0.0  # per message: refused with one of `codes`
    codes: tuple[int, ...] = ()
    # per Subscribe or Unsubscribe to a uSubscription service: answered with one of `short_codes` at once
    short: float = 0.0
    short_codes: tuple[int, ...] = ()
    # per message and member, of a conversation with a history or a plain copy of a kept message, which must tolerate it
    lose_followed: float = 0.0
    late_followed: float = 0.0  # by up to LATE_S_MAX; every other one also arrives at once


CALM = Weather()


class SimulatedNetwork(FaultyNetwork):
    """`on_message(what, message, member)` is called for each event of a message on its way."""

    def __init__(self, name: str, seed: int, on_message: Callable[[str, UMessage, LocalTransport], None]) -> None:
        super().__init__(name)
        LocalNetwork._named[name] = self
        self._dice = random.Random(seed)
        self._on_message = on_message
        self.weather = CALM
        self.keeps = name.endswith("/vehicle")  # it has a publisher that keeps its own history
        # whether the gateway of the vehicle gets this message neither now nor from its session
        self.loses: Callable[[UMessage], bool] | None = None
        # whether it refuses this message of that member for good, and nothing else
        self.declines: Callable[[UMessage, LocalTransport], bool] | None = None

    def set_weather(self, weather: Weather) -> None:
        self.weather = weather
        rough = weather.faults != NO_FAULTS
        self.set_faults(replace(weather.faults, seed=self._dice.getrandbits(32)) if rough else None)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        process = PROCESS.get()
        if process is not None and process.processor is not None:
            process.processor.work(1)
        if self.loses is None or not self.loses(message):
            return super().carry(sender, message)
        members, sessions = self.members, self.sessions
        self.members = [member for member in members if member.session != LOSER]
        self.sessions = {name: session for name, session in sessions.items() if name != LOSER}
        try:
            return super().carry(sender, message)
        finally:
            self.members, self.sessions = members, sessions

    def carry_allowed(self, sender: LocalTransport, message: UMessage) -> UStatus:
        weather = self.weather
        if self.declines is not None and self.declines(message, sender):
            self._on_message("refused INVALID_ARGUMENT", message, sender)
            return UStatus(code=UCode.INVALID_ARGUMENT, message="the network declines this message")
        if weather is CALM:
            return super().carry_allowed(sender, message)
        if self._hits(weather.refuse):
            code = self._dice.choice(weather.codes)
            self._on_message(f"refused {UCode.Name(code)}", message, sender)
            return UStatus(code=code, message="the network refuses this message (the simulation wants it so)")
        attributes = message.attributes
        asks = (
            attributes.type == attrs.REQUEST
            and attributes.sink.ue_id == USUBSCRIPTION
            and attributes.sink.resource_id in COMMANDS
        )
        if asks and self._hits(weather.short):
            self._answer_short(sender, message, self._dice.choice(weather.short_codes))
            return OK
        if weather.lose:
            return self._carry_with_loss(sender, message, weather.lose)
        if (weather.lose_followed or weather.late_followed) and is_followed(message, keeps=self.keeps):
            return self._carry_followed(sender, message, weather)
        return super().carry_allowed(sender, message)

    def _hits(self, chance: float) -> bool:
        return chance > 0 and self._dice.random() < chance

    def _carry_with_loss(self, sender: LocalTransport, message: UMessage, lose: float) -> UStatus:
        lost = [member for member in self.members if member is not sender and self._hits(lose)]
        for member in lost:
            self._on_message("lost", message, member)
        return self._carry_but_to(lost, sender, message)

    def _carry_but_to(self, others: list[LocalTransport], sender: LocalTransport, message: UMessage) -> UStatus:
        members = self.members
        self.members = [member for member in members if member not in others]
        try:
            return super().carry_allowed(sender, message)
        finally:
            self.members = members

    def _carry_followed(self, sender: LocalTransport, message: UMessage, weather: Weather) -> UStatus:
        others = []
        for member in self.members:
            if member is sender:
                continue
            if self._hits(weather.lose_followed):
                others.append(member)
                self._on_message("lost", message, member)
            elif self._hits(weather.late_followed):
                if self._hits(0.5):
                    others.append(member)
                late_s = self._dice.random() ** 2 * LATE_S_MAX
                loop = asyncio.get_running_loop()
                loop.call_later(late_s, self._arrive_late, member, message, context=self._context)
        return self._carry_but_to(others, sender, message)

    def _arrive_late(self, member: LocalTransport, message: UMessage) -> None:
        if member.is_open and member.connected:
            self._on_message("late", message, member)
            member.arrive(message)

    def _answer_short(self, asker: LocalTransport, request: UMessage, code: int) -> None:
        """Answer like an overloaded service: the command was not executed."""
        self._on_message(f"short {UCode.Name(code)}", request, asker)
        status = UStatus(code=code, message="short of something (the simulation wants it so)")  # type: ignore[arg-type]
        response = error_response(request.attributes, status)
        asker.arrive(response)


def is_followed(message: UMessage, *, keeps: bool) -> bool:
    """True for a conversation with a history, or a plain copy of a message that a publisher here `keeps` itself."""
    attributes = message.attributes
    entities = {attributes.source.ue_id & 0xFFFF, attributes.sink.ue_id & 0xFFFF if attributes.HasField("sink") else -1}
    return ids.ENTITY in entities or (keeps and attributes.source.ue_id == KEEPER)
