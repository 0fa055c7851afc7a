"""The connection to the server and its JetStream. Translates the errors of the library.

connect -> stream exists -> changed(True) -- lost -> changed(False) -- the library tries without end -> changed(True)
publish -> PubAck: OK      -> full: wait, so that slow listeners slow the sender down
                           -> lost meanwhile: UNAVAILABLE, at once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from nats.aio.client import Client
from nats.errors import UnexpectedEOF
from nats.js import api
from nats.js.errors import NotFoundError, ServiceUnavailableError

from up_transport_nats.config import NatsConfig
from uprotocol.status import OK, UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

REQUEST_S: Final = 5.0  # for an answer of the server
RECONNECT_S: Final = 0.5  # between attempts to connect again
FULL_EVERY_S: Final = 0.1  # between attempts to publish into a full stream
# a server that refuses us sends the reason and resets the connection, and the reset may arrive first
TRIES_IF_RESET: Final = 8
RESETS: Final = (ConnectionResetError, BrokenPipeError, UnexpectedEOF)
LEAVE_S_MAX: Final = 2.0  # to flush the buffers of the library, when it is closed

AWAY: Final = UStatus(code=UCode.UNAVAILABLE, message="the NATS server is away: try again when the connection is back")

T = TypeVar("T")


def translate(error: BaseException, doing: str) -> UStatusError:
    """The UStatusError for an exception of the library or the system. Some differ only in their text."""
    if isinstance(error, UStatusError):
        return error
    text = " ".join(f"{doing}: {error or type(error).__name__}".split())
    lower = text.lower()
    if "permissions violation" in lower:
        return UStatusError(UCode.PERMISSION_DENIED, f"{text}; allow it in the server's permissions")
    if "authorization" in lower or "authentication" in lower:
        return UStatusError(UCode.UNAUTHENTICATED, f"{text}: are user, password or token right?")
    if isinstance(error, (ValueError, TypeError)):  # UnicodeError of a host name is a ValueError
        return invalid(f"{text}: is the setting right?")
    return UStatusError(UCode.UNAVAILABLE, text)


class Link:
    """The connection of one endpoint. `changed(up)` is called once for each change of `is_up()`, after it."""

    def __init__(self, config: NatsConfig, name: str, changed: Callable[[bool], None]) -> None:
        self._config, self._name, self._changed = config, name, changed
        self._client: Client | None = None
        self._up = False
        self._down = asyncio.Event()  # the opposite, to be awaited
        self._refusal = ""  # last permissions violation: the server reports it instead of an answer
        self._refused: dict[str, asyncio.Future[str]] = {}  # by subject, for the publish that is under way there
        self.full = ""  # why the stream accepts nothing now

    def is_up(self) -> bool:
        return self._up

    @property
    def max_payload(self) -> int:
        assert self._client is not None, "only an open link has sizes"
        return int(self._client.max_payload)

    async def open(self) -> None:
        client = Client()
        try:
            await self._connect(client)
            self.js = client.jetstream(timeout=REQUEST_S)
            await self.ensure_stream()
        except BaseException as error:
            with contextlib.suppress(Exception):
                await client.close()
            if not isinstance(error, Exception):
                raise  # a cancellation
            raise translate(error, f"connecting to {', '.join(self._config.servers)}") from None
        self._client = client
        self._set_up(client.is_connected)

    async def _connect(self, client: Client) -> None:
        """The library tries without limit. Give up when each server has been tried once."""
        config, given_up = self._config, asyncio.Event()
        failures: list[Exception] = []

        async def on_error(error: Exception) -> None:
            if "permissions violation" in str(error).lower():
                self._refusal = str(error)
                for subject, refused in self._refused.items():
                    if f'"{subject.lower()}"' in self._refusal.lower() and not refused.done():
                        refused.set_result(self._refusal)
            if self._client is None:
                failures.append(error)
                tries = TRIES_IF_RESET if isinstance(error, RESETS) else 1
                if len(failures) >= tries * len(config.servers):
                    given_up.set()

        async def on_lost() -> None:
            self._set_up(False)

        async def on_back() -> None:
            self._set_up(self._client is not None)

        connecting = asyncio.ensure_future(
            client.connect(
                list(config.servers),
                error_cb=on_error,
                disconnected_cb=on_lost,
                reconnected_cb=on_back,
                name=self._name,
                connect_timeout=config.connect_timeout_s,  # type: ignore[arg-type]  # seconds, of which it says int
                reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                ping_interval=config.ping_s,  # type: ignore[arg-type]
                max_outstanding_pings=1,
                tls=await asyncio.to_thread(config.tls.context) if config.tls else None,
                **config.login(),
            )
        )
        giving_up = asyncio.ensure_future(given_up.wait())
        try:
            done, _ = await asyncio.wait(
                {connecting, giving_up}, timeout=config.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if connecting not in done:
                # prefer an error with a reason to a reset
                explained = [error for error in failures if not isinstance(error, RESETS)]
                raise (
                    (explained or failures)[-1]
                    if failures
                    else TimeoutError(f"no answer within {config.connect_timeout_s} s")
                )
            await connecting
        finally:
            connecting.cancel()
            giving_up.cancel()
            await asyncio.gather(connecting, giving_up, return_exceptions=True)

    def _set_up(self, up: bool) -> None:
        if up == self._up:
            return
        self._up = up
        (self._down.clear if up else self._down.set)()
        self._changed(up)

    async def close(self) -> None:
        """May be called at any time, and more than once."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                if client.is_connected:
                    await client.flush(timeout=LEAVE_S_MAX)  # type: ignore[arg-type]
            self._set_up(False)
            with contextlib.suppress(Exception):
                await client.close()

    async def ensure_stream(self) -> None:
        """Make the stream unless it exists. Two ends may do so at once: it is the same stream. An existing one keeps
        the configuration of its operator."""
        name, config = self._config.network, self._config
        try:
            await self.js.stream_info(name)
        except NotFoundError:
            await self.js.add_stream(
                name=name,
                subjects=[f"{name}.>"],
                # a packet is kept until every consumer that wants it has acknowledged it
                retention=api.RetentionPolicy.INTEREST,
                discard=api.DiscardPolicy.NEW,  # full: refuse new messages, so that senders notice
                storage=api.StorageType.MEMORY if config.stream_in_memory else api.StorageType.FILE,
                max_bytes=config.stream_mib_max << 20,
                max_age=config.stream_age_s_max,
            )
        except ServiceUnavailableError as error:
            raise UStatusError(
                UCode.UNAVAILABLE, f"the server has no JetStream now ({error}): start it with -js"
            ) from None

    async def request(self, doing: str, work: Awaitable[T]) -> T:
        """Await `work` and translate its errors, except NotFoundError, which is an answer."""
        self._refusal = ""
        try:
            return await work
        except NotFoundError:
            raise
        except Exception as error:
            if self._refusal:
                raise translate(Exception(self._refusal), doing) from None
            raise translate(error, doing) from None

    async def publish(self, subject: str, data: bytes) -> UStatus:
        """OK when the stream has it."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._config.full_wait_s
        while self._up:
            publishing = asyncio.ensure_future(self.js.publish(subject, data, timeout=REQUEST_S))
            lost = asyncio.ensure_future(self._down.wait())
            refused = self._refused[subject] = loop.create_future()
            try:
                await asyncio.wait({publishing, lost, refused}, return_when=asyncio.FIRST_COMPLETED)
                if refused.done():
                    return translate(Exception(refused.result()), "publishing").status
                if not publishing.done():
                    return UStatus(
                        code=UCode.UNAVAILABLE, message="the NATS server went away before it answered: send it again"
                    )
                error = publishing.exception()
            finally:
                del self._refused[subject]
                publishing.cancel()
                lost.cancel()
            if error is None:
                self.full = ""
                return OK
            if not isinstance(error, ServiceUnavailableError):
                return translate(error, "publishing").status
            self.full = f"the stream {self._config.network!r} is full ({error}): is an end too slow or missing?"
            if loop.time() >= give_up_at:
                return UStatus(code=UCode.UNAVAILABLE, message=self.full)
            await asyncio.sleep(FULL_EVERY_S)
        return AWAY
