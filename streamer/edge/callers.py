"""Who asks at the HTTP edge: the uEntity of a token, and which pages of a browser may ask.

request -> Host: only without tokens (DNS rebinding) -> Origin: the same, or listed -> token -> uEntity
a page's JavaScript reads the answer if CORS allows its origin: the same list
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from streamer.config.edge import HttpSection
from streamer.edge.tokens import Tokens, digest_of, read_file
from streamer.http.hosts import host_of, is_known_host
from streamer.http.lines import Latest, bearer_of, latest
from streamer.reporting import Condition, Reporter
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

COOKIE: Final = "up_token"
CLIENT: Final = 0x8000  # the uEntity of clients where nothing else is configured
TOKENS_LOOK_S: Final = 1.0  # between looks at the file of tokens
PAGE_HEADERS: Final = ("Authorization", "Cache-Control", "Last-Event-ID")
PREFLIGHT_S: Final = 600  # for so long a browser need not ask again whether it may


# Hosts and origins


class Callers(Reporter):
    """Decides who may ask, as `section` says. `authority`: our own. `refused` counts by reason."""

    def __init__(self, section: HttpSection, authority: str, refused: Counter[str] | None = None) -> None:
        assert section.listen is not None
        self._section = section
        self._hosts = [section.listen.rpartition(":")[0], *section.hosts]
        self._everybody = uris.parse(section.client or f"//{authority}/{CLIENT:X}/1/0")
        self._refused = Counter[str]() if refused is None else refused
        self._tokens: Latest[Tokens] | None = None

    async def open(self) -> None:
        """Reads the tokens. Raises FAILED_PRECONDITION if they can't be used."""
        path = self._section.tokens_file
        self._tokens = await latest([path], functools.partial(read_file, path or Path()))

    async def run(self, on_change: Callable[[], object]) -> None:
        """Reads the tokens again when their file changes, until cancelled."""
        while self._tokens is not None:
            before = self._tokens.found
            if await self._tokens.get() is not before:
                on_change()
            await asyncio.sleep(TOKENS_LOOK_S)

    def conditions(self) -> Iterator[Condition]:
        if self._tokens is not None and self._tokens.trouble:
            yield Condition(self._tokens.trouble)

    # Hosts and origins

    def check_host(self, request: web.Request) -> None:
        """Raises 403 if this is not for us. With tokens any name will do: a foreign page has none of them."""
        host = host_of(request)
        if self._section.tokens_file is None and not is_known_host(host, self._hosts):
            self._refused["host"] += 1
            raise web.HTTPForbidden(text=f"expected a Host that is named in http.hosts, got {host[:80]!r}\n")

    def cors(self, request: web.Request) -> dict[str, str]:
        """Returns the headers that let the page that asks read the answer."""
        origin = request.headers.get("Origin")
        if origin is None or not self._may_read(request, origin):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": "Retry-After",
        }

    def preflight(self, request: web.Request) -> web.Response:
        """Answers OPTIONS: what a page may send. Raises 403 for pages of other origins."""
        self._check_origin(request)
        # libraries add headers of their own; those that we don't know change nothing
        wanted = re.findall(r"[\w-]+", request.headers.get("Access-Control-Request-Headers", ""), re.ASCII)
        headers = {
            "Access-Control-Allow-Methods": "GET",
            "Access-Control-Allow-Headers": ", ".join(wanted or PAGE_HEADERS),
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers={"Allow": "GET, OPTIONS", **headers})

    def _may_read(self, request: web.Request, origin: str) -> bool:
        if origin.lower() in self._section.origins:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:
            return False
        # behind a proxy with TLS, https is right though this connection has none
        schemes = ("https",) if self._section.cert_file is not None else ("http", "https")
        is_ours = bool(parts.netloc) and parts.netloc == request.headers.get("Host", "").lower()
        return is_ours and parts.scheme in schemes

    def _check_origin(self, request: web.Request) -> None:
        """What a foreign page loads without a script has no Origin, but most browsers tell so."""
        origins = request.headers.getall("Origin", [])
        is_foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        if len(origins) > 1 or any(not self._may_read(request, one) for one in origins) or (is_foreign and not origins):
            self._refused["origin"] += 1
            got = f"got {', '.join(origins)[:80]!r}" if origins else "got a request of another site without Origin"
            raise web.HTTPForbidden(text=f"expected a page of an origin that is listed in http.origins, {got}\n")

    # Tokens

    async def of(self, request: web.Request) -> UUri:
        """Returns the uEntity that asks. Raises web.HTTPException: 400, 401, 403."""
        self.check_host(request)
        self._check_origin(request)
        if self._tokens is None:
            return self._everybody
        caller = self._known(request, self._tokens.found)
        if caller is None:
            self._refused["token"] += 1
            text = f"expected a valid token: 'Authorization: Bearer TOKEN', or the cookie {COOKIE}\n"
            raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": 'Bearer realm="up-streamer"'})
        return caller

    def still_allowed(self, request: web.Request, caller: UUri) -> bool:
        """Returns False once the token with which `caller` asked does not count any more: ask during long streams."""
        return self._tokens is None or self._known(request, self._tokens.found) == caller

    def _known(self, request: web.Request, tokens: Tokens) -> UUri | None:
        shown = bearer_of(request) if "Authorization" in request.headers else request.cookies.get(COOKIE)
        # looked up by its digest: the time that takes says nothing about the tokens
        return tokens.get(digest_of((shown or "").encode(errors="surrogateescape")))
