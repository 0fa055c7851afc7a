"""Profiles of clouds for the scripted broker: what their documentation says that they allow, and refuse.

AWS, AZURE -> CloudBroker(profile) behind TLS -> what a client does that such a cloud does not take is a breach: it is
                                                  noted, and ends the connection, as the clouds do

No cloud has been asked: a value without a source, and what happens beyond a limit where no page says it, is an
assumption, and marked so. Rates are left to test_mqtt5_rate.py, which has a clock of its own. Pages, as they were in
2024 to 2026:
  [quotas]  docs.aws.amazon.com/general/latest/gr/iot-core.html, message broker and protocol limits
  [mqtt]    docs.aws.amazon.com/iot/latest/developerguide/mqtt.html
  [ports]   docs.aws.amazon.com/iot/latest/developerguide/protocols.html
  [support] learn.microsoft.com/azure/event-grid/mqtt-support
  [limits]  learn.microsoft.com/azure/event-grid/quotas-limits, MQTT limits in namespace
  [spaces]  learn.microsoft.com/azure/event-grid/mqtt-topic-spaces
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from paho.mqtt.packettypes import PacketTypes

from tests.certificates import TestAuthority
from tests.transports.mqtt5_answering import CONNECT, SUBSCRIBE
from tests.transports.mqtt5_scripted import (
    DISCONNECT,
    PUBACK,
    PUBLISH,
    Answer,
    Knobs,
    ScriptedBroker,
    _Connection,
    _unpacked,
)
from transports.mqtt5 import wire

PROTOCOL_ERROR: Final = 0x82
NOT_AUTHORIZED: Final = 0x87


@dataclass(frozen=True)
class Profile:
    knobs: Callable[[Callable[[str], Answer]], Knobs]  # of who may use a topic or a topic filter
    alpn: str = ""  # TLS has to agree on it
    client_id_bytes_max: int = 65_535
    keep_alive_max_s: int = 65_535
    needs_username: bool = False
    user_properties_bytes_max: int = 65_535  # of one message, names and values
    # of another packet than PUBLISH any user property is a breach, and so is a PUBACK that says no
    is_strict: bool = False


def _aws(allows: Callable[[str], Answer]) -> Knobs:
    return Knobs(
        announces={
            "MaximumQoS": 1,  # [mqtt] QoS 2 is not supported
            "ReceiveMaximum": 100,  # [quotas] inbound unacknowledged QoS 1 publish requests
            "MaximumPacketSize": 146 * 1024,  # [quotas] MQTT5 packet size, variable header and payload
            # not on a page; CONNACK says it, and the answer of AWS in repost.aws "MQTT5 subscription identifiers"
            "SubscriptionIdentifierAvailable": 0,
            "ServerKeepAlive": 30,  # [quotas] 30 to 1,200 s
            "TopicAliasMaximum": 8,  # [quotas]
        },
        session_expiry_max_s=3_600,  # [quotas] persistent session expiry period, can be raised
        subscriptions_max=50,  # [quotas] of a connection; that SUBACK says 0x97 is an assumption
        slashes_max=7,  # [quotas] topic and topic filter; DISCONNECT 0x90 for a publish
        topic_bytes_max=256,  # [quotas]
        payload_bytes_max=128 * 1024,  # [quotas]; that it ends the connection is an assumption
        suback=allows,  # that a policy's "no" is 0x87 in SUBACK and PUBACK is an assumption ([mqtt] lists the code)
        puback=allows,
        tells_nobody=False,  # assumption: nothing is said of 0x10
    )


AWS: Final = Profile(_aws, alpn="x-amzn-mqtt-ca", client_id_bytes_max=128, keep_alive_max_s=1_200)  # [ports] [quotas]


def _azure(allows: Callable[[str], Answer]) -> Knobs:
    return Knobs(
        announces={
            "MaximumQoS": 1,  # [support]
            "MaximumPacketSize": 512 * 1024,  # [support]
            "SubscriptionIdentifierAvailable": 0,  # [support] aren't supported
            "SharedSubscriptionAvailable": 0,  # [support] aren't supported yet
            "RetainAvailable": 0,  # [support] as it was in 2024; a page of 2025 has retained messages
            "TopicAliasMaximum": 10,  # [support]
            # [limits] names none in 2024; a page of 2025 has 1,000 messages and 64 KB in flight
            "ReceiveMaximum": 100,
        },
        session_expiry_max_s=3_600,  # [support] 1 hour unless configured, 8 at most
        subscriptions_max=50,  # [limits] of a session; that SUBACK says 0x97 is an assumption
        slashes_max=7,  # [limits] 8 segments; that a publish with more ends the connection is an assumption
        topic_bytes_max=256,  # [limits]
        payload_bytes_max=512 * 1024,  # [limits]
        suback=allows,  # [spaces] a topic outside of the client's topic spaces; that it is 0x87 is an assumption
        puback=allows,
    )


AZURE: Final = Profile(
    _azure,
    keep_alive_max_s=1_160,  # [support]
    needs_username=True,  # [support] the authentication name, unless the namespace takes it from the certificate
    user_properties_bytes_max=32 * 1024,  # [limits]
    is_strict=True,  # [support] such a request fails; such a PUBACK ends the connection
)


class CloudBroker(ScriptedBroker):
    """`topics`: those that the clients may use, and topic filters, each as the cloud's policy has it."""

    def __init__(self, profile: Profile, topics: set[str]) -> None:
        super().__init__(profile.knobs(lambda topic: (0, "") if topic in topics else (NOT_AUTHORIZED, "")))
        self.profile = profile
        self.breaches: list[str] = []
        self.agreed: list[str | None] = []  # of each connection, what ALPN has agreed on
        self.names: list[str] = []  # of the certificates of its clients

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = writer.get_extra_info("ssl_object")
        if tls is not None:  # else the connection has come through a bridge, which ends TLS
            self.agreed.append(tls.selected_alpn_protocol())
            self.names.append(tls.getpeercert()["subject"][0][0][1])
            if self.profile.alpn and self.agreed[-1] != self.profile.alpn:
                writer.close()  # it is taken for HTTPS
                return
        await super().serve(reader, writer)

    def _on_packet(self, connection: _Connection, first: int, body: bytes) -> None:
        breach = self._breach(first, body)
        if breach:
            self.breaches.append(breach)
            connection.end(PROTOCOL_ERROR)
        else:
            super()._on_packet(connection, first, body)

    def _breach(self, first: int, body: bytes) -> str:
        if first == CONNECT:
            return self._breach_of_connect(body)
        if first == SUBSCRIBE:
            return self._breach_of_subscribe(body)
        if first & 0xF0 == PUBLISH:
            return self._breach_of_publish(first, body)
        if first == PUBACK and self.profile.is_strict and body[2:3] >= b"\x80":
            return f"PUBACK says {body[2]:#04x}"
        if first == DISCONNECT and len(body) > 1 and self.profile.is_strict:
            return _user_properties(_unpacked(PacketTypes.DISCONNECT, body, 1)[0], "DISCONNECT")
        return ""

    def _breach_of_connect(self, body: bytes) -> str:
        properties, at = _unpacked(PacketTypes.CONNECT, body, 10)
        if int.from_bytes(body[at : at + 2], "big") > self.profile.client_id_bytes_max:
            return "the client id is too long"
        if not 0 < int.from_bytes(body[8:10], "big") <= self.profile.keep_alive_max_s:
            return "keep alive is none, or too long"
        if self.profile.needs_username and not body[7] & 0x80:
            return "there is no username"
        return _user_properties(properties, "CONNECT") if self.profile.is_strict else ""

    def _breach_of_subscribe(self, body: bytes) -> str:
        properties, at = _unpacked(PacketTypes.SUBSCRIBE, body, 2)
        topic_filter = body[at + 2 : at + 2 + int.from_bytes(body[at : at + 2], "big")].decode()
        if getattr(properties, "SubscriptionIdentifier", None):
            return f"{topic_filter} has an identifier"
        if topic_filter.startswith("$"):
            return f"{topic_filter} is reserved"
        if topic_filter.count("/") > (self.knobs.slashes_max or 0):
            return f"{topic_filter} has too many levels"
        return _user_properties(properties, "SUBSCRIBE") if self.profile.is_strict else ""

    def _breach_of_publish(self, first: int, body: bytes) -> str:
        if first & 0x04 or first & 0x01:
            return "QoS 2, or retained"
        publish = wire.read_publish(first, body)
        properties = _unpacked(PacketTypes.PUBLISH, wire.varint(len(publish.properties)) + publish.properties, 0)[0]
        pairs = getattr(properties, "UserProperty", [])
        size = sum(len(name.encode()) + len(value.encode()) for name, value in pairs)
        return f"{size} bytes of user properties" if size > self.profile.user_properties_bytes_max else ""


def _user_properties(properties: Any, packet: str) -> str:
    return f"{packet} has user properties" if getattr(properties, "UserProperty", []) else ""


def tls_of(profile: Profile, authority: TestAuthority) -> ssl.SSLContext:
    """Of its side, for localhost: it demands a certificate of `authority`."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    tls.load_cert_chain(*authority.issue("cloud"))
    tls.verify_mode = ssl.CERT_REQUIRED
    if profile.alpn:
        tls.set_alpn_protocols([profile.alpn])
    return tls


@asynccontextmanager
async def serving_tls(broker: CloudBroker, authority: TestAuthority) -> AsyncIterator[CloudBroker]:
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0, ssl=tls_of(broker.profile, authority))
    broker.port = server.sockets[0].getsockname()[1]
    async with server:
        yield broker
        broker.end_connections()
