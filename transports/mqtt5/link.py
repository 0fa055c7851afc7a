"""The connection to the broker: made, kept, and made again.

open -> CONNECT -> CONNACK -> up(welcome) -> ... lost -> down(why) -> wait 500, 1000, 2000, 4000, 10000, 10000, ... ms -> CONNECT
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import structlog
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY, ConnectFlags, DisconnectFlags
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from transports.mqtt5 import reasons, wire
from transports.mqtt5.client import BatchClient
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.dial import Dialler
from transports.mqtt5.reader import PacketTooLarge
from uprotocol.status import UStatusError
from uprotocol.transport import ENVELOPE_BYTES_MAX, MESSAGE_BYTES_MAX, LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

# before attempt 1, 2, ...; the last one ever after (spec section 6.7)
RECONNECT_MS: Final = (500, 1_000, 2_000, 4_000, 10_000)
JITTER: Final = 0.25  # so much shorter a wait may be: clients of a broker that restarts don't all come at once
ANSWER_MS_MAX: Final = 20_000  # for SUBACK and UNSUBACK; a broker that takes longer is given up
# to a message, on its way to us: header, packet id, a subscription identifier for each that matches
BROKER_ADDS_BYTES: Final = 1_024
TICK_MS: Final = 1_000  # between looks at keep-alive and time-outs

log = structlog.get_logger()


def reconnect_wait_ms(attempt: int, chance: float) -> float:
    """The wait before `attempt` (1 is the first); `chance` from 0 to 1 says how far below the table's value."""
    return RECONNECT_MS[min(attempt, len(RECONNECT_MS)) - 1] * (1 - JITTER * chance)


class Welcome(NamedTuple):
    """What CONNACK says."""

    reason: ReasonCode
    session_present: bool
    properties: Properties | None

    def told(self, name: str, default: int) -> int:
        value: int = getattr(self.properties, name, default)
        return value


class LinkUser(Protocol):
    """What a Link calls; all of it on the event loop."""

    def welcomed(self, welcome: Welcome) -> None:
        """The broker has let us in; what it kept for us may follow at once."""

    async def up(self, welcome: Welcome) -> None:
        """What is to be done first. Raises UStatusError if the connection can't be used; it is dropped then."""

    def down(self, why: str) -> None:
        """The connection is gone, or could not be made. May be called several times."""

    def on_publishes(self, publishes: list[wire.Publish]) -> None: ...

    def on_pubacks(self, pubacks: list[tuple[int, int]]) -> None: ...

    def tick(self, now_s: float) -> None:
        """Once in TICK_MS."""


