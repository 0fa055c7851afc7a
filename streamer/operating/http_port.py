"""The HTTP server of the admin port: GET (and HEAD), one request per connection.

connection -> streamer/edge/lines.py: limits, TLS -> aiohttp: parses and routes -> token -> page
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final

import structlog
from aiohttp import web

from streamer.config import AdminSection
from streamer.edge.lines import SERVER, Latest, Limits, Lines, Listener, bearer_of, latest, latest_tls
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# a usual GET has some 500 bytes, and takes milliseconds. One connection too many closes the oldest: idle ones lock
# nobody out
LIMITS: Final = Limits(connections_max=256, head_bytes_max=8_192, head_s=5.0)
CLOSE_S_MAX: Final = 0.5  # for answers in progress; a part of SERVICES_CLOSE_S

TOO_OFTEN: Final = "this was answered a moment ago: ask again in some seconds\n"

PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakePage = Callable[[], tuple[int, str, bytes]]  # status, type of the content, content
List = Callable[[], Iterator[bytes] | None]  # in slices; None if requested too often

log = structlog.get_logger()


class HttpPort:
    """Serves `pages` and `lists` by their paths to clients that `guard` allows."""

    def __init__(self, pages: Mapping[str, MakePage], lists: Mapping[str, List], guard: AdminSection) -> None:
        self._pages, self._lists, self._guard = pages, lists, guard
        self._token: Latest[bytes] | None = None
        self._listener: Listener | None = None

    async def open(self, host: str, port: int) -> int:
        """Returns the port, which the system chooses for 0. Raises as `Admin.open`."""
        guard = self._guard
        self._token = await latest([guard.token_file], functools.partial(_read_token, guard))
        tls = await latest_tls("admin", guard.cert_file, guard.key_file)
        self._listener = self.listener(f"{host}:{port}", Lines(LIMITS, tls))
        return await self._listener.open()

    def listener(self, address: str, lines: Lines) -> Listener:
        application = self._application()
        return Listener("the admin port", address, lines, application, lingering_time=0, shutdown_timeout=CLOSE_S_MAX)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    def _application(self) -> web.Application:
        made = web.Application(middlewares=[self._admit])
        made.on_response_prepare.append(_close_after)
        for path, page in self._pages.items():
            made.router.add_get(path, _telling(page))
        for path, slices in self._lists.items():
            made.router.add_get(path, _listing(slices))
        return made

    @web.middleware
    async def _admit(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        if self._token is not None and not _shows(request, await self._token.get()):
            return web.Response(status=401, text="a token is asked for\n", headers={"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.Response(status=404, text=f"there are {', '.join((*self._pages, *self._lists))}\n")
        except web.HTTPMethodNotAllowed as error:
            return web.Response(status=405, text="GET only\n", headers={"Allow": error.headers["Allow"]})
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            log.exception("a question at the admin port has failed", path=request.path)
            raise


def _telling(page: MakePage) -> PageHandler:
    async def tell(_: web.Request) -> web.StreamResponse:
        status, type, body = page()
        return web.Response(status=status, headers={"Content-Type": type}, body=body)

    return tell


def _listing(slices: List) -> PageHandler:
    async def tell(request: web.Request) -> web.StreamResponse:
        parts = slices()
        if parts is None:
            return web.Response(status=503, text=TOO_OFTEN)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for part in parts if request.method == "GET" else ():
            await response.write(part)
            await asyncio.sleep(0)  # lets other tasks run
        return response

    return tell


async def _close_after(_: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers.update({"Connection": "close", "Server": SERVER})


# Authentication


def _read_token(guard: AdminSection) -> bytes:
    assert guard.token_file is not None
    try:
        token, why = guard.token_file.read_bytes().removeprefix(codecs.BOM_UTF8).strip(), "it is empty"
    except OSError as error:
        token, why = b"", str(error.strerror)
    if not token:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"admin.token_file {guard.token_file} can't be used: {why}")
    return token


def _shows(request: web.Request, token: bytes) -> bool:
    shown = bearer_of(request)
    return shown is not None and hmac.compare_digest(shown.encode(errors="surrogateescape"), token)
