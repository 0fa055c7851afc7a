"""What each broker says and does on the wire, asked with plain paho: no code of ours is between.

CONNACK -> limits for the matrix      PUBACK, copies for overlapping filters, the $SYS topic, authorities -> checks
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.brokers.conftest import StartBroker
from tests.brokers.makes import AnyBroker

pytestmark = pytest.mark.broker

WAIT_S: Final = 5.0
NOBODY: Final = 0x10  # No matching subscribers
SESSION_S: Final = 86_400
SYS: Final = "$SYS/broker/publish/messages/dropped"  # what the transport asks for when it starts
LIMITS: Final = ("ReceiveMaximum", "MaximumPacketSize", "MaximumQoS", "ServerKeepAlive", "SessionExpiryInterval")
MARK: Final = b"mark"
CALLBACKS: Final = ("connect", "subscribe", "publish", "message", "disconnect")


@dataclass
class Client:
    """A paho client whose callbacks can be waited for."""

    paho: paho.Client
    announced: Properties | None = None
    _said: dict[str, queue.Queue[Any]] = field(default_factory=dict)

    def wait(self, what: str) -> Any:
        """The next one of `connect`, `subscribe`, `publish`, `message` or `disconnect`."""
        return self._said[what].get(timeout=WAIT_S)

    @property
    def has_message(self) -> bool:
        """One has come that nobody has waited for."""
        return not self._said["message"].empty()

    @property
    def has_lost_connection(self) -> bool:
        """At any time: paho connects again by itself."""
        return not self._said["disconnect"].empty()

    @classmethod
    @contextlib.contextmanager
    def of(cls, broker: AnyBroker, client_id: str) -> Iterator[Client]:
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5)
        said: dict[str, queue.Queue[Any]] = {name: queue.Queue() for name in CALLBACKS}
        made = cls(client, None, said)
        client.on_connect = lambda *arguments: said["connect"].put(arguments[4])
        client.on_subscribe = lambda *arguments: said["subscribe"].put([one.value for one in arguments[3]])
        client.on_publish = lambda *arguments: said["publish"].put(arguments[3].value)
        client.on_message = lambda *arguments: said["message"].put(arguments[2])
        client.on_disconnect = lambda *arguments: said["disconnect"].put(arguments[3])
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = SESSION_S
        client.connect(broker.host, broker.port, clean_start=True, properties=properties)
        client.loop_start()
        try:
            made.announced = made.wait("connect")
            yield made
        finally:
            ending = Properties(PacketTypes.DISCONNECT)
            ending.SessionExpiryInterval = 0
            client.disconnect(properties=ending)
            client.loop_stop()

    def subscribe(self, topic_filter: str, identifier: int | None = None) -> list[int]:
        """The reason codes of SUBACK."""
        properties = Properties(PacketTypes.SUBSCRIBE)
        if identifier is not None:
            properties.SubscriptionIdentifier = identifier
        self.paho.subscribe(topic_filter, options=SubscribeOptions(qos=1), properties=properties)
        return list(self.wait("subscribe"))

    def publish(self, topic: str, payload: bytes) -> int:
        """The reason code of PUBACK."""
        self.paho.publish(topic, payload, 1)
        return int(self.wait("publish"))


def said_of(announced: Properties | None) -> str:
    found = [(name, getattr(announced, name, None)) for name in LIMITS]
    return ", ".join(f"{name} {value}" for name, value in found if value is not None) or "nothing"


def test_grants_what_is_asked_for(broker: AnyBroker, facts: dict[str, str]) -> None:
    """QoS 1, subscription identifiers, wildcards and the whole session."""
    with Client.of(broker, "announced") as client:
        facts["CONNACK, set up for this test"] = said_of(client.announced)
        announced = client.announced
        assert getattr(announced, "MaximumQoS", 2) >= 1
        assert getattr(announced, "SubscriptionIdentifierAvailable", 1) == 1
        assert getattr(announced, "WildcardSubscriptionAvailable", 1) == 1
        assert getattr(announced, "SessionExpiryInterval", SESSION_S) == SESSION_S
        assert client.subscribe("announced/#", 1) == [1]


def test_announces_as_delivered(start_broker: StartBroker, facts: dict[str, str]) -> None:
    with Client.of(start_broker(as_delivered=True), "delivered") as client:
        facts["CONNACK, as delivered"] = said_of(client.announced)


def test_says_that_nobody_listens(broker: AnyBroker, facts: dict[str, str]) -> None:
    with Client.of(broker, "lonely") as client:
        reason = client.publish("nobody/listens", b"")
        facts[""] = f"0x{reason:02x}"
        assert reason == NOBODY, facts[""]


def test_copies_for_overlapping_filters(broker: AnyBroker, facts: dict[str, str]) -> None:
    """With the identifiers of all of them; or one for each, with its own (MQTT 5, section 3.3.4)."""
    with Client.of(broker, "overlapping") as client:
        for identifier, topic_filter in enumerate(("over/lap", "over/+", "over/#"), 1):
            client.subscribe(topic_filter, identifier)
        client.publish("over/lap", b"one")
        client.publish("over/lap", MARK)
        copies: list[list[int]] = []
        while (message := client.wait("message")).payload != MARK:
            copies.append(sorted(getattr(message.properties, "SubscriptionIdentifier", [])))
        facts[""] = f"{len(copies)}, identifiers {', '.join(map(str, copies))}"
        assert sorted(copies) in ([[1, 2, 3]], [[1], [2], [3]]), facts[""]


def test_stays_when_asked_for_sys(broker: AnyBroker, facts: dict[str, str]) -> None:
    """A broker that counts nothing may refuse, and must not hang up."""
    with Client.of(broker, "asking") as client:
        client.paho.subscribe(SYS, options=SubscribeOptions(qos=1))
        try:
            facts[""] = ", ".join(f"0x{reason:02x}" for reason in client.wait("subscribe"))
        except queue.Empty:
            facts[""] = "hangs up" if client.has_lost_connection else "no SUBACK"
            pytest.fail(facts[""])


@pytest.mark.parametrize("authority", ["ecu1.vin123", "192.168.1.1", "[fd00::1]"])
def test_carries_an_authority(broker: AnyBroker, authority: str) -> None:
    """Those that a broker may take for something else, heard with the filters of both modes."""
    with Client.of(broker, "authorities") as client:
        for topic_filter, topic in (("+/8001/1/#", f"{authority}/8001/1/8001"), ("+/cloud", f"{authority}/cloud")):
            assert client.subscribe(topic_filter) == [1]
            client.publish(topic, MARK)
            try:
                assert client.wait("message").topic == topic
            except queue.Empty:
                pytest.fail(f"nothing came of {topic}")
