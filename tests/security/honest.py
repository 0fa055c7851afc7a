"""Honest traffic, which must not suffer from attacks. It uses plain paho and plain Zenoh, and messages that
campaigns/chaos/wire.py encodes by hand.

vehicle -- numbered publishes --> cloud          cloud -- numbered publishes --> vehicle
cloud -- requests --> a service in the vehicle, and Poll at the gateway          a new subscriber from time to time
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from campaigns.chaos.judges import SUBSCRIBED, Caller, MqttLink, ZenohLink, subscribe
from campaigns.chaos.processes import ChaosError
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, REQUEST, RESPONSE, Message, Uri, field, new_id
from tests.security.stage import APP, CLOUD, ENTITY, LATE, RESOURCE, Stage

SETTLE_S_MAX: Final = 60.0
CALL_S_MAX: Final = 20.0  # how long a polite caller waits
CALL_EVERY_S: Final = 0.25
ECHO: Final = 7  # a method that returns its request
LATE_MESSAGES: Final = 30
POLL: Final = 2

Phase = str


@dataclass
class Sent:
    """One honest message."""

    phase: Phase
    at: float
    arrived: float | None = None


@dataclass
class Called:
    """One honest call; `code` is None without an answer."""

    phase: Phase
    method: str
    took_s: float
    code: int | None


def percentile(values: list[float], share: float) -> float:
    """Returns the value at the nearest rank, or NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


