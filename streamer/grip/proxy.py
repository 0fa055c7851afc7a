"""Proxies requests to backends, and holds those open whose answer says so (`Grip-Hold`).

request -> longest prefix -> backend -> answer without Grip headers: to the client as it comes
                                     '-> Grip-Hold: held.py           away: 502, slow: 504

Grip headers pass in neither direction: clients can't forge them, and do not see those of backends.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from streamer.config.edge import HttpSection, ProxySection
from streamer.grip.asking import SharedLinks, check_hold
from streamer.grip.channels import Channels
from streamer.grip.headers import Instruction, grip_last
from streamer.grip.held import RESPONSE_TIMEOUT_S, HeldRequest, HeldStream
from streamer.grip.items import ResponseFormat
from streamer.grip.link import Links, Sign, place_of, reason_of, resolved
from streamer.http.lines import SeldomLog, break_off
from streamer.http.places import Places
from streamer.reporting import Condition, Reporter, Sample, each
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError, invalid

HELD_BODY_BYTES_MAX: Final = 1 << 20  # the first answer of a held request is kept until its end
LINK_PAUSES_MS: Final = (1_000, 30_000)  # between requests to a link that fails: the first, and the longest
ASKS_AGAIN_MAX: Final = 5  # of a backend again for one held request, whose items are missing
HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "expect"),
    }
)
FORWARDED: Final = ("X-Forwarded-Proto", "X-Forwarded-Host")
BODYLESS: Final = (204, 205, 304)
# parts of a path that some backend reads as . or ..: also behind %2F or \\, and before the parameters of a part
_DOTS: Final = re.compile(r"[/\\]\.{1,2}([/\\;]|$)")
_CONTROLS: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
REFUSED_METHODS: Final = ("CONNECT", "TRACE")  # the answer to TRACE has what only the backend may see, such as Grip-Sig

log = structlog.get_logger()


class _EndError(Exception):
    """The answer to a client ends before it is complete: its connection is cut. `reason`: the name of a count; "" if
    the client has gone."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Proxy(Reporter):
    """Handles the requests to all `sections`. `sign` returns the value of Grip-Sig."""

    def __init__(
        self,
        sections: Sequence[ProxySection],
        http: HttpSection,
        channels: Channels,
        links: Links,
        clients: Places,
        sign: Sign | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """`backoff`: between requests to a link that fails, and to a backend that is asked again."""
        self._sections = sorted(sections, key=lambda section: -len(section.prefix))
        self._http, self._channels, self._clients, self._sign = http, channels, clients, sign
        self._backoff = backoff or Backoff(*LINK_PAUSES_MS, random.Random())
        self._links = SharedLinks(links, channels, self._backoff)
        self._session: aiohttp.ClientSession | None = None
        self._log = SeldomLog()
        self._answers: Counter[str] = Counter()  # by outcome
        self._cuts: Counter[str] = Counter()  # by reason

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        section = next((one for one in self._sections if path.startswith(one.prefix)), None)
        if section is None:
            prefixes = ", ".join(one.prefix for one in self._sections)
            return web.Response(status=404, text=f"unknown path; known: /stream, and what begins with {prefixes}\n")
        if request.method in REFUSED_METHODS:
            raise web.HTTPMethodNotAllowed(request.method, (), text=f"{request.method} does not pass\n")
        if _DOTS.search(unquote(path)):  # the backend would see another path than the prefix allows
            return web.Response(status=400, text="expected a path without . and .. in it\n")
        if _is_websocket(request.headers):
            self._answers["websocket"] += 1
            text = "expected a plain request, got a WebSocket handshake, which the edge does not pass on\n"
            return web.Response(status=501, text=text)
        sent = self._links.tick()
        return await self._answer(request, section, await self._forward(request, section), sent)

    # To the backend

    async def _forward(
        self, request: web.Request, section: ProxySection, last_ids: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Returns the backend's answer as soon as its headers are there. Raises 502 and 504."""
        url = URL(section.backend + request.rel_url.raw_path_qs, encoded=True)
        headers = await self._request_headers(request, last_ids or {})
        body = request.content if request.body_exists else None
        try:
            async with asyncio.timeout(section.timeout_s):
                return await self._opened().request(
                    request.method, url, headers=headers, data=body, allow_redirects=False
                )
        except TimeoutError:
            why = f"it has not answered within {section.timeout_s:g} s"
            raise self._refusal("slow", section, web.HTTPGatewayTimeout, why) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = f"it can't be reached, or its answer can't be read: {reason_of(error)}"
            raise self._refusal("unreachable", section, web.HTTPBadGateway, why) from None

    def _refusal(
        self, outcome: str, section: ProxySection, status: type[web.HTTPServerError], why: str
    ) -> web.HTTPException:
        self._answers[outcome] += 1
        if self._log.is_due((section.prefix, outcome)):
            log.warning("a backend has not answered as it should", backend=section.backend, why=why)
        return status(text=f"the backend is {outcome}\n" if outcome != "malformed" else "the answer is malformed\n")

    async def _request_headers(self, request: web.Request, last_ids: Mapping[str, str]) -> CIMultiDict[str]:
        headers = _passed(request.headers)
        hops = [*request.headers.getall("X-Forwarded-For", ()), *([request.remote] if request.remote else [])]
        if hops:
            headers["X-Forwarded-For"] = ", ".join(hops)
        for name, value in zip(FORWARDED, (request.scheme, request.headers.get("Host", "")), strict=True):
            if value and not (self._http.unprotected and name in headers):  # a proxy in front of the edge knows better
                headers[name] = value
        for value in grip_last(last_ids):
            headers.add("Grip-Last", value)
        if self._sign is not None and (signature := await self._sign()) is not None:
            headers["Grip-Sig"] = signature
        return headers

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._http.clients_max),
                cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    # To the client

    async def _answer(
        self, request: web.Request, section: ProxySection, backend: aiohttp.ClientResponse, sent: int
    ) -> web.StreamResponse:
        """`sent`: when the backend was asked, by the count of the links."""
        try:
            if any(_CONTROLS.search(one) for one in (backend.reason or "", *backend.headers.values())):
                why = "expected headers of visible characters, got a control character"
                raise self._refusal("malformed", section, web.HTTPBadGateway, why)
            said = self._instruction(request, section, backend)
            if said is not None and self._clients.are_full:
                self._clients.turned_away("clients", "too many requests are held (http.clients_max)")
                return web.Response(status=503, text="too many requests are held\n", headers={"Retry-After": "5"})
            if said is not None and said.hold == "response":
                return await self._hold_request(request, section, backend, said, sent)
            return await self._stream(request, section, backend, said)
        finally:
            backend.close()

    def _instruction(
        self, request: web.Request, section: ProxySection, backend: aiohttp.ClientResponse
    ) -> Instruction | None:
        """Returns None for an answer that goes to the client as it is. Raises 502."""
        if request.method == "HEAD" or not {"Grip-Hold", "Grip-Link"} & backend.headers.keys():
            return None
        try:
            said = Instruction.of(backend.headers.items())
            if said.hold is None and said.link is None:
                return None
            if said.hold is not None:
                check_hold(said, self._channels)
            if said.link is not None:
                resolved(str(backend.url), said.link.url)
            if "Content-Encoding" in backend.headers:
                raise invalid("Content-Encoding: expected none in an answer that is held, since items follow")
            if (said.status or backend.status) in BODYLESS:
                raise invalid("Grip-Hold: expected a status that has a body; name one in Grip-Status")
        except UStatusError as error:
            raise self._refusal("malformed", section, web.HTTPBadGateway, error.message) from None
        return said

    async def _stream(
        self, request: web.Request, section: ProxySection, backend: aiohttp.ClientResponse, said: Instruction | None
    ) -> web.StreamResponse:
        response = _begun(backend, said)
        self._answers["passed" if said is None else "held"] += 1
        try:
            await response.prepare(request)
            await self._relay(section, backend, response)
            if said is not None:
                backend.release()
                await self._hold_stream(request, backend, said, response)
        except (_EndError, ConnectionError) as error:  # the latter: the client has gone
            if isinstance(error, _EndError) and error.reason:
                self._cuts[error.reason] += 1
            break_off(request)
        except asyncio.CancelledError:  # the edge stops
            break_off(request)
            raise
        return response

    async def _relay(
        self, section: ProxySection, backend: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        """Writes the body of the backend's answer as it comes."""
        try:
            async for part in backend.content.iter_any():
                await self._put(response, part)
        except (aiohttp.ClientError, OSError) as error:
            if self._log.is_due((section.prefix, "broken off")):
                log.warning("a backend has broken off its answer", backend=section.backend, why=reason_of(error))
            raise _EndError("backend") from None

    async def _put(self, response: web.StreamResponse, content: bytes) -> None:
        try:
            async with asyncio.timeout(self._http.send_s):
                await response.write(content)
        except TimeoutError:
            raise _EndError("slow client") from None
        except ConnectionError:
            raise _EndError("") from None

    async def _hold_stream(
        self, request: web.Request, backend: aiohttp.ClientResponse, said: Instruction, response: web.StreamResponse
    ) -> None:
        async def write(content: bytes) -> None:
            self._clients.events["held_stream"] += 1
            await self._put(response, content)

        url = str(backend.url)
        with self._clients.taken("held_stream"):
            try:
                await HeldStream(self._channels, self._links, write, url, request.headers.get("Host", "")).run(said)
            except UStatusError as error:
                if self._log.is_due("cut off"):
                    place = place_of(url)
                    log.warning("a held stream was cut off: it can't be recovered", url=place, why=error.message)
                raise _EndError("unrecoverable") from None

    async def _hold_request(
        self, request: web.Request, section: ProxySection, backend: aiohttp.ClientResponse, said: Instruction, sent: int
    ) -> web.StreamResponse:
        loop, backoff, asks = asyncio.get_running_loop(), self._backoff.sibling(), 0
        until = loop.time() + (RESPONSE_TIMEOUT_S if said.timeout_s is None else said.timeout_s)
        try:
            with self._clients.taken("held_response"), HeldRequest(self._channels, self._links.tick) as held:
                while True:
                    body = await self._body(section, backend)
                    held.hold(said, sent)
                    found = await held.wait(until)
                    if found is not None or not held.must_ask or asks == ASKS_AGAIN_MAX or request.body_exists:
                        self._answers["held"] += 1
                        return _settled(backend, said, body, found)
                    asks += 1
                    await backoff.wait(at_most_ms=int(max(0, until - loop.time()) * 1000))
                    backend.close()
                    sent = self._links.tick()
                    backend = await self._forward(request, section, held.last_ids)
                    again = self._instruction(request, section, backend)
                    if again is None or again.hold != "response":
                        return await self._stream(request, section, backend, again)
                    said = again
        finally:
            backend.close()

    async def _body(self, section: ProxySection, backend: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(section.timeout_s):
                async for part in backend.content.iter_any():
                    body += part
                    if len(body) > HELD_BODY_BYTES_MAX:
                        why = f"Grip-Hold: expected an answer of {HELD_BODY_BYTES_MAX} bytes at most, got more"
                        raise self._refusal("malformed", section, web.HTTPBadGateway, why)
        except TimeoutError:
            raise self._refusal("slow", section, web.HTTPGatewayTimeout, "its answer does not end") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._refusal(
                "unreachable", section, web.HTTPBadGateway, f"it has broken off: {reason_of(error)}"
            ) from None
        return bytes(body)

    # Reports

    def conditions(self) -> Iterator[Condition]:
        return self._links.conditions()

    def samples(self) -> Iterator[Sample]:
        yield from each("grip_answers", (), self._answers)
        yield from each("grip_cuts", (), self._cuts)
        yield from each("grip_recoveries", (), self._links.asked)

    async def close(self) -> None:
        await self._links.close()
        if self._session is not None:
            await self._session.close()


def _is_websocket(headers: CIMultiDictProxy[str]) -> bool:
    connection = ",".join(headers.getall("Connection", ())).lower()
    return "upgrade" in connection and headers.get("Upgrade", "").lower() == "websocket"


def _passed(headers: CIMultiDictProxy[str], *others: str) -> CIMultiDict[str]:
    """Returns the headers that pass a proxy: not those of one connection, of GRIP, and `others` (lower case)."""
    named = {one.strip().lower() for value in headers.getall("Connection", ()) for one in value.split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        low = name.lower()
        if low not in HOP_BY_HOP and low not in named and low not in others and not low.startswith("grip-"):
            kept.add(name, value)
    return kept


def _begun(backend: aiohttp.ClientResponse, said: Instruction | None) -> web.StreamResponse:
    if said is None:
        return web.StreamResponse(status=backend.status, reason=backend.reason, headers=_passed(backend.headers))
    status, reason = _status(backend, said)
    return web.StreamResponse(status=status, reason=reason, headers=_passed(backend.headers, "content-length"))


def _status(backend: aiohttp.ClientResponse, said: Instruction) -> tuple[int, str | None]:
    return (backend.status, backend.reason) if said.status is None else (said.status, said.reason or None)


def _settled(
    backend: aiohttp.ClientResponse, said: Instruction, body: bytes, found: ResponseFormat | None
) -> web.StreamResponse:
    """Returns the answer of a held request: the response that was published, with the headers of the backend's answer
    where it names no others; else the backend's answer itself."""
    headers = _passed(backend.headers, "content-length")
    if found is None:
        status, reason = _status(backend, said)
        return web.Response(status=status, reason=reason, headers=headers, body=body)
    published: CIMultiDict[str] = CIMultiDict(found.headers)
    for name in published:
        headers.popall(name, None)
    headers.extend(_passed(CIMultiDictProxy(published), "content-length"))
    return web.Response(status=found.code, reason=found.reason or None, headers=headers, body=found.body)
