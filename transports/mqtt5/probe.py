"""What `up-streamer check --connect` finds out at a broker, with sessions of its own that nobody notices.

connect, TLS, log in -> what the broker announces -> overlaps -> may we subscribe? may we write? -> our client_id

may subscribe   SUBSCRIBE and UNSUBSCRIBE in one write: SUBACK answers, and no message comes in between
may write       PUBLISH with QoS 2, and never its PUBREL: PUBREC answers, and the broker passes nothing on. Only at a
                broker that has shown on a topic of our own that it waits for PUBREL
may read        a broker may grant a filter and deliver nothing (mosquitto). Off-vehicle, while no streamer runs, a
                message from our authority to itself shows it; it has no properties of uProtocol and expires after 1 s
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from transports.certificates import expires_of
from transports.mqtt5 import packets, reasons, wire
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.connection import Connection, TakenOver
from transports.mqtt5.link import BROKER_ADDS_BYTES, Link
from transports.mqtt5.mapping import Mode
from transports.mqtt5.packets import Answer, Welcome
from uprotocol.status import UStatusError
from uprotocol.transport import ENVELOPE_BYTES_MAX, ProbeRequest, ProbeResult, ProbeVerdict

CLIENT_ID_CHARS_MAX: Final = 180  # of ours, before "-check-" and eight more
UNRELEASED_MAX: Final = 10  # messages of QoS 2 in one session; a broker may take few at once (Receive Maximum)
NO_SUBSCRIBERS: Final = 0x10  # reason code of PUBACK and PUBREC
OWNERS_MAX: Final = 4  # authorities below which a topic is tried
COMES_S: Final = 1.0  # for a message of ours to come back
SECOND_COPY_S: Final = 0.2  # for a second copy of it
TAKEN_S: Final = 3.0  # for another client to log in again: ours do it after half a second
HELD, PASSED = b"held", b"passed"  # payloads


def ok(what: str) -> ProbeResult:
    return ProbeResult(ProbeVerdict.OK, what)


def failed(what: str) -> ProbeResult:
    return ProbeResult(ProbeVerdict.FAIL, what)


def unknown(what: str) -> ProbeResult:
    return ProbeResult(ProbeVerdict.UNKNOWN, what)


class ProbeSession(Connection):
    """A connection that keeps the payloads of what arrives. `acknowledges`: tell the broker that they have arrived."""

    def __init__(self, packet_bytes_max: int, keep_alive_s: int, *, acknowledges: bool = True) -> None:
        super().__init__(self, packet_bytes_max, keep_alive_s)
        self.payloads: list[bytes] = []
        self._acknowledges = acknowledges
        self._came = asyncio.Event()
        self._packet_ids = itertools.count(1)
        self.unreleased = 0

    def welcomed(self, welcome: Welcome) -> None:
        """See ConnectionUser."""

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        self.payloads += [one.payload for one in publishes]
        self._came.set()
        if self._acknowledges:
            self.write(wire.pubacks([one.packet_id for one in publishes if one.packet_id]))

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
        for packet_id, reason in pubacks:
            why = whys.get(packet_id)
            self._answer(packet_id, Answer(reason, {"ReasonString": why} if why else {}))

    def _take_rare(self, kind: int, first: int, body: bytes) -> None:
        if kind == packets.PUBREC:
            self._answer(*packets.read_pubrec(body))
        else:
            super()._take_rare(kind, first, body)

    async def publish(self, topic: str, payload: bytes, qos: int) -> Answer:
        """Raises OSError: the connection is lost."""
        packet_id = next(self._packet_ids)
        said: Answer = await self.ask(packet_id, packets.publish(packet_id, topic, payload, qos))
        self.unreleased += qos == 2 and said.reason < reasons.FAILURE_MIN
        return said

    async def subscribe(self, topic_filter: str, *, stays: bool = True) -> Answer:
        """`stays` False: only for an instant. Raises OSError."""
        packet_id = next(self._packet_ids)
        packet = packets.subscribe(packet_id, topic_filter, retained=False)
        if not stays:
            packet += packets.unsubscribe(next(self._packet_ids), topic_filter)
        said: Answer = await self.ask(packet_id, packet)
        return said

    async def unsubscribe(self, topic_filter: str) -> None:
        packet_id = next(self._packet_ids)
        await self.ask(packet_id, packets.unsubscribe(packet_id, topic_filter))

    async def copies(self, payload: bytes) -> int:
        """How many messages with this payload have come, within COMES_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMES_S):
                while payload not in self.payloads:
                    self._came.clear()
                    await self._came.wait()
        if payload in self.payloads:
            await asyncio.sleep(SECOND_COPY_S)
        return self.payloads.count(payload)

    def leave(self, *, keeps_session: bool = True) -> None:
        """Disconnect. The broker keeps the session as long as CONNECT has said, unless `keeps_session` is False."""
        if self.up:
            self.write(packets.disconnect({} if keeps_session else {"SessionExpiryInterval": 0}))
        self.drop(ConnectionAbortedError("the check has ended"))


