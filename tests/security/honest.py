"""Honest traffic, which must not suffer from attacks. It uses plain paho and plain Zenoh, and messages that
campaigns/chaos/wire.py encodes by hand.

with an HTTP edge: items --> the edge --> an event stream, a held stream
vehicle -- numbered publishes --> cloud          cloud -- numbered publishes --> vehicle
cloud -- requests --> a service in the vehicle, and Poll at the gateway          a new subscriber from time to time
"""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from campaigns.chaos.judges import SUBSCRIBED, Caller, MqttLink, ZenohLink, subscribe
from campaigns.chaos.processes import ChaosError
from campaigns.chaos.web import EventReader, HeldReader, ItemPublisher, Seen
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, REQUEST, RESPONSE, Message, Uri, field, new_id
from tests.security.stage import APP, CHANNEL, CLOUD, ENTITY, ITEMS, KEY, LATE, RESOURCE, TOKEN, Stage
from uprotocol.v1.ucode_pb2 import UCode

SETTLE_S_MAX: Final = 60.0
CALL_S_MAX: Final = 20.0  # how long a polite caller waits
CALL_EVERY_S: Final = 0.25
ECHO: Final = 7  # a method that returns its request
LATE_MESSAGES: Final = 30
POLL: Final = 2
ITEMS_PER_S: Final = 20

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


class WebTraffic:
    """Honest clients of the HTTP edge: a publisher of items, an event stream and a held stream, which both must have
    each item, and a new client from time to time."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self.sent = stage, dict[int, Sent]()
        has_keys = stage.scene.edge == "tokens"
        self._headers, self._key = ({"Authorization": f"Bearer {TOKEN}"}, KEY) if has_keys else ({}, b"")
        self._publisher: ItemPublisher | None = None
        self._phase: Phase = ""
        self._seen, self._got = set[int](), set[int]()
        self._readers = (
            EventReader("honest events", stage.http_port, [ITEMS], self._headers, self._on_event),
            HeldReader("honest held", stage.http_port, CHANNEL, self._headers, self._on_line),
        )
        for reader in self._readers:
            reader.begin()

    def talk(self, phase: Phase) -> None:
        self._phase = phase
        self._publisher = ItemPublisher(
            self._stage.publish_port,
            self._stage.backend,
            CHANNEL,
            pause_s=1 / ITEMS_PER_S,
            key=self._key,
            on_item=self._on_item,
        )
        self._publisher.begin()

    def hush(self) -> None:
        assert self._publisher is not None
        self._publisher.end()
        self._raise_failures()

    def page(self) -> int | None:
        """Polls over a new connection. Returns 0, or a status that is wrong."""
        connection = http.client.HTTPConnection("127.0.0.1", self._stage.http_port, timeout=CALL_S_MAX)
        try:
            connection.request("GET", f"/stream?topic={ITEMS}&mode=poll&max=5", headers=self._headers)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return 0 if answer.status == 200 else answer.status

    def close(self) -> None:
        for reader in self._readers:
            reader.ended.set()

    def _raise_failures(self) -> None:
        assert self._publisher is not None
        for party in (*self._readers, self._publisher):
            if party.failures:
                raise ChaosError(party.failures[0])

    def _on_item(self, number: int, is_answered: bool) -> None:
        if not is_answered:
            self.sent[number] = Sent(self._phase, time.monotonic())

    def _on_event(self, seen: Seen) -> None:
        self._arrive(self._seen, int(seen["json"]))

    def _on_line(self, number: int) -> None:
        self._arrive(self._got, number)

    def _arrive(self, numbers: set[int], number: int) -> None:
        """It has arrived once both readers have it."""
        numbers.add(number)
        if number in self._seen and number in self._got and number in self.sent:
            self.sent[number].arrived = self.sent[number].arrived or time.monotonic()


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
        self._web = WebTraffic(stage) if stage.scene.edge else None
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
        asked = [
            ("echo", lambda: self._code(self.echo, b"echo")),
            ("poll", lambda: self._code(Uri(self._stage.scene.home, 4, 1, POLL), poll)),
        ]
        if self._web is not None:
            asked.append(("page", self._web.page))
        turn = 0
        while self._talking.is_set():
            name, call = asked[turn % len(asked)]
            turn += 1
            phase, began = self.phase, time.monotonic()
            code = call()
            self.calls.append(Called(phase, name, time.monotonic() - began, code))
            time.sleep(CALL_EVERY_S)

    def _code(self, method: Uri, payload: bytes) -> int | None:
        """Calls again while the answer is RESOURCE_EXHAUSTED: the callers of one authority share a limit, and an
        attacker of the same authority may use all of it for a moment."""
        deadline = time.monotonic() + CALL_S_MAX
        while True:
            answer = self._answers.call(method, payload, CALL_S_MAX)
            code = None if answer is None else answer.commstatus
            if code != UCode.RESOURCE_EXHAUSTED or time.monotonic() > deadline:
                return code
            time.sleep(CALL_EVERY_S)

    def talk(self) -> None:
        self._talking.set()
        if self._web is not None:
            self._web.talk(self.phase)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._publishing, self._calling)]
        for thread in self._threads:
            thread.start()

    def hush(self) -> None:
        self._talking.clear()
        for thread in self._threads:
            thread.join()
        if self._web is not None:
            self._web.hush()

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

    def _all(self) -> list[Sent]:
        return [*self._sent.values(), *(self._web.sent.values() if self._web is not None else ())]

    def lost(self, phase: Phase) -> int:
        return sum(one.phase == phase and one.arrived is None for one in self._all())

    def sent(self, phase: Phase) -> int:
        return sum(one.phase == phase for one in self._all())

    def latencies(self, phase: Phase) -> list[float]:
        """Returns the delays of the arrived messages in seconds."""
        return [one.arrived - one.at for one in self._all() if one.phase == phase and one.arrived is not None]

    def failed_calls(self, phase: Phase) -> list[Called]:
        return [one for one in self.calls if one.phase == phase and one.code != 0]

    def close(self) -> None:
        self._talking.clear()
        if self._web is not None:
            self._web.close()
        for close in self._closers:
            threading.Thread(target=close, daemon=True).start()
