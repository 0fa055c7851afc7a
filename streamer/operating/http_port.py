"""The HTTP server of the admin port: GET (and HEAD), POST of operations, one request per connection.

connection -> streamer/edge/lines.py: limits, TLS -> aiohttp: parses and routes -> token -> page
                                                        |                            '-> operation, if a token is set
                                                        '-> the page for people: files of page/, for everybody

The files hold no data; what they show they ask for with the token. Without a token a page of another site must not read
it through a name that points here (DNS rebinding): the page and /status know only loopback, addresses and our own name.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import hmac
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from streamer.config import AdminSection
from streamer.http.hosts import host_of, is_known_host
from streamer.http.lines import SERVER, Latest, Limits, Lines, Listener, bearer_of, latest, latest_tls
from streamer.http.statuses import STATUSES
from streamer.operation import Operations
from uprotocol.status import UStatusError, code_name, invalid
from uprotocol.v1.ucode_pb2 import UCode

# a usual GET has some 500 bytes, and takes milliseconds. One connection too many closes the oldest: idle ones lock
# nobody out
LIMITS: Final = Limits(connections_max=256, head_bytes_max=8_192, head_s=5.0)
ADMIN_CLOSE_S: Final = 0.5  # for answers in progress; a part of SERVICES_CLOSE_S

OPERATIONS: Final = "/operations/"  # and the name of one
ARGUMENTS_BYTES_MAX: Final = 64 << 10  # of the arguments of an operation
OPERATION_STATUSES: Final = {**STATUSES, UCode.ALREADY_EXISTS: 409, UCode.FAILED_PRECONDITION: 409}
PAGE_FOLDER: Final = Path(__file__).with_name("page")
FILE_TYPES: Final = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
STATUS: Final = "/status"
# the page is ours alone: it loads nothing from elsewhere, runs no script in it, and stands in no frame
FILE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
TOO_OFTEN: Final = "this was answered a moment ago: ask again in some seconds\n"

PageHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakePage = Callable[[], tuple[int, str, bytes]]  # status, type of the content, content
List = Callable[[], Iterator[bytes] | None]  # in slices; None if requested too often

log = structlog.get_logger()


class HttpPort:
    """Serves `pages` and `lists` by their paths, and `operations`, to clients that `guard` allows."""

    def __init__(
        self,
        pages: Mapping[str, MakePage],
        lists: Mapping[str, List],
        operations: Operations | None,
        guard: AdminSection,
    ) -> None:
        self._pages, self._lists, self._operations, self._guard = pages, lists, operations, guard
        self._token: Latest[bytes] | None = None
        files = sorted(file for file in PAGE_FOLDER.iterdir() if file.suffix in FILE_TYPES)
        self._files = {"/" if file.name == "index.html" else f"/page/{file.name}": file for file in files}
        self._host = ""
        self._listener: Listener | None = None

    async def open(self, address: str) -> int:
        """`address`: HOST:PORT. Returns the port, which the system chooses for 0. Raises as `Admin.open`."""
        guard, self._host = self._guard, address.rpartition(":")[0]
        self._token = await latest([guard.token_file], functools.partial(_read_token, guard))
        tls = await latest_tls("admin", guard.cert_file, guard.key_file)
        self._listener = self.listener(address, Lines(LIMITS, tls))
        return await self._listener.open()

    def listener(self, address: str, lines: Lines) -> Listener:
        application = self._application()
        return Listener("the admin port", address, lines, application, lingering_time=0, shutdown_timeout=ADMIN_CLOSE_S)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    def _application(self) -> web.Application:
        made = web.Application(middlewares=[self._admit], client_max_size=ARGUMENTS_BYTES_MAX)
        made.on_response_prepare.append(_close_after)
        for path, page in self._pages.items():
            made.router.add_get(path, _telling(page))
        for path, file in self._files.items():
            made.router.add_get(path, _filing(file))
        for path, slices in self._lists.items():
            made.router.add_get(path, _listing(slices))
        if self._operations is not None:
            made.router.add_post(OPERATIONS + "{name}", self._operate)
        return made

    async def _operate(self, request: web.Request) -> web.StreamResponse:
        """Answers with what the operation returns, or with {"code", "message"}."""
        assert self._operations is not None, "it is routed only with operations"
        try:
            if request.content_type != "application/json":  # which a form of another site can't send
                raise invalid(f"expected Content-Type: application/json, got {request.content_type[:64]!r}")
            if self._token is None:
                why = "operations can change what runs and show messages: they need admin.token_file"
                raise UStatusError(UCode.PERMISSION_DENIED, why)
            answer, status = await self._operations.answer(request.match_info["name"], await _arguments(request)), 200
        except UStatusError as error:
            answer = {"code": code_name(error.code), "message": error.message}
            status = OPERATION_STATUSES.get(error.code, 500)
        return web.json_response(answer, status=status)

    @web.middleware
    async def _admit(self, request: web.Request, handler: PageHandler) -> web.StreamResponse:
        is_file = request.path in self._files
        if self._token is None:
            if is_file or request.path == STATUS:
                self._check_host(request)
        elif not is_file and not _shows(request, await self._token.get()):
            return web.Response(status=401, text="a token is asked for\n", headers={"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.Response(status=404, text=f"there are {', '.join(('/', *self._pages, *self._lists))}\n")
        except web.HTTPMethodNotAllowed as error:
            allowed = error.headers["Allow"]
            return web.Response(status=405, text=f"the methods here are {allowed}\n", headers={"Allow": allowed})
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            log.exception("a question at the admin port has failed", path=request.path)
            raise

    def _check_host(self, request: web.Request) -> None:
        """Raises 403 for a name that anybody could have pointed here."""
        host = host_of(request)
        if not is_known_host(host, [self._host], any_address=True):
            what = "expected an address, localhost, or the name in streamer.admin as the host"
            raise web.HTTPForbidden(text=f"{what}, got {host[:80]!r}; other names need admin.token_file\n")


async def _arguments(request: web.Request) -> dict[str, Any]:
    """Returns the body, a JSON object; {} if it is empty. Raises INVALID_ARGUMENT."""
    try:
        given = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise invalid("expected the arguments as a JSON object in the body")
    return given


def _telling(page: MakePage) -> PageHandler:
    async def tell(_: web.Request) -> web.StreamResponse:
        status, type, body = page()
        return web.Response(status=status, headers={"Content-Type": type}, body=body)

    return tell


def _filing(file: Path) -> PageHandler:
    headers = FILE_HEADERS | {"Content-Type": f"{FILE_TYPES[file.suffix]}; charset=utf-8"}

    async def tell(_: web.Request) -> web.StreamResponse:
        return web.Response(headers=headers, body=await asyncio.to_thread(file.read_bytes))

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
    response.headers.update({"Connection": "close", "Server": SERVER, "X-Content-Type-Options": "nosniff"})
    response.headers.setdefault("Cache-Control", "no-store")


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