class Link:
    def __init__(
        self, config: Mqtt5Config, local: LocalUriProvider, user: LinkUser, chance: Callable[[], float]
    ) -> None:
        self._config, self._user, self._chance = config, user, chance
        self.address = f"{config.host}:{config.port}"
        self.wire_bytes_max = MESSAGE_BYTES_MAX + ENVELOPE_BYTES_MAX  # of a message that comes; set before `open`
        self._client = self._make_client(local)
        self.next_packet_id = self._client.next_packet_id
        self._dialler = Dialler(config.host, config.port)
        self._context: ssl.SSLContext | None = None
        self._dialled = False
        self.up = False  # the broker has let us in, and we have not lost it since
        self._lost = asyncio.Event()
        self._welcome: asyncio.Future[Welcome] | None = None
        # packet id -> SUBACK or UNSUBACK, due when
        self._answers: dict[int, tuple[asyncio.Future[ReasonCode], float]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _make_client(self, local: LocalUriProvider) -> BatchClient:
        config, source = self._config, local.get_source()
        generated = f"up-{source.authority_name[:40]}-{source.ue_id:X}-{secrets.token_hex(6)}"
        client = BatchClient(config.client_id or generated, self._user.on_publishes, self._user.on_pubacks)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = lambda _client, _data, packet_id, codes, _properties: self._on_answer(packet_id, codes)
        client.on_unsubscribe = lambda _client, _data, packet_id, codes, _properties: self._on_answer(packet_id, codes)
        return client

    async def open(self) -> None:
        """Connect once; from then on a lost connection comes back by itself. Raises UStatusError as UTransport.open
        does."""
        self._client.packet_bytes_max = min(self.wire_bytes_max + BROKER_ADDS_BYTES, wire.PACKET_BYTES_MAX)
        self._opening = opening = asyncio.create_task(self._connect())
        try:
            await opening  # cancelled with us
        except asyncio.CancelledError:
            self._client.drop()  # it may have succeeded in the same turn
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UStatusError(
                UCode.CANCELLED, "the transport was closed while it was connecting: call open again"
            ) from None
        finally:
            self._opening = None
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        """Say goodbye and go, at once. A session that nobody could resume, because its name was made up, ends; a named
        one stays."""
        ending = self._tasks if self._opening is None else [*self._tasks, self._opening]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        was_up, self.up = self.up, False
        if was_up:
            farewell = _properties(
                PacketTypes.DISCONNECT, **({} if self._config.client_id else {"SessionExpiryInterval": 0})
            )
            self._client.disconnect(ReasonCode(PacketTypes.DISCONNECT), farewell)
            self._client.loop_write()
        self._client.drop()
        self._go_down("the transport is closed: call open first")

    def send_packets(self, data: bytes, first: int) -> None:
        self._client.send_packets(data, first)

    def drop(self) -> None:
        """End this connection; the next one is made as after any loss."""
        self._client.drop()

    def pause(self, paused: bool) -> None:
        """Read nothing from here on, or go on; a new connection is read."""
        self._client.pause(paused)

    async def subscribe(self, topic_filter: str, identifier: int | None, *, retained: bool = False) -> None:
        """QoS 1, No Local; `retained` asks for what the broker has retained, each time.

        Raises what the broker says, or UNAVAILABLE if the connection is lost meanwhile.
        """
        properties = _properties(
            PacketTypes.SUBSCRIBE, **({"SubscriptionIdentifier": identifier} if identifier is not None else {})
        )
        handling = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
        options = SubscribeOptions(qos=1, noLocal=True, retainHandling=handling)
        _, packet_id = self._client.subscribe(topic_filter, options=options, properties=properties)
        reason = await self._answer(packet_id)
        if reason.value >= reasons.FAILURE_MIN:
            raise reasons.refused(f"the subscription to {topic_filter}", reason)

    async def unsubscribe(self, topic_filter: str) -> None:
        """Raises UNAVAILABLE if the connection is lost meanwhile."""
        _, packet_id = self._client.unsubscribe(topic_filter)
        await self._answer(packet_id)

    async def _answer(self, packet_id: int | None) -> ReasonCode:
        if packet_id is None:
            raise UStatusError(
                UCode.UNAVAILABLE, f"there is no connection to the broker at {self.address}: try again when it is back"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReasonCode] = loop.create_future()
        self._answers[packet_id] = (future, loop.time() + ANSWER_MS_MAX / 1000)
        return await future

    def _on_answer(self, packet_id: int, codes: list[ReasonCode]) -> None:
        future, _ = self._answers.pop(packet_id, (None, 0.0))
        if future is not None and not future.done():
            future.set_result(codes[0])

    async def _connect(self) -> None:
        """One attempt, from the socket to what the user does first. Raises UStatusError, whatever happens; then nothing
        is left open."""
        try:
            await self._try_to_connect()
        except BaseException as error:
            self._client.drop()
            if isinstance(error, UStatusError) or not isinstance(error, Exception):
                raise
            if not isinstance(error, (OSError, ValueError)):
                log.exception("connecting to the broker failed, and nobody foresaw how", broker=self.address)
            raise reasons.unreachable(self.address, error) from error

    async def _try_to_connect(self) -> None:
        config, client = self._config, self._client
        loop = asyncio.get_running_loop()
        if config.tls is not None and self._context is None:
            self._context = await asyncio.to_thread(_tls_context, config)
        if config.username is not None:
            client.username_pw_set(config.username, await asyncio.to_thread(_password, config))
        self._lost.clear()
        sock = await self._dialler.dial(self._context, config.connect_timeout_ms / 1000)
        self._welcome = loop.create_future()
        self._welcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # attach may fail first
        client.attach(loop, sock, self._say_connect)
        async with asyncio.timeout(config.connect_timeout_ms / 1000):
            welcome = await self._welcome
        if welcome.reason.value >= reasons.FAILURE_MIN:
            raise reasons.refused("the login", welcome.reason, welcome.properties)
        await self._user.up(welcome)

    def _say_connect(self) -> None:
        config = self._config
        if self._dialled:
            self._client.reconnect()
            return
        self._dialled = True
        properties = _properties(
            PacketTypes.CONNECT,
            SessionExpiryInterval=config.session_expiry_s,
            ReceiveMaximum=config.receive_maximum,
            # what is larger the broker throws away, and counts it for nobody
            MaximumPacketSize=self._client.packet_bytes_max,
        )
        clean_start = MQTT_CLEAN_START_FIRST_ONLY if config.clean_start else False
        self._client.connect(
            config.host, config.port, config.keep_alive_s, clean_start=clean_start, properties=properties
        )

    async def _stay_connected(self) -> None:
        attempt = 0
        while True:
            await self._lost.wait()
            # that one comes again with the session: the waits grow, too
            if not isinstance(self._client.failure, PacketTooLarge):
                attempt = 0
            while self._lost.is_set():
                attempt += 1
                await asyncio.sleep(reconnect_wait_ms(attempt, self._chance()) / 1000)
                try:
                    await self._connect()
                except UStatusError as error:
                    self._lost.set()
                    log.warning(
                        "no connection to the broker yet", broker=self.address, attempt=attempt, error=str(error)
                    )
                except Exception:
                    self._lost.set()
                    log.exception("connecting to the broker failed", broker=self.address, attempt=attempt)

    async def _tick(self) -> None:
        """Keep-alive, and answers that don't come."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            self._client.keep_alive()
            now = loop.time()
            if any(due < now for _, due in self._answers.values()):
                log.error("the broker does not answer: dropping the connection", broker=self.address)
                self._client.drop()
            self._user.tick(now)

    def _on_connect(
        self, _client: Any, _data: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        welcome = Welcome(reason, flags.session_present, properties)
        if self._welcome is None or self._welcome.done():  # nobody waits any longer
            return
        if reason.value < reasons.FAILURE_MIN:
            self.up = True
            self._user.welcomed(welcome)  # here and now: the next packet may be a message already
        self._welcome.set_result(welcome)

    def _on_disconnect(
        self, _client: Any, _data: Any, flags: DisconnectFlags, reason: ReasonCode, _properties: Any
    ) -> None:
        failure = self._client.failure
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(
                failure if isinstance(failure, OSError) else ConnectionResetError("it hung up before it answered")
            )
        why = f"it said: {reason}" if flags.is_disconnect_packet_from_server else str(failure or reason)
        if self.up:
            log.warning("the connection to the broker is lost", broker=self.address, reason=why)
        self._go_down(f"the connection to the broker at {self.address} is lost ({why}): try again when it is back")

    def _go_down(self, why: str) -> None:
        self.up = False
        answers, self._answers = self._answers, {}
        for answer, _ in answers.values():
            if not answer.done():
                answer.set_exception(UStatusError(UCode.UNAVAILABLE, why))
        self._lost.set()
        self._user.down(why)


def _properties(packet_type: int, **values: int) -> Properties:
    made = Properties(packet_type)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _password(config: Mqtt5Config) -> str | None:
    if config.password_file is None:
        return config.password.get_secret_value() if config.password is not None else None
    try:
        return config.password_file.read_text().splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise UStatusError(
            UCode.FAILED_PRECONDITION, f"password_file {config.password_file} can't be read: {error}"
        ) from None


def _tls_context(config: Mqtt5Config) -> ssl.SSLContext:
    tls = config.tls
    assert tls is not None, "there is no TLS without settings for it"
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (tls.ca_file, tls.cert_file, tls.key_file) if file is not None)
        raise UStatusError(UCode.FAILED_PRECONDITION, f"the TLS files {files} can't be used: {error}") from None
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


__all__ = ["Link", "LinkUser", "Welcome", "reconnect_wait_ms"]
