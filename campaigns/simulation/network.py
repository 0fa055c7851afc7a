"""A LocalNetwork that also loses messages, refuses with any code, and answers for an overloaded service.

send -> lost? (a network without acknowledgement) -> refused with any UCode?
     -> a request for a uSubscription: overloaded? -> LocalNetwork.carry: fail, unsure, duplicate, late
     -> of a history that is followed: lost, late (behind what was sent after it), or twice, per member
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from transports.local import NO_FAULTS, Faults, LocalNetwork, LocalTransport
from uprotocol import attributes as attrs
from uprotocol.core.ustreamer import ids
from uprotocol.message import error_response
from uprotocol.status import OK
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION = 0  # its ue_id
COMMANDS = frozenset({1, 2})  # Subscribe, Unsubscribe: the resources of both versions
KEEPER = 0x8004  # the ue_id of the publisher that keeps its own history
LATE_S_MAX = 3.0


@dataclass(frozen=True)
class Weather:
    """Faults of one network for a while, beside transports.local.Faults."""

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


class SimulatedNetwork(LocalNetwork):
    """`on_message(what, message, member)` is called for each event of a message on its way."""

    def __init__(self, name: str, seed: int, on_message: Callable[[str, UMessage, LocalTransport], None]) -> None:
        super().__init__(None, name)
        LocalNetwork._named[name] = self
        self._dice = random.Random(seed)
        self._on_message = on_message
        self._context = contextvars.copy_context()  # belongs to no process that could be killed
        self.weather = CALM
        self.keeps = name.endswith("/vehicle")  # it has a publisher that keeps its own history

    def set_weather(self, weather: Weather) -> None:
        self.weather = weather
        rough = weather.faults != NO_FAULTS
        self.set_faults(replace(weather.faults, seed=self._dice.getrandbits(32)) if rough else None)

    def carry(self, sender: LocalTransport, message: UMessage) -> UStatus:
        weather = self.weather
        if weather is CALM:
            return super().carry(sender, message)
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
        return super().carry(sender, message)

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
            return super().carry(sender, message)
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
