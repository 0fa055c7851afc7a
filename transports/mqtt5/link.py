"""Keeps a connection to the broker: connects, logs in, keeps it alive, and connects again.

open -> CONNECT -> CONNACK -> up(welcome) -> ... lost -> down(why) -> wait -> CONNECT
                                                         for 500, 1000, 2000, 4000, 10000, 10000, ... ms;
                                                         after a connection of STEADY_S from the beginning
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import secrets
import ssl
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from transports.base import NOT_OPEN
from transports.certificates import TlsFiles, client_context
from transports.mqtt5 import packets, reasons, wire
from transports.mqtt5.config import Mqtt5Config, TlsConfig, first_line
from transports.mqtt5.connection import (
    Connection,
    ConnectionUser,
    Dialler,
    Disconnected,
    PacketTooLarge,
    TakenOver,
)
from transports.mqtt5.packets import Welcome
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

# before attempt 1, 2, ...; the last one before all later attempts (spec section 6.7)
RECONNECT_MS: Final = (500, 1_000, 2_000, 4_000, 10_000)
JITTER: Final = 0.25  # a wait may be shorter by this share: clients don't all reconnect to a broker at once
BROKER_ADDS_BYTES: Final = 1_024  # to each message: header, packet id
HANGS_UP: Final = (ConnectionResetError, BrokenPipeError, ssl.SSLError)  # without DISCONNECT
IDENTIFIERS_TRIED_MAX: Final = 5  # for one SUBSCRIBE, while the broker says that the packet id is in use
IDENTIFIERS_SKIPPED: Final = 12_000  # between two tries, 0.5 ms: more than a broker has messages in flight
TICK_MS: Final = 1_000  # between checks of keep-alive and time-outs
# a connection that lasted so long was sound: the waits begin again. Longer than the longest wait: with one client_id,
# each of two clients ends the other's connection after that
STEADY_S: Final = 15.0
BRIEF_S: Final = 2.0  # a connection that is lost within that was not sound ...
BRIEF_MAX: Final = 3  # ... and so many in a row are reported as a trouble

log = structlog.get_logger()


def reconnect_wait_ms(attempt: int, chance: float) -> float:
    """The wait before `attempt` (from 1); `chance` from 0 to 1 takes up to JITTER off the table's value."""
    return RECONNECT_MS[min(attempt, len(RECONNECT_MS)) - 1] * (1 - JITTER * chance)


class LinkUser(ConnectionUser, Protocol):
    """Callbacks of a Link, all on the event loop."""

    async def up(self, connection: Connection, welcome: Welcome) -> None:
        """The login is accepted. Raises UStatusError if the connection can't be used; it is dropped then."""

    def down(self, why: str) -> None:
        """The connection is lost, or could not be made. May be called several times."""

    def tick(self, now_s: float) -> None:
        """Once in TICK_MS."""