class Honest:
    """All honest clients on both sides of a stage. `phase` marks the messages from now on."""

    def __init__(self, stage: Stage, rate: float) -> None:
        self._stage, self._rate = stage, rate
        self.phase: Phase = "settling"
        self._sent: dict[bytes, Sent] = {}
        self.calls: list[Called] = []
        self.doubled = 0
        self._talking = threading.Event()
        self._threads: list[threading.Thread] = []
        self._late = 0
        self._heard_late: dict[Uri, set[bytes]] = {}
        self._closers: list[Callable[[], None]] = []
        self._join()

    # Clients

    def _join(self) -> None:
        stage, scene = self._stage, self._stage.scene
        vehicle = scene.vehicles[0]
        port = stage.brokers[CLOUD].port
        self.echo = Uri(vehicle, ENTITY, 1, ECHO)
        up = f"+/{ENTITY:X}/0/1/+" if scene.fleet else f"{vehicle}/{ENTITY:X}/0/1/+"
        cloud = MqttLink(port, "honest-cloud", filters=(up, f"+/+/+/+/+/{CLOUD}/#"), heard=self._heard_in_cloud)
        self._cloud_says: Callable[[Message], None] = lambda message: cloud.send(message, False, lambda _: None)
        self._closers.append(cloud.close)
        links = [cloud]
        self._answers = Caller(Uri(CLOUD, 0x9101, 1, 0), self._cloud_says)
        if scene.fleet:
            fleet = MqttLink(
                stage.brokers["fleet"].port, "honest-fleet", filters=(f"+/{vehicle}",), heard=self._heard_in_vehicle
            )
            self._vehicle_says: Callable[[Message], None] = lambda message: fleet.send(message, True, lambda _: None)
            self._closers.append(fleet.close)
            links.append(fleet)
        else:
            keys = (
                f"up/{CLOUD}/{ENTITY:X}/0/1/*/**",
                f"up/*/*/*/*/*/{self.echo.segments}",
                f"up/*/*/*/*/*/{vehicle}/{APP:X}/0/1/0",
            )
            zenoh = ZenohLink(stage.zenoh_port, keys, self._heard_in_vehicle)
            self._vehicle_says = zenoh.send
            self._closers.append(zenoh.close)
        self._late_caller = Caller(
            Uri(vehicle if scene.fleet else CLOUD, APP, 1, 0), self._vehicle_says if scene.fleet else self._cloud_says
        )
        for link in links:
            if not link.subscribed.wait(SETTLE_S_MAX):
                raise ChaosError(f"{link.name} could not subscribe")

    def _heard_in_cloud(self, message: Message) -> None:
        if message.source.authority != CLOUD or message.type == RESPONSE:
            self._heard(message)

    def _heard_in_vehicle(self, message: Message) -> None:
        if message.type == REQUEST and message.sink == self.echo:
            self._vehicle_says(
                Message(
                    new_id(),
                    RESPONSE,
                    message.sink,
                    message.source,
                    message.payload,
                    message.ttl_ms,
                    message.id,
                    format=message.format,
                )
            )
        else:
            self._heard(message)

    def _heard(self, message: Message) -> None:
        now = time.monotonic()
        if message.type == RESPONSE:
            for caller in (self._answers, self._late_caller):
                if message.sink == caller.me:
                    caller.heard(message)
        elif message.type in (PUBLISH, NOTIFICATION) and (sent := self._sent.get(message.id)) is not None:
            if sent.arrived is None:
                sent.arrived = now
            else:
                self.doubled += 1
        elif message.source in self._heard_late:
            self._heard_late[message.source].add(message.id)

    # Traffic

    def _publish(self, place: int) -> None:
        """Every second message goes to the cloud, from one vehicle after the other."""
        vehicles = self._stage.scene.vehicles
        if place % 2:
            source = Uri(vehicles[place // 2 * 7 % len(vehicles)], ENTITY, 1, RESOURCE)
            sink = Uri.any_of(CLOUD) if self._stage.scene.fleet else None
            says = self._vehicle_says
        else:
            source, sink, says = Uri(CLOUD, ENTITY, 1, RESOURCE), None, self._cloud_says
        message = Message(new_id(), PUBLISH, source, sink, b"%d" % place)
        self._sent[message.id] = Sent(self.phase, time.monotonic())
        says(message)

    def _publishing(self) -> None:
        began, place = time.monotonic(), 0
        while self._talking.is_set():
            self._publish(place)
            place += 1
            time.sleep(max(0.0, began + place / self._rate - time.monotonic()))

    def _calling(self) -> None:
        topic = Uri(self._stage.scene.vehicles[0], ENTITY, 1, RESOURCE)
        poll = field(1, topic.encode()) + field(4, 1) + field(8 + 2, 64)
        asked = (("echo", self.echo, b"echo"), ("poll", Uri(self._stage.scene.home, 4, 1, POLL), poll))
        turn = 0
        while self._talking.is_set():
            name, method, payload = asked[turn % 2]
            turn += 1
            phase, began = self.phase, time.monotonic()
            answer = self._answers.call(method, payload, CALL_S_MAX)
            self.calls.append(
                Called(phase, name, time.monotonic() - began, None if answer is None else answer.commstatus)
            )
            time.sleep(CALL_EVERY_S)

    def talk(self) -> None:
        self._talking.set()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._publishing, self._calling)]
        for thread in self._threads:
            thread.start()

    def hush(self) -> None:
        self._talking.clear()
        for thread in self._threads:
            thread.join()

    def settle(self, timeout_s: float = SETTLE_S_MAX) -> None:
        """Sends in both directions until messages of both arrive. Raises ChaosError."""
        deadline, phase = time.monotonic() + timeout_s, self.phase
        self.phase = "settling"
        while True:
            before = set(self._sent)
            self._publish(0)
            self._publish(1)
            new = [self._sent[id] for id in set(self._sent) - before]
            until = time.monotonic() + 0.5
            while time.monotonic() < until and not all(one.arrived for one in new):
                time.sleep(0.01)
            if all(one.arrived for one in new):
                break
            if time.monotonic() > deadline:
                raise ChaosError(f"honest traffic does not pass; the gateway says {self._stage.gateway.problems()}")
        self.phase = phase

    def drained(self, phase: Phase, timeout_s: float) -> float:
        """Waits until all of `phase` has arrived, at most `timeout_s`, and returns how long that took."""
        began = time.monotonic()
        while self.lost(phase) and time.monotonic() < began + timeout_s:
            time.sleep(0.05)
        return time.monotonic() - began

    def late_subscriber(self) -> int:
        """Subscribes to a new topic, and returns how many of its LATE_MESSAGES do not arrive: all, if the subscription
        is refused."""
        scene = self._stage.scene
        topic = Uri(scene.home, ENTITY, 1, LATE + self._late)
        self._late += 1
        heard = self._heard_late[topic] = set[bytes]()
        deadline = time.monotonic() + CALL_S_MAX
        while subscribe(self._late_caller, scene.home, topic) != SUBSCRIBED:
            if time.monotonic() > deadline:
                return LATE_MESSAGES
            time.sleep(0.1)
        says = self._cloud_says if scene.fleet else self._vehicle_says
        if not scene.fleet:
            time.sleep(0.3)  # a Zenoh publisher must first learn of the subscriber: Zenoh stores nothing
        messages = [Message(new_id(), PUBLISH, topic, None, b"late") for _ in range(LATE_MESSAGES)]
        for message in messages:
            says(message)
        while len(heard) < LATE_MESSAGES and time.monotonic() < deadline:
            time.sleep(0.02)
        return LATE_MESSAGES - len(heard)

    def consumer(self, name: str) -> int | None:
        """Polls under a consumer's name and returns the code of the answer."""
        request = field(7, name) + field(4, 1) + field(12, 1_000)
        answer = self._answers_now(Uri(self._stage.scene.home, 4, 1, POLL), request)
        return None if answer is None else answer.commstatus

    def _answers_now(self, method: Uri, payload: bytes) -> Message | None:
        assert not self._talking.is_set(), "one call at a time"
        return self._answers.call(method, payload, CALL_S_MAX)

    # Results

    def lost(self, phase: Phase) -> int:
        return sum(one.phase == phase and one.arrived is None for one in list(self._sent.values()))

    def sent(self, phase: Phase) -> int:
        return sum(one.phase == phase for one in list(self._sent.values()))

    def latencies(self, phase: Phase) -> list[float]:
        """Returns the delays of the arrived messages in seconds."""
        return [
            one.arrived - one.at for one in list(self._sent.values()) if one.phase == phase and one.arrived is not None
        ]

    def failed_calls(self, phase: Phase) -> list[Called]:
        return [one for one in self.calls if one.phase == phase and one.code != 0]

    def close(self) -> None:
        self._talking.clear()
        for close in self._closers:
            threading.Thread(target=close, daemon=True).start()
