"""The raw clients: plain paho-mqtt and plain eclipse-zenoh, and messages encoded by wire.py. No code of the product.

Sender  -> ledger.sent ... PUBACK -> ledger.acked          Hearer -> ledger.arrived          Caller: request -> response
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import zenoh
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from campaigns.chaos.ledger import Ledger
from campaigns.chaos.wire import (
    FORMAT_PROTOBUF,
    NOTIFICATION,
    PUBLISH,
    REQUEST,
    RESPONSE,
    Fields,
    Message,
    Uri,
    blob,
    field,
    new_id,
    number,
    packed,
    parse,
)

UNACKED_MAX: Final = 400  # beyond it a sender waits, so that a broker is not flooded after its restart
SESSION_S: Final = 86_400
RECONNECT_S: Final = 0.2
NO_SUBSCRIBER: Final = 0x10  # PUBACK: accepted, without a subscriber
FAILURE: Final = 0x80  # and all above it

REASONS: Final = {1: "retention", 2: "incarnation", 3: "corruption"}

Heard = Callable[[Message], None]


def flow_of(message: Message) -> str:
    """The name of (source, sink); a publish has no sink."""
    if message.sink is None or message.sink.is_any:
        return str(message.source)
    return f"{message.source} > {message.sink}"


class MqttLink:
    """One paho client with a persistent session, which always reconnects."""

    def __init__(self, port: int, name: str, *, filters: tuple[str, ...] = (), heard: Heard | None = None) -> None:
        self.name, self._filters, self._heard = name, filters, heard
        self.connected, self.subscribed, self.lost = threading.Event(), threading.Event(), threading.Event()
        self.losses = 0  # connections that have ended
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._early: dict[int, int] = {}  # PUBACKs that came before `publish` returned
        self._lock = threading.Lock()
        self.unheard = 0  # acknowledged, though nobody was subscribed
        made = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        # never reached: paho sends in the order of calls
        made.max_inflight_messages_set(2 * UNACKED_MAX)
        made.max_queued_messages_set(0)
        made.reconnect_delay_set(RECONNECT_S, RECONNECT_S)  # type: ignore[arg-type]
        made.on_connect, made.on_disconnect = self._on_connect, self._on_disconnect
        made.on_publish, made.on_message, made.on_subscribe = self._on_publish, self._on_message, self._on_subscribe
        self._client = made
        session = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        session.SessionExpiryInterval = SESSION_S
        made.connect_async("127.0.0.1", port, keepalive=30, clean_start=False, properties=session)
        made.loop_start()

    def _on_connect(self, client: paho.Client, _: Any, flags: Any, reason: Any, __: Any) -> None:
        if reason.is_failure:
            return
        self.lost.clear()
        self.connected.set()
        if not self._filters or flags.session_present:
            self.subscribed.set()
        else:
            client.subscribe([(one, SubscribeOptions(qos=1)) for one in self._filters])

    def _on_subscribe(self, *_: Any) -> None:
        self.subscribed.set()

    def _on_disconnect(self, *_: Any) -> None:
        self.connected.clear()
        self.subscribed.clear()
        self.losses += 1
        self.lost.set()

    def _on_publish(self, _: Any, __: Any, mid: int, reason: Any, ___: Any) -> None:
        if reason.value == NO_SUBSCRIBER:
            self.unheard += 1
        with self._lock:  # not held while paho is called, since paho calls back with locks of its own
            done = self._waiting.pop(mid, None)
            if done is None:
                self._early[mid] = reason.value
        if done is not None:
            done(reason.value)

    def _on_message(self, _: Any, __: Any, message: paho.MQTTMessage) -> None:
        assert self._heard is not None
        if message.properties is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._heard(Message.of_mqtt(message.properties, bytes(message.payload)))

    @property
    def unacked(self) -> int:
        return len(self._waiting)

    def send(self, message: Message, off_vehicle: bool, done: Callable[[int], None]) -> None:
        """Queue it, QoS 1; `done(reason)` on paho's thread with the PUBACK's reason code."""
        info = self._client.publish(message.topic(off_vehicle), message.payload, qos=1, properties=message.properties())
        with self._lock:
            reason = self._early.pop(info.mid, None)
            if reason is None:
                self._waiting[info.mid] = done
        if reason is not None:
            done(reason)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class ZenohLink:
    """One Zenoh session in client mode; Zenoh reconnects by itself."""

    def __init__(self, port: int, keys: tuple[str, ...] = (), heard: Heard | None = None) -> None:
        config = zenoh.Config()
        for path, value in (
            ("mode", "client"),
            ("connect/endpoints", [f"tcp/127.0.0.1:{port}"]),
            ("connect/timeout_ms", 30_000),
            ("connect/retry", {"period_init_ms": 100, "period_max_ms": 400, "period_increase_factor": 2}),
            ("scouting/multicast/enabled", False),
        ):
            config.insert_json5(path, json.dumps(value))
        self._session = zenoh.open(config)
        self._heard = heard
        self._subscribers = [self._session.declare_subscriber(key, self._on_sample) for key in keys]

    def _on_sample(self, sample: zenoh.Sample) -> None:
        assert self._heard is not None
        attachment = sample.attachment
        if attachment is None:
            return
        with contextlib.suppress(ValueError, TypeError):
            self._heard(Message.of_attributes(attachment.to_bytes()[1:], sample.payload.to_bytes()))

    def send(self, message: Message) -> None:
        priority = zenoh.Priority.INTERACTIVE_LOW if message.type in (REQUEST, RESPONSE) else zenoh.Priority.DATA_LOW
        self._session.put(
            message.zenoh_key(),
            message.payload,
            attachment=message.attachment(),
            priority=priority,
            congestion_control=zenoh.CongestionControl.BLOCK,
        )

    def close(self) -> None:
        with contextlib.suppress(zenoh.ZError):
            self._session.close()  # type: ignore[no-untyped-call]


class Sender(ABC):
    """Sends numbered messages of some flows, and reports them to the ledger."""

    def __init__(self, ledger: Ledger, flow: Callable[[Message], str] = flow_of) -> None:
        """`flow`: the name of a message's flow in the ledger."""
        self._ledger, self._flow = ledger, flow

    def publish(self, source: Uri, sink: Uri | None, payload: bytes) -> None:
        type = NOTIFICATION if sink is not None and not sink.is_any else PUBLISH
        message = Message(new_id(), type, source, sink, payload)
        self._ledger.sent(message.id, self._flow(message), payload)
        self.send(message)

    @abstractmethod
    def send(self, message: Message) -> None: ...

    @abstractmethod
    def busy(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...


class MqttSender(Sender):
    def __init__(self, ledger: Ledger, port: int, name: str, *, off_vehicle: bool) -> None:
        super().__init__(ledger)
        self._off_vehicle = off_vehicle
        self.link = MqttLink(port, name)
        self._losses_seen = 0

    def send(self, message: Message) -> None:
        def done(reason: int) -> None:
            if reason < FAILURE:
                self._ledger.acked(message.id, unheard=reason == NO_SUBSCRIBER)

        self.link.send(message, self._off_vehicle, done)

    def busy(self) -> bool:
        """After a reconnection also until all from before is acknowledged: paho sends what is new ahead of what it
        sends again."""
        link = self.link
        if not link.connected.is_set() or link.unacked >= UNACKED_MAX:
            return True
        losses = link.losses
        if losses != self._losses_seen and not link.unacked:
            self._losses_seen = losses
        return losses != self._losses_seen

    def close(self) -> None:
        self.link.close()


class ZenohSender(Sender):
    def __init__(self, ledger: Ledger, port: int, flow: Callable[[Message], str] = flow_of) -> None:
        super().__init__(ledger, flow)
        self._link = ZenohLink(port)

    def send(self, message: Message) -> None:
        self._link.send(message)

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._link.close()


class PublisherSender(Sender):
    """Lets a process of ours publish (campaigns/chaos/publishing.py), which answers when `publish` has returned. A
    message that was not
    answered before a kill is not owed."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._link: socket.socket | None = None
        self._asked: dict[
            bytes, bytes
        ] = {}  # by name of the message: messages that this connection was asked to publish
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self, source: Uri, sink: Uri | None, payload: bytes) -> None:
        message = Message(new_id(), PUBLISH, source, sink, payload)
        named = message.id + payload  # the publisher assigns another id
        self._ledger.sent(message.id, flow_of(message), named)
        self._asked[message.id] = named
        self.send(Message(message.id, PUBLISH, source, sink, named))

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError, AttributeError):  # it was just killed
            self._link.sendall(f"{message.source.resource:X} {message.payload.hex()}\n".encode())  # type: ignore[union-attr]

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:  # closed
                return
            self._asked.clear()
            self._link = link
            with link, link.makefile("rb") as answers, contextlib.suppress(OSError):
                for line in answers:
                    id = bytes.fromhex(line.decode())
                    if self._asked.pop(id, None) is not None:
                        self._ledger.acked(id)
            self._link = None

    def busy(self) -> bool:
        return self._link is None or len(self._asked) >= UNACKED_MAX

    @property
    def unacked(self) -> int:
        return 0 if self._link is None else len(self._asked)

    def close(self) -> None:
        self._listening.close()


def name_in(payload: bytes) -> bytes:
    """The name of a message with this payload for a PublisherSender."""
    return payload[:16]


class Caller:
    """Requests by hand, on either network; an answer that does not come in time is None."""

    def __init__(self, me: Uri, send: Callable[[Message], None]) -> None:
        self.me, self._send = me, send
        self._answers: dict[bytes, Message] = {}
        self._arrived = threading.Condition()

    def heard(self, message: Message) -> None:
        if message.type == RESPONSE and message.reqid is not None:
            with self._arrived:
                self._answers[message.reqid] = message
                self._arrived.notify_all()

    def call(self, method: Uri, payload: bytes, timeout_s: float, late_s: float = 0.0) -> Message | None:
        """`late_s`: wait so much longer than the request's ttl, `timeout_s`."""
        with self._arrived:
            self._answers.clear()  # late answers
        request = Message(
            new_id(), REQUEST, self.me, method, payload, ttl_ms=int(timeout_s * 1000), format=FORMAT_PROTOBUF
        )
        self._send(request)
        with self._arrived:
            self._arrived.wait_for(lambda: request.id in self._answers, timeout_s + late_s)
            return self._answers.pop(request.id, None)


def mqtt_caller(port: int, name: str, me: Uri, *, off_vehicle: bool) -> tuple[Caller, MqttLink]:
    def send(message: Message) -> None:
        link.send(message, off_vehicle, lambda _: None)

    caller = Caller(me, send)
    filters = (f"+/{me.authority}",) if off_vehicle else (f"+/+/+/+/+/{me.segments}",)
    link = MqttLink(port, name, filters=filters, heard=caller.heard)
    return caller, link


def zenoh_caller(port: int, me: Uri) -> tuple[Caller, ZenohLink]:
    def send(message: Message) -> None:
        link.send(message)

    caller = Caller(me, send)
    link = ZenohLink(port, (f"up/*/*/*/*/*/{me.segments}",), caller.heard)
    return caller, link


SUBSCRIBED: Final = 2


def subscribe(caller: Caller, service: str, topic: Uri, timeout_s: float = 3.0) -> int | None:
    """The state in the answer of uSubscription v3 at the authority `service`; None without an answer."""
    answer = caller.call(Uri(service, 0, 3, 1), field(1, topic.encode()), timeout_s)
    if answer is None or answer.commstatus:
        return None
    status = blob(parse(answer.payload), 1)
    return number(parse(status or b""), 1)


class Poller(threading.Thread):
    """Reads the history at `authority` from its beginning without end, over a Caller, and reports to the ledger what it
    shows."""

    def __init__(
        self,
        ledger: Ledger,
        caller: Caller,
        authority: str,
        pulled: set[str],
        *,
        followed: Callable[[str], bool] = lambda _: False,
        key: Callable[[Message], bytes] = lambda message: message.id,
        flow: Callable[[Message], str] = flow_of,
    ) -> None:
        """`pulled`: flows that may arrive this way. `followed`: flows that this history follows. `key`: the name of a
        message in the ledger. `flow`: that of its flow."""
        super().__init__(daemon=True)
        self._followed, self._key, self._flow = followed, key, flow
        self._ledger, self._caller, self._method, self._pulled = ledger, caller, Uri(authority, 4, 1, 2), pulled
        self._positions: list[bytes] = []
        self._newest: dict[bytes, int] = {}
        self._ended = False
        self.caught_up_at = 0.0  # time.monotonic() of an answer without more records
        self.gaps: list[str] = []
        self.polls = self.failed = 0

    def run(self) -> None:
        while not self._ended:
            self.poll_once()

    def poll_once(self, timeout_s: float = 2.0) -> bool:
        """True if all present records have been shown."""
        request = b"".join(field(2, one) for one in self._positions) + field(11, 500)
        asked_at = time.monotonic()
        answer = self._caller.call(self._method, request, timeout_s)
        if answer is None or answer.commstatus:
            self.failed += 1
            time.sleep(0.1)
            return False
        self.polls += 1
        fields = parse(answer.payload)
        for batch in fields.get(1, []):
            assert isinstance(batch, bytes)
            self._take(parse(batch))
        self._positions = [one for one in fields.get(2, []) if isinstance(one, bytes)]
        for gap in fields.get(3, []):
            assert isinstance(gap, bytes)
            self._gap(parse(gap))
        if not number(fields, 4):
            self.caught_up_at = asked_at
        return not number(fields, 4)

    def _take(self, batch: Fields) -> None:
        incarnation = blob(batch, 1) or b""
        for seq, data in zip(packed(batch.get(2, [])), batch.get(5, []), strict=True):
            if seq <= self._newest.get(incarnation, 0):
                self._ledger.example("note", f"Poll showed seq {seq} again after {self._newest[incarnation]}")
            self._newest[incarnation] = max(seq, self._newest.get(incarnation, 0))
            assert isinstance(data, bytes)
            message = Message.of_umessage(data)
            flow = self._flow(message)
            id = self._key(message)
            self._ledger.shown(id)
            if flow in self._pulled:
                self._ledger.arrived("poll", id, flow, message.payload)
            if message.type == PUBLISH and self._followed(flow):
                self._ledger.logged(id, flow, message.payload)

    def _gap(self, gap: Fields) -> None:
        reason, after, before = number(gap, 1), number(gap, 3), number(gap, 4)
        self.gaps.append(f"{REASONS.get(reason, reason)} ({after}, {before})")

    def end(self) -> None:
        self._ended = True