class Link:
    """One Connection at a time; the next one continues its packet ids."""

    def __init__(self, config: Mqtt5Config, local: LocalUriProvider, user: LinkUser) -> None:
        self._config, self._user = config, user
        self.address = f"{config.host}:{config.port}"
        self.wire_bytes_max = 0  # of a message that arrives; set by `open`
        self.next_packet_id = itertools.chain.from_iterable(itertools.repeat(range(1, 65_536))).__next__
        source = local.get_source()
        generated = f"up-{source.authority_name[:40]}-{source.ue_id:X}-{secrets.token_hex(6)}"
        self._client_id = config.client_id or generated
        self._clean_start = config.clean_start  # until the broker has accepted a login
        self.session_expiry_s = config.session_expiry_s  # or less, as the broker has granted last
        self._dialler = Dialler(config.host, config.port)
        if config.websocket is not None:
            # aiohttp takes 0.1 s and 11 MiB, so only users of WebSocket import it
            from transports.mqtt5.websocket import WebSocketDialler

            self._dialler = WebSocketDialler(config.host, config.port, config.websocket)
        self._tls: TlsFiles | None = None
        if (tls := config.tls) is not None:
            files = (tls.ca_file, tls.cert_file, tls.key_file)
            self._tls = TlsFiles(files, functools.partial(_tls_context, tls, config.alpn))
        self.connection: Connection | None = None  # the present one, or the last
        self._opened: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._up_since_s = 0.0  # loop time
        self._brief = 0  # connections in a row that were lost within BRIEF_S
        self._taken_over = 0  # ... that another client has ended, since the last sound one
        self._last_loss = OSError("none was lost yet")

    async def open(self, wire_bytes_max: int) -> None:
        """Connect once; from then on a lost connection is made again. Raises UStatusError as UTransport.open does."""
        self.wire_bytes_max = wire_bytes_max
        self._opened = opened = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._stay_connected(opened)), asyncio.create_task(self._tick())]
        try:
            await opened
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect at once. A session with a generated name ends, since nobody could resume it; a named one stays."""
        if self._opened is not None and not self._opened.done():
            why = "the transport was closed while it was connecting: call open again"
            self._opened.set_exception(UStatusError(UCode.CANCELLED, why))
        await end(*self._tasks)
        if self.connection is not None and self.connection.up:
            self.connection.write(packets.disconnect({} if self._config.client_id else {"SessionExpiryInterval": 0}))
        self.drop("the transport was closed")
        self._tell_down(NOT_OPEN.message)

    def drop(self, why: str) -> None:
        """End this connection; as after any loss, the next one follows."""
        if self.connection is not None:
            self.connection.drop(ConnectionAbortedError(why))

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the connection and our files, in sentences."""
        files = self._tls.trouble if self._tls is not None else ""
        asked_s, no_session = self._config.session_expiry_s, ""
        if asked_s and not self.session_expiry_s:
            no_session = (
                f"the broker at {self.address} keeps no session (it grants a Session Expiry Interval of 0 s, and "
                f"session_expiry_s asks for {asked_s}): what comes while we are away is lost. Let it keep sessions"
            )
        return [trouble for trouble in (self.trouble, files, no_session) if trouble]

    @property
    def notes(self) -> list[str]:
        """What is not wrong, but may matter to an operator, in sentences."""
        asked_s, granted_s = self._config.session_expiry_s, self.session_expiry_s
        if not 0 < granted_s < asked_s:
            return []
        what = (
            f"the broker at {self.address} keeps our session for {granted_s} s, and session_expiry_s asks for {asked_s}"
        )
        return [f"{what}: what comes for us while we are away for longer is lost"]

    def may_be_behind(self, timeout_s: float) -> bool:
        """True if PUBACKs that are overdue may be behind what the broker has queued for us."""
        connection = self.connection
        return connection is not None and connection.may_be_behind(connection.delivered_s, timeout_s)

    def pause(self, paused: bool) -> None:
        """Stop reading, or go on. A new connection is read."""
        if self.connection is not None:
            self.connection.pause(paused)

    async def subscribe(self, topic_filter: str, *, retained: bool = False) -> int:
        """Subscribe with QoS 1 and No Local. `retained`: send retained messages each time. Returns the granted QoS.

        Raises RefusedError if the broker refuses, and UNAVAILABLE if the connection is lost meanwhile.
        """
        return await self._ask(
            lambda packet_id: packets.subscribe(packet_id, topic_filter, retained=retained),
            f"the subscription to {topic_filter}",
        )

    async def unsubscribe(self, topic_filter: str) -> None:
        """Raises as `subscribe` does."""
        what = f"the end of the subscription to {topic_filter}"
        await self._ask(lambda packet_id: packets.unsubscribe(packet_id, topic_filter), what)

    async def _ask(self, packet_of: Callable[[int], bytes], what: str) -> int:
        """Ask for `what`, with the packet that `packet_of` makes for a packet id. Returns the reason code.

        Some brokers (mochi) mix up our packet ids with those of their own messages: then others are tried, far from the
        first.
        """
        assert self.connection is not None, "no subscription before `up`"
        for _ in range(IDENTIFIERS_TRIED_MAX):
            packet_id = self.next_packet_id()
            try:
                said: packets.Answer = await self.connection.ask(packet_id, packet_of(packet_id))
            except OSError as failure:
                raise UStatusError(UCode.UNAVAILABLE, self._lost(failure)) from None
            if said.reason != reasons.IDENTIFIER_IN_USE:
                break
            for _ in range(IDENTIFIERS_SKIPPED):
                self.next_packet_id()
        if said.reason >= reasons.FAILURE_MIN:
            raise reasons.refused(what, said.reason, said.properties)
        return said.reason

    def _lost(self, failure: BaseException) -> str:
        return f"the connection to the broker at {self.address} is lost ({failure}): try again when it is back"

    # Connecting, again and again.

    async def _stay_connected(self, opened: asyncio.Future[None]) -> None:
        attempt = 0
        while True:
            try:
                connection = await self._connect()
            except UStatusError as error:
                if not opened.done():
                    opened.set_exception(error)
                    return
                waiting = "no connection to the broker yet"
                log.warning(waiting, broker=self.address, attempt=attempt, error=str(error), _kind="broker")
            else:
                if not opened.done():
                    opened.set_result(None)
                failure = await connection.lost
                lost = "the connection to the broker is lost"
                log.warning(lost, broker=self.address, reason=str(failure), _kind="broker")
                # a packet that is too large comes again with the session, so the waits must grow
                if self._count_loss(failure) and not isinstance(failure, PacketTooLarge):
                    attempt = 0
                self._tell_down(self._lost(failure))
            attempt += 1
            await asyncio.sleep(reconnect_wait_ms(attempt, random.random()) / 1000)

    def _count_loss(self, failure: OSError) -> bool:
        """Count the end of a connection that was up. Returns True if it had lasted long enough to be sound."""
        lasted_s = asyncio.get_running_loop().time() - self._up_since_s
        if lasted_s >= STEADY_S:
            self._brief = self._taken_over = 0
        if lasted_s < BRIEF_S:
            self._brief += 1
        elif self._brief < BRIEF_MAX:  # else only a sound one resets it: the waits have grown beyond BRIEF_S
            self._brief = 0
        self._taken_over += isinstance(failure, TakenOver)
        self._last_loss = failure
        return lasted_s >= STEADY_S

    @property
    def trouble(self) -> str:
        """Why the last connections did not last; "" once one has lasted STEADY_S."""
        is_up = self.connection is not None and self.connection.up
        if is_up and asyncio.get_running_loop().time() - self._up_since_s >= STEADY_S:
            return ""
        if self._taken_over:
            return (
                f"another client logs in at {self.address} with our client_id {self._client_id!r} and has taken the "
                f"session over {self._taken_over} times: give each gateway a client_id of its own"
            )
        if self._brief < BRIEF_MAX:
            return ""
        asks = ""
        if self._config.client_id and isinstance(self._last_loss, HANGS_UP):  # else the broker or we gave a reason
            asks = f": does another gateway use the client_id {self._client_id!r}?"
        return (
            f"connections to {self.address} don't last: {BRIEF_MAX} in a row were lost within {BRIEF_S:.0f} s each, "
            f"the last one because {self._last_loss}{asks}"
        )

    async def _connect(self) -> Connection:
        """One attempt, from the socket to the user's `up`. Raises UStatusError for any failure; nothing is left open
        then."""
        config, is_in = self._config, False
        packet_bytes_max = min(self.wire_bytes_max + BROKER_ADDS_BYTES, wire.PACKET_BYTES_MAX)
        try:
            context, password = await self.secrets()
            self.connection = connection = Connection(self._user, packet_bytes_max, config.keep_alive_s)
            await self.dial(connection, context)
            login = packets.connect(
                config, self._client_id, password, clean_start=self._clean_start, packet_bytes_max=packet_bytes_max
            )
            welcome = await self.log_in(connection, login)
            if welcome.reason >= reasons.FAILURE_MIN:
                raise reasons.refused("the login", welcome.reason, welcome.properties)
            self._check(welcome)
            self._clean_start, is_in, self._up_since_s = False, True, asyncio.get_running_loop().time()
            await self._user.up(connection, welcome)
        except BaseException as error:
            if is_in and self.connection is not None and self.connection.lost.done():
                self._count_loss(self.connection.lost.result())
            self.drop("the attempt has failed")
            if not isinstance(error, Exception):
                self._tell_down(self._lost(error))
                raise
            if isinstance(error, UStatusError):
                self._tell_down(error.message)
                raise
            if not isinstance(error, (OSError, ValueError)):
                log.exception("connecting to the broker failed: unexpected error", broker=self.address)
            failure = reasons.unreachable(self.address, error)
            self._tell_down(failure.message)
            raise failure from error
        return connection

    async def secrets(self) -> tuple[ssl.SSLContext | None, str | None]:
        """What the files of the settings hold now: for TLS, and the password. Raises UStatusError."""
        context = await asyncio.to_thread(self._tls.current) if self._tls is not None else None
        config = self._config
        return context, await asyncio.to_thread(_password, config) if config.username is not None else None

    async def dial(self, connection: Connection, context: ssl.SSLContext | None) -> None:
        """Raises as Dialler.dial."""
        await self._dialler.dial(connection, context, self._config.connect_timeout_ms / 1000)

    async def log_in(self, connection: Connection, login: bytes) -> Welcome:
        """Send `login`, a CONNECT. Raises UNAVAILABLE if there is no answer. Most brokers that support only MQTT 3
        refuse the login or hang up; amqtt does neither."""
        try:
            welcome: Welcome = await connection.ask(0, login, self._config.connect_timeout_ms / 1000)
        except OSError as failure:
            if isinstance(failure, (ssl.SSLError, Disconnected)):  # these say more
                raise
            does = "does not answer in time" if isinstance(failure, TimeoutError) else f"ends it ({failure})"
            what = f"the broker at {self.address} takes the connection, but {does} when we log in"
            asks = "does it speak MQTT 5, and is this its port for MQTT, with or without TLS as in the settings?"
            raise UStatusError(UCode.UNAVAILABLE, f"{what}: {asks}") from failure
        return welcome

    def _tell_down(self, why: str) -> None:
        try:
            self._user.down(why)
        except Exception:  # the next connection must be made all the same
            log.exception("handling the loss of the connection failed: unexpected error")

    def _check(self, welcome: Welcome) -> None:
        """Note how long the broker keeps the session. Raises UNIMPLEMENTED for a broker without QoS 1, which would hang
        up on each of our messages."""
        if welcome.number("MaximumQoS", 1) < 1:
            why = "takes messages of QoS 0 only, which may be lost on the way, and ours have QoS 1"
            how = "let it grant QoS 1 (mosquitto: max_qos)"
            raise UStatusError(UCode.UNIMPLEMENTED, f"the broker at {self.address} {why}: {how}")
        asked_s = self._config.session_expiry_s
        granted_s = self.granted_s(welcome)
        if granted_s < asked_s and granted_s != self.session_expiry_s:
            why = "the broker keeps our session for less than session_expiry_s: what comes for us after that is lost"
            log.warning(why, broker=self.address, asked_s=asked_s, granted_s=granted_s)
        self.session_expiry_s = granted_s

    def granted_s(self, welcome: Welcome) -> int:
        """How long the broker keeps the session while there is no connection, in seconds."""
        asked_s = self._config.session_expiry_s
        return min(welcome.number("SessionExpiryInterval", asked_s), asked_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            now_s = asyncio.get_running_loop().time()
            try:
                if self.connection is not None:
                    self.connection.keep_alive(now_s)
                self._user.tick(now_s)
            except Exception:  # go on, or a dead connection would stay unnoticed
                log.exception("checking the connection to the broker failed: unexpected error")


def _password(config: Mqtt5Config) -> str | None:
    if config.password_file is None:
        return config.password.get_secret_value() if config.password is not None else None
    return first_line("password_file", config.password_file)


def _tls_context(tls: TlsConfig, alpn: list[str]) -> ssl.SSLContext:
    context = client_context(tls.ca_file, tls.cert_file, tls.key_file)
    if alpn:
        context.set_alpn_protocols(alpn)
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
