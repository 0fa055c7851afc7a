"""A LocalNetwork that also loses, refuses with any code, and answers for a service that is short of something.

send -> lost? (a network without acknowledgement) -> refused with any UCode?
     -> a request for a uSubscription: short of something? -> LocalNetwork.carry: fail, unsure, duplicate, late
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from transports.local import NO_FAULTS, Faults, LocalNetwork, LocalTransport
from uprotocol import attributes as attrs
from uprotocol.message import error_response
from uprotocol.status import OK
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

USUBSCRIPTION = 0  # its ue_id
COMMANDS = frozenset({1, 2})  # Subscribe, Unsubscribe: the resources of both versions


@dataclass(frozen=True)
class Weather:
    """What goes wrong on one network for a while, beside transports.local.Faults."""

    faults: Faults = NO_FAULTS
    lose: float = 0.0  # per message and member: never arrives, though the sender was told that it was sent
    refuse: float = 0.0  # per message: one of `codes`, and it was not sent
    codes: tuple[int, ...] = ()
    # per Subscribe or Unsubscribe to a uSubscription service: answered with one of `short_codes` at once
    short: float = 0.0
    short_codes: tuple[int, ...] = ()


CALM = Weather()


class SimulatedNetwork(LocalNetwork):
    """`told(what, message, member)` hears of everything that happens to a message on the way."""

    def __init__(self, name: str, seed: int, told: Callable[[str, UMessage, LocalTransport], None]) -> None:
        super().__init__(None, name)
        LocalNetwork._named[name] = self
        self._dice = random.Random(seed)
        self._told = told
        self.weather = CALM

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
            self._told(f"refused {UCode.Name(code)}", message, sender)
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
        return super().carry(sender, message)

    def _hits(self, chance: float) -> bool:
        return chance > 0 and self._dice.random() < chance

    def _carry_with_loss(self, sender: LocalTransport, message: UMessage, lose: float) -> UStatus:
        members = self.members
        lost = [member for member in members if member is not sender and self._hits(lose)]
        for member in lost:
            self._told("lost", message, member)
        self.members = [member for member in members if member not in lost]
        try:
            return super().carry(sender, message)
        finally:
            self.members = members

    def _answer_short(self, asker: LocalTransport, request: UMessage, code: int) -> None:
        """As a service does that is short of something just now: the command was not taken."""
        self._told(f"short {UCode.Name(code)}", request, asker)
        status = UStatus(code=code, message="short of something (the simulation wants it so)")  # type: ignore[arg-type]
        response = error_response(request.attributes, status)
        asker.arrive(response)
