"""up-streamer check --connect: what the networks of a configuration say, before or while a streamer runs.

Config -> for each endpoint, all at once: its certificates, and UTransport.probe(what the streamer needs there)
       -> the clock, the ports of the admin page and the HTTP edge, the backends of [[proxy]] and [[recovery]]
       -> a line each: STATUS WHERE: what                             STATUS: ok, FAIL, or ?, which can't be known

The running streamer of this data_dir, if there is one, is asked for the state of its endpoints (control.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from storage.disk import REAL_DISK, InUseError
from streamer import building
from streamer.commands import terminal
from streamer.config import Config, EndpointSection, patterns
from streamer.data_dir import LOG_LOCK, PAUSES_FILE
from streamer.operating import control
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import HostedTransport
from streamer.walk.networks import EndpointFilter, EndpointFilters
from streamer.walk.paused import Paused
from streamer.walk.view import View
from transports import certificates
from transports.base import port_result
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.status import UStatusError
from uprotocol.transport import ProbeRequest, ProbeResult, ProbeVerdict, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription_client.interest import Interest

PROBED_MAX: Final = 32  # filters, and addresses to send to, of one endpoint
SOMEBODY: Final = "up-streamer-check"  # stands for the authorities that only a pattern names
CLOCK_OFF_S: Final = 1.0  # by more than this a clock is reported as wrong
ADJTIMEX_ERROR: Final = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronised
CheckLine = tuple[str, ProbeResult]  # where, and what


def check_connections(
    config: Config, made: Mapping[str, UTransport], *, take_over: bool, timeout_s: float, as_json: bool
) -> bool:
    """Print the lines. Returns True if none says FAIL."""
    return terminal.finish(_print_lines(_Checks(config, made, take_over, timeout_s), as_json))


async def _print_lines(checks: _Checks, as_json: bool) -> bool:
    is_good = True
    async for where, (verdict, what) in checks.lines():
        is_good = is_good and verdict is not ProbeVerdict.FAIL
        line = f"{verdict} {where}: {'cannot be known: ' if verdict is ProbeVerdict.UNKNOWN else ''}{what}"
        terminal.tell(as_json, {"status": verdict, "where": where, "what": what}, line)
    return is_good


class _Checks:
    """All checks of one configuration. `made`: the closed transport of each endpoint."""

    def __init__(self, config: Config, made: Mapping[str, UTransport], take_over: bool, timeout_s: float) -> None:
        self._config, self._take_over, self._timeout_s = config, take_over, timeout_s
        self._endpoints = building.endpoints_of(config, dict(made))
        self._needs = Needs(config, self._endpoints)
        self._lines: asyncio.Queue[CheckLine | None] = asyncio.Queue()

    async def lines(self) -> AsyncIterator[CheckLine]:
        running = await asyncio.to_thread(_running, self._config)
        work = [self._check(section, running) for section in self._config.endpoint]
        work.append(self._check_this_machine(running is not None))
        task = asyncio.ensure_future(asyncio.gather(*work))
        task.add_done_callback(lambda _: self._lines.put_nowait(None))
        try:
            while (line := await self._lines.get()) is not None:
                yield line
            await task
        finally:
            task.cancel()

    def _say(self, where: str, verdict: ProbeVerdict, what: str) -> None:
        self._lines.put_nowait((where, ProbeResult(verdict, what)))

    async def _check(self, section: EndpointSection, running: Mapping[str, Any] | None) -> None:
        endpoint, name = self._endpoints[section.name], section.name
        state = (running or {}).get(name, {})
        if state.get("state", "ready") != "ready":
            self._say(name, ProbeVerdict.FAIL, f"the running streamer says {state['state']}: {state.get('reason', '')}")
        for file in building.certificates_of_endpoint(section):
            with contextlib.suppress(UStatusError):  # `check` has reported it
                ends = datetime.fromtimestamp(await asyncio.to_thread(certificates.expires_s, file), UTC)
                self._say(name, ProbeVerdict.OK, f"{file.setting} {file.path} is valid until {ends:%Y-%m-%d}")
        asked = ProbeRequest(
            self._needs.filters(endpoint)[:PROBED_MAX],
            self._needs.sends(endpoint)[:PROBED_MAX],
            is_running=running is not None,
            is_connected=state.get("connected"),
            has_received=bool(state.get("received")),
            take_over=self._take_over,
        )
        try:
            async with asyncio.timeout(self._timeout_s), contextlib.aclosing(endpoint.transport.probe(asked)) as found:
                async for verdict, what in found:
                    self._say(name, verdict, what)
        except TimeoutError:
            self._say(name, ProbeVerdict.FAIL, f"no complete answer within {self._timeout_s:g} s (--timeout)")
        except Exception as error:  # of a plugin
            self._say(name, ProbeVerdict.FAIL, f"the check of transport {section.transport!r} failed: {error!r}")

    # This machine

    async def _check_this_machine(self, is_running: bool) -> None:
        self._say("clock", *clock())
        config = self._config
        for where, address in (
            ("streamer.admin", config.streamer.admin),
            ("http.listen", config.http.listen),
            ("grip.publish", config.grip.publish),
        ):
            if address is not None:
                self._say(where, *await port_result(address, is_running))
        urls = {f"proxy {one.prefix}": one.backend for one in config.proxy}
        urls |= {
            f"recovery {one.topics[0]}": str(one.settings["url"]) for one in config.recovery if "url" in one.settings
        }
        await asyncio.gather(*(self._check_backend(where, url) for where, url in urls.items()))

    async def _check_backend(self, where: str, url: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await _status_of(url)
        except (OSError, ValueError) as error:
            self._say(where, ProbeVerdict.FAIL, f"{url} is not reached ({error or 'it does not answer in time'})")
            return
        is_good = status < 500  # it is there: it may refuse this path, or want a token
        self._say(where, ProbeVerdict.OK if is_good else ProbeVerdict.FAIL, f"{url} answers HTTP {status}")


# What a streamer needs of its networks


class _Deaf:
    def on_receive(self, message: UMessage) -> None:
        """Nothing arrives."""


class Needs:
    """The filters that a streamer would register, and addresses that it would send to, from its configuration alone."""

    def __init__(self, config: Config, endpoints: Endpoints) -> None:
        self._endpoints, authority = endpoints, config.authority
        paused = Paused(config.streamer.data_dir / PAUSES_FILE, endpoints, authority)
        self._view = View(endpoints, building.rules_of(config), Interest([]), (), paused)
        home, entities = endpoints[config.home.name], building.entities_of(config)
        self._hosted = HostedTransport(home, endpoints, authority, config.answers_for, entities)
        self._record = patterns(config.history.record)

    def filters(self, endpoint: Endpoint) -> list[EndpointFilter]:
        """Without those of single topics, which depend on who subscribes."""
        made = EndpointFilters(endpoint, self._view, self._hosted, self._record, _Deaf())
        found = made.make_fixed(all_publishes=False).values()
        return [endpoint.names.filter(*one) if endpoint.names is not None else one for one in found]

    def sends(self, endpoint: Endpoint) -> list[EndpointFilter]:
        """Source and sink: from each authority elsewhere to each authority there. One topic stands for all."""
        sinks = [_named(one) for one in sorted(endpoint.authorities)] if endpoint.needs_sink else [None]
        own = self._hosted.authority
        sources = {own} if self._endpoints.owner(own) is not endpoint else set()
        for rule in self._view.rules:
            if rule.egress == endpoint.name:
                sources |= {_named(one) for one in self._endpoints[rule.ingress].authorities}
        found: list[EndpointFilter] = [
            (ids.at(source, ids.DEAD_LETTERS), None if sink is None else attrs.streamer_sink(sink))
            for source in sorted(sources)
            for sink in sinks
        ]
        return [endpoint.names.filter(*one) if endpoint.names is not None else one for one in found]


def _named(authority: str) -> str:
    """An authority that fits the pattern."""
    if authority == uris.WILDCARD_AUTHORITY:
        return SOMEBODY
    return SOMEBODY + authority[1:] if uris.is_family(authority) else authority


# The running streamer, and this machine


def _running(config: Config) -> dict[str, Any] | None:
    """The state of each endpoint of the streamer that runs with this data_dir, as in its `status`; empty if it does not
    say; None if none runs. Blocks."""
    folder = config.streamer.data_dir
    if not folder.is_dir():
        return None
    with contextlib.suppress(UStatusError, InUseError, OSError):
        if (found := control.call(folder, "status")) is not None:
            return {one["name"]: one for one in found["endpoints"]}
        if (folder / LOG_LOCK).exists():
            REAL_DISK.lock(folder / LOG_LOCK).release()
        return None
    return {}


class _Timex(ctypes.Structure):
    """The beginning of struct timex (adjtimex(2)), and space for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("esterror", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> ProbeResult:
    """Whether the kernel considers this machine's clock synchronised. MQTT and DDS say no time that it could be
    compared with."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))  # modes 0: only reads
    except (OSError, AttributeError):  # not Linux
        return ProbeResult(ProbeVerdict.UNKNOWN, "whether it is right: this system does not say")
    error_s = timex.maxerror / 1e6
    if state < 0 or state == ADJTIMEX_ERROR or error_s > CLOCK_OFF_S:
        now = f"{datetime.fromtimestamp(time.time(), UTC):%Y-%m-%d %H:%M:%S} UTC"
        return ProbeResult(
            ProbeVerdict.UNKNOWN, f"whether it is right: nothing synchronises it (NTP), and it says {now}"
        )
    return ProbeResult(ProbeVerdict.OK, f"synchronised, at most {error_s:.2g} s off, as the kernel says")


async def _status_of(url: str) -> int:
    """The status of a HEAD request, redirects not followed. Raises OSError, and ValueError if that is not HTTP."""
    to = urlsplit(url)
    context = ssl.create_default_context() if to.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        to.hostname, to.port or (80 if context is None else 443), ssl=context
    )
    try:
        writer.write(f"HEAD {to.path or '/'} HTTP/1.1\r\nHost: {to.netloc}\r\nConnection: close\r\n\r\n".encode())
        version, status = (await reader.readline()).split()[:2]
    finally:
        writer.close()
    if not version.startswith(b"HTTP/"):
        raise ValueError("it does not speak HTTP")
    return int(status)