class BrokerProbe:
    """One check. `filters` and `sends`: topic filters and topics that the owner needs. Use `results` once."""

    def __init__(
        self,
        config: Mqtt5Config,
        link: Link,
        wire_bytes_max: int,
        asked: ProbeRequest,
        filters: Sequence[str],
        sends: Sequence[str],
    ) -> None:
        self._config, self._link, self._asked = config, link, asked
        self._filters, self._sends = filters, sends
        self._message_bytes_max = wire_bytes_max - ENVELOPE_BYTES_MAX
        self._packet_bytes_max = min(wire_bytes_max + BROKER_ADDS_BYTES, wire.PACKET_BYTES_MAX)
        self._client_id = f"{(config.client_id or 'up-streamer')[:CLIENT_ID_CHARS_MAX]}-check-{secrets.token_hex(3)}"
        self._sessions: list[ProbeSession] = []
        self._last_level = f"up-streamer-check-{secrets.token_hex(4)}"  # of topics that nobody else has
        self._waits_for_release = False  # the broker passes on a message of QoS 2 only after PUBREL
        self._qos_max = 2
        self._is_reached = False

    async def results(self) -> AsyncGenerator[ProbeResult, None]:
        try:
            is_in = False
            async for one in self._first_login():
                is_in = is_in or one == self._logged_in
                yield one
            if is_in:
                async for one in self._rights():
                    yield one
            if self._is_reached:
                async for one in self._our_client_id():
                    yield one
        except UStatusError as error:
            yield failed(error.message)
        except OSError as error:
            yield failed(f"the check was cut short: {reasons.unreachable(self._link.address, error).message}")
        finally:
            for session in self._sessions:
                session.leave()

    # The login

    @property
    def _logged_in(self) -> ProbeResult:
        config = self._config
        by = "without a user name" if config.tls is None or config.tls.cert_file is None else "with our certificate"
        return ok(f"login {by if config.username is None else f'as {config.username}'}")

    async def _log_in(
        self, session: ProbeSession, client_id: str, password: str | None, *, expiry_s: int = 0, resumes: bool = False
    ) -> Welcome:
        settings = {"session_expiry_s": expiry_s, **({"receive_maximum": 1} if resumes else {})}
        config = self._config.model_copy(update=settings)
        login = packets.connect(
            config, client_id, password, clean_start=not resumes, packet_bytes_max=self._packet_bytes_max
        )
        return await self._link.log_in(session, login)

    async def _dialled(self, *, acknowledges: bool = True) -> tuple[ProbeSession, str | None]:
        """A connection, and the password to log in with. Raises UStatusError, OSError, ValueError."""
        context, password = await self._link.secrets()
        session = ProbeSession(self._packet_bytes_max, self._config.keep_alive_s, acknowledges=acknowledges)
        self._sessions.append(session)
        await self._link.dial(session, context)
        return session, password

    async def _session(self) -> ProbeSession:
        """A session that ends with its connection. Raises UStatusError, OSError."""
        session, password = await self._dialled()
        welcome = await self._log_in(session, f"{self._client_id}-{len(self._sessions)}", password)
        if welcome.reason >= reasons.FAILURE_MIN:
            raise reasons.refused("another login", welcome.reason, welcome.properties)
        return session

    async def _first_login(self) -> AsyncGenerator[ProbeResult, None]:
        try:
            session, password = await self._dialled()
            self._is_reached = True
            if (tls := session.tls) is None:
                yield ok(f"{self._link.address} is reached, without TLS")
            else:
                yield self._certificate(tls)
            # the session holds nothing, and ends with its DISCONNECT
            welcome = await self._log_in(session, self._client_id, password, expiry_s=self._config.session_expiry_s)
        except (OSError, ValueError) as error:
            yield failed(reasons.unreachable(self._link.address, error).message)
            return
        except UStatusError as error:
            yield failed(error.message)
            return
        if welcome.reason >= reasons.FAILURE_MIN:
            yield self._refused_login(welcome)
            return
        yield self._logged_in
        for one in self._announced(welcome):
            yield one
        session.leave(keeps_session=False)

    def _certificate(self, tls: ssl.SSLObject) -> ProbeResult:
        data = tls.getpeercert(binary_form=True)
        ends = f"{datetime.fromtimestamp(expires_of(data), UTC):%Y-%m-%d}" if data else "an unknown date"
        unchecked = " (not checked: tls.insecure)" if self._config.tls is not None and self._config.tls.insecure else ""
        return ok(f"{tls.version()} with {self._link.address}, its certificate is valid until {ends}{unchecked}")

    def _refused_login(self, welcome: Welcome) -> ProbeResult:
        said = reasons.named(welcome.reason, welcome.properties)
        what = f"{self._logged_in.what}: {said}"
        if welcome.reason in (0x85, 0x87):  # mosquitto says 0x87 to a wrong password, too
            asks = "does the broker tie client_ids to users"
            what += f"; the check has the client_id {self._client_id}: {asks}, or is the password wrong?"
        if self._asked.is_connected:
            return unknown(f"what we may do: {what} The running streamer is connected")
        return failed(what)

    def _announced(self, welcome: Welcome) -> list[ProbeResult]:
        number, config = welcome.number, self._config
        self._qos_max = number("MaximumQoS", 2)
        size = number("MaximumPacketSize", 0)
        missing = [
            what
            for name, what in (
                ("RetainAvailable", "retained messages"),
                ("WildcardSubscriptionAvailable", "wildcards"),
                ("SharedSubscriptionAvailable", "shared subscriptions"),
            )
            if not number(name, 1)
        ]
        granted_s = self._link.granted_s(welcome)
        said = [
            f"receive maximum {number('ReceiveMaximum', 65_535)}",
            f"maximum packet size {size or 'none'}",
            f"topic alias maximum {number('TopicAliasMaximum', 0)}",
            f"maximum QoS {self._qos_max}",
            f"keep alive {number('ServerKeepAlive', config.keep_alive_s)} s",
            f"a session of {granted_s} s",
            *([f"no {' and no '.join(missing)}"] if missing else []),
        ]
        found = [ok(f"the broker announces {', '.join(said)}")]
        if self._qos_max < 1:
            found.append(failed("the broker takes QoS 0 only: let it grant QoS 1 (mosquitto: max_qos)"))
        if config.session_expiry_s and not granted_s:
            why = "what comes while we are away is lost"
            found.append(failed(f"the broker keeps no session, and session_expiry_s asks for one: {why}"))
        if 0 < size < self._message_bytes_max:
            do = "set limits.message_bytes_max lower, or the broker's limit higher"
            what = f"takes packets of {size} bytes at most, and limits.message_bytes_max is {self._message_bytes_max}"
            found.append(failed(f"the broker {what}: {do}"))
        return found

    # What we may do

    async def _rights(self) -> AsyncGenerator[ProbeResult, None]:
        try:
            reader, writer = await self._session(), await self._session()
            await reader.unsubscribe(self._last_level)  # an answer shows that the second login has not ended the first
        except (UStatusError, OSError) as error:
            yield unknown(f"what we may do: the broker does not let our login have two sessions ({error})")
            return
        try:
            yield await self._overlaps(writer, reader)
        except OSError as error:  # at a topic that we may not write
            yield unknown(f"how often a message comes that two of our filters match: the connection ends ({error})")
            reader, writer = await self._session(), await self._session()
        granted = []
        for topic_filter in self._filters:
            try:
                said = await reader.subscribe(topic_filter, stays=False)
            except OSError as error:
                yield failed(f"may not subscribe to {topic_filter}: the broker ends the connection ({error})")
                reader = await self._session()
                continue
            if said.reason >= reasons.FAILURE_MIN:
                yield failed(f"may not subscribe to {topic_filter} ({reasons.named(said.reason, said.properties)})")
            else:
                granted.append(topic_filter)
        if granted:
            yield ok(f"may subscribe to {', '.join(granted)}")
            try:
                async for one in self._reads(writer, reader, granted):
                    yield one
            except OSError as error:  # likewise
                yield unknown(f"whether the broker delivers what it grants: the connection ends ({error})")
                writer = await self._session()
        if self._sends:
            async for one in self._writes(writer):
                yield one

    async def _overlaps(self, writer: ProbeSession, reader: ProbeSession) -> ProbeResult:
        """Also finds out whether the broker holds messages of QoS 2 until PUBREL: then one does not come."""
        owners = [*dict.fromkeys(topic.split("/")[0] for topic in self._sends)] or ["up-streamer"]
        for owner in owners[:OWNERS_MAX]:
            topic, copies = f"{owner}/{self._last_level}", 0
            filters = (topic, f"+/{self._last_level}")
            for one in filters:
                await reader.subscribe(one)
            if self._qos_max >= 2:
                await writer.publish(topic, HELD, 2)
            sent = await writer.publish(topic, PASSED, 1)
            if sent.reason < reasons.FAILURE_MIN:
                copies = await reader.copies(PASSED)
            for one in filters:
                await reader.unsubscribe(one)
            if copies:
                self._waits_for_release = self._qos_max >= 2 and HELD not in reader.payloads
                return ok(f"a message that two of our filters match comes {'once' if copies == 1 else 'once for each'}")
            if sent.reason < reasons.FAILURE_MIN:
                if self._qos_max >= 2:  # nobody listens there now
                    alone, held = await writer.publish(topic, PASSED, 1), await writer.publish(topic, HELD, 2)
                    self._waits_for_release = (alone.reason, held.reason) == (NO_SUBSCRIBERS, 0)
                break
        return unknown("how often a message comes that two of our filters match: we may not read what we write")

    async def _reads(
        self, writer: ProbeSession, reader: ProbeSession, filters: list[str]
    ) -> AsyncGenerator[ProbeResult, None]:
        """Whether the broker delivers what it grants."""
        if self._asked.has_received:
            yield ok("the broker delivers: the running streamer has received messages")
            return
        sent: dict[str, str] = {}  # filter -> topic from one authority to itself
        unsure: list[str] = []
        for topic_filter in filters:
            own = topic_filter.removeprefix("+/")
            is_one = self._config.mode is Mode.OFF_VEHICLE and "/" not in own and own != "+"
            if self._asked.is_running or not is_one:
                unsure.append(topic_filter)
                continue
            topic = f"{own}/{own}"
            await reader.subscribe(topic)
            if self._qos_max >= 2 and not self._waits_for_release:  # the second chance to see it
                await writer.publish(topic, HELD, 2)
            said = await writer.publish(topic, topic_filter.encode(), 1)
            if said.reason >= reasons.FAILURE_MIN:
                unsure.append(topic_filter)
            else:
                sent[topic_filter] = topic
        for topic_filter, topic in sent.items():
            if await reader.copies(topic_filter.encode()):
                self._waits_for_release = self._qos_max >= 2 and HELD not in reader.payloads
                yield ok(f"may read {topic_filter}")
            else:
                why = "the broker grants the filter, and does not deliver"
                yield failed(f"may not read {topic_filter}: {why} what we write to {topic}")
        if unsure:
            yield unknown(
                f"whether the broker delivers {', '.join(unsure)}: some brokers grant filters and deliver nothing"
            )

    async def _writes(self, writer: ProbeSession) -> AsyncGenerator[ProbeResult, None]:
        if not self._waits_for_release:
            shows = "does not show that it waits for PUBREL" if self._qos_max >= 2 else "takes no QoS 2"
            why = f"a message would arrive there, since the broker {shows}"
            yield unknown(f"whether we may write {', '.join(self._sends)}: {why}")
            return
        allowed = []
        for topic in self._sends:
            if writer.unreleased >= UNRELEASED_MAX or not writer.up:
                writer.leave()
                writer = await self._session()
            try:
                said = await writer.publish(topic, b"", 2)
            except OSError as error:
                yield failed(f"may not write {topic}: the broker ends the connection ({error})")
                continue
            if said.reason >= reasons.FAILURE_MIN:
                yield failed(f"may not write {topic} ({reasons.named(said.reason, said.properties)})")
            else:
                allowed.append(topic)
        if allowed:
            yield ok(f"may write {', '.join(allowed)}")

    # Our client_id

    async def _our_client_id(self) -> AsyncGenerator[ProbeResult, None]:
        client_id, asked = self._config.client_id, self._asked
        if client_id is None:
            return
        if asked.is_running:
            if asked.is_connected:
                yield ok(f"client_id {client_id} is held by the running streamer")
            else:
                is_not = "is not connected" if asked.is_connected is False else "does not say whether it has it"
                yield unknown(f"whether client_id {client_id} is in use: the running streamer {is_not}")
            return
        if not asked.take_over:
            why = "it would end that client's connection; --take-over tries it"
            yield unknown(f"whether client_id {client_id} is in use: {why}")
            return
        session, password = await self._dialled(acknowledges=False)
        welcome: Welcome | None = None
        try:
            welcome = await self._log_in(
                session, client_id, password, expiry_s=self._config.session_expiry_s, resumes=True
            )
            if welcome.reason >= reasons.FAILURE_MIN:
                yield failed(f"login with client_id {client_id}: {reasons.named(welcome.reason, welcome.properties)}")
                return
            await asyncio.wait({session.lost}, timeout=TAKEN_S)
            if session.lost.done():  # some brokers say why (Session taken over), mosquitto 2.0.11 hangs up
                ended = session.lost.result()
                how = "is in use" if isinstance(ended, TakenOver) else f"seems to be in use ({ended})"
                yield failed(f"client_id {client_id} {how}: does another gateway log in with it?")
            else:
                has = "has a session for it" if welcome.session_present else "has no session for it yet"
                yield ok(f"client_id {client_id} is free, and the broker {has}")
        finally:  # an earlier session stays; one that we have made would hide that an earlier one is lost
            session.leave(keeps_session=welcome is not None and welcome.session_present)
