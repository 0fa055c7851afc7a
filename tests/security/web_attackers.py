"""Attacks on the HTTP edge over raw sockets: slow and many connections, floods, forged tokens, smuggled requests, and a
backend that answers with anything.

The attacker has a token of its own where the edge has tokens, and no key of publishers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import random
import re
import resource
import socket
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final
from urllib.parse import unquote

from campaigns.chaos.web import signed
from campaigns.chaos.wire import PUBLISH, Message, Uri, new_id
from tests.security.hostile import MARK, Places, Reported, attacker, begin, payload
from tests.security.raw import RawMqtt
from tests.security.stage import HOSTILE_TOKEN, KEY

HOST: Final = "127.0.0.1"
ANSWER_S_MAX: Final = 10.0
AT_ONCE: Final = 64  # requests of a flood
SECRET: Final = MARK.decode()
ALL: Final = "//cloud/FFFFFFFF/FF/FFFF"
MINE: Final = f"Authorization: Bearer {HOSTILE_TOKEN}"
BOMB: Final = zlib.compress(b"a" * (4 << 20))  # 4 KiB
CUT: Final = "cut"  # in place of a status: the connection ended without one


def raw(port: int, path: str, *headers: str, method: str = "GET", body: bytes = b"", host: str | None = None) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host or f'{HOST}:{port}'}", *headers, "Connection: close")
    if body:
        lines = (*lines, f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode(errors="surrogateescape") + body


async def answer(port: int, request: bytes, wait_s: float = ANSWER_S_MAX) -> bytes:
    """Returns everything that comes within `wait_s`."""
    found = b""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return b""
    try:
        writer.write(request)
        async with asyncio.timeout(wait_s):
            while part := await reader.read(1 << 16):
                found += part
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return found


async def status(port: int, request: bytes, wait_s: float = ANSWER_S_MAX) -> str:
    """Returns the status of the answer as soon as its head is there."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return CUT
    try:
        async with asyncio.timeout(wait_s):
            writer.write(request)
            line = await reader.readline()
    except (OSError, TimeoutError):
        return CUT
    finally:
        writer.transport.abort()
    return line.split()[1].decode() if line.startswith(b"HTTP/1.") else CUT


async def flood(at: Places, port: int, requests: Iterable[bytes]) -> Reported:
    """Sends requests, AT_ONCE at a time, until they or the time are over."""
    codes, sent, until, left = Counter[str](), 0, time.monotonic() + at.seconds, iter(requests)

    async def work() -> None:
        nonlocal sent
        for request in left:
            if time.monotonic() > until:
                return
            sent += 1
            codes[await status(port, request)] += 1

    begin()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return {"sent": sent, "codes": dict(codes)}


def more_files() -> int:
    """Raises the limit of open files, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def hold(
    at: Places, first: Callable[[int], bytes], more: Callable[[], bytes] = bytes, *, reads: bool = False
) -> Reported:
    """Holds `count` connections open: sends `first`, then `more` each second, and opens each again that is closed."""
    opened, until, held, codes = 0, time.monotonic() + at.seconds, 0, Counter[str]()

    async def one(number: int) -> None:
        nonlocal opened, held
        while time.monotonic() < until:
            sock = socket.socket()
            sock.setblocking(False)
            if not reads:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            try:
                await asyncio.get_running_loop().sock_connect(sock, (HOST, at.http))
                opened, held = opened + 1, held + 1
                await asyncio.get_running_loop().sock_sendall(sock, first(number))
                while time.monotonic() < until:
                    await asyncio.sleep(1)
                    if reads and (part := _received(sock)) is not None:
                        if not part:
                            break
                        if part.startswith(b"HTTP/1.1 "):
                            codes[part[9:12].decode()] += 1
                    if data := more():
                        await asyncio.get_running_loop().sock_sendall(sock, data)
            except OSError:
                await asyncio.sleep(0.2)
            finally:
                sock.close()

    begin()
    await asyncio.gather(*(one(number) for number in range(min(at.count, more_files() - 100))))
    return {"opened": opened, "codes": dict(codes)}


def _received(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(1 << 16)
    except BlockingIOError:
        return None


def fill(at: Places, count: int, size: int) -> None:
    """Publishes records that streams read."""
    link = RawMqtt(at.cloud, "attacker-fills")
    link.say([Message(new_id(), PUBLISH, Uri("cloud", 0x8300, 1, 0x8001), None, payload(size)) for _ in range(count)])
    link.settle(1)


# Slow and many connections


@attacker
def web_slow_heads(at: Places) -> Reported:
    return asyncio.run(hold(at, lambda _: b"GET /stream HTTP/1.1\r\nX-Slow: ", lambda: b"a"))


@attacker
def web_slow_bodies(at: Places) -> Reported:
    head = b"POST /held/honest HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    return asyncio.run(hold(at, lambda _: head, lambda: b"a"))


@attacker
def web_reads_nothing(at: Places) -> Reported:
    """Streams of everything from the beginning, which are never read."""
    fill(at, 200, 60_000)
    request = raw(at.http, f"/stream?topic={ALL}&since=earliest", MINE)
    return asyncio.run(hold(at, lambda _: request))


@attacker
def web_connections(at: Places) -> Reported:
    """Half of the connections say nothing, half have begun a request."""
    return asyncio.run(hold(at, lambda number: b"GET / HTTP/1.1\r\n" if number % 2 else b"", reads=True))


@attacker
def web_pipelined(at: Places) -> Reported:
    """Requests without end over each connection, whose answers nobody reads."""
    request = b"GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    return asyncio.run(hold(at, lambda _: request * 1_000, lambda: request * 1_000))


# Streams


@attacker
def web_feeds(at: Places) -> Reported:
    """Each stream reads topics that no other one reads, and what honest clients send."""

    def request(number: int) -> bytes:
        own = f"//cloud/{0xB000 + number // 0x4000:X}/1/{0x8000 + number % 0x4000:X}"
        return raw(at.http, f"/stream?topic={own}&topic=//cloud/8001/1/FFFF", MINE)

    return asyncio.run(hold(at, request, reads=True))


@attacker
def web_polls(at: Places) -> Reported:
    """The largest pages, and those that wait."""
    fill(at, 200, 5_000)
    paths = (f"topic={ALL}&since=earliest&max=10000", "topic=//cloud/B000/1/9000&wait=60000")
    requests = (raw(at.http, f"/stream?mode=poll&{path}", MINE) for path in itertools.cycle(paths))
    return asyncio.run(flood(at, at.http, itertools.islice(requests, at.count)))


@attacker
def web_epochs(at: Places) -> Reported:
    request = raw(at.http, f"/stream?topic={ALL}&epochs=atomic&since=earliest", MINE)
    return asyncio.run(hold(at, lambda _: request, reads=True))


@attacker
def web_positions(at: Places) -> Reported:
    """Ids of events, cursors and times that are noise, cut, or larger than they look."""

    def one() -> str:
        data = random.randbytes(random.randrange(200))
        return random.choice(
            (
                "p" + base64.urlsafe_b64encode(data).decode().rstrip("="),
                "e" + base64.urlsafe_b64encode(zlib.compress(data)).decode().rstrip("="),
                "e" + base64.urlsafe_b64encode(BOMB).decode().rstrip("="),
                "p" + "A" * 5_000,
                str(random.randrange(10**15)),
                "9999-12-31T23:59:59+00:00",
                "0001-01-01T00:00:00+23:59",
                "".join(random.choices("pe0-9Z:T.%é", k=random.randrange(50))),
                f"{random.randrange(1 << 32):08x}-0000-7000-8000-000000000000",
            )
        )

    def requests() -> Iterable[bytes]:
        for number in range(at.count):
            more = "&epochs=atomic" if number % 3 == 0 else "&mode=poll" if number % 3 == 1 else ""
            yield raw(at.http, f"/stream?topic={ALL}{more}", MINE, f"Last-Event-ID: {one()}")

    return asyncio.run(flood(at, at.http, requests()))


# Publishers and identities


@attacker
def web_items(at: Places) -> Reported:
    """A publisher that sends what is huge, deep, or wrong."""

    def item(content: object, **more: object) -> object:
        return {"channel": "other", "formats": {"http-stream": {"content": content}}} | more

    def items(*found: object) -> bytes:
        return json.dumps({"items": found}).encode()

    bodies = [
        b"[" * 2_000_000,
        b'{"items":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b'{"items": [' + b"1" * 3_000_000 + b"]}",
        items(*(item(str(number)) for number in range(1_000))),
        items(*(item("a") for number in range(1_001))),
        items(*(item("[" * 1_000_000) for _ in range(3))),
        items(item("[" + "[]," * 300_000 + "[]]")),
        items(*(item("a" * 900_000) for _ in range(4))),
        items(item("a" * 5_000_000)),
        items(item("a", id="9" * 1_024, **{"prev-id": "8" * 1_024})),
        items(*(item("a", id=f"{random.random()}", **{"prev-id": f"{random.random()}"}) for _ in range(900))),
        items(item(SECRET, channel=SECRET)),
        json.dumps({"items": [{"channel": "other", "http-response": {"headers": [["A\r\nB", "c"]] * 99}}]}).encode(),
        b"\xff" * 1_000_000,
        b"{" + b'"a":{' * 300_000,
    ]
    json_type = "Content-Type: application/json"
    requests = (raw(at.publish, "/publish/", json_type, method="POST", body=body) for body in itertools.cycle(bodies))
    return asyncio.run(flood(at, at.publish, itertools.islice(requests, at.count)))


@attacker
def web_forged(at: Places) -> Reported:
    """Tokens and JWTs that are wrong in each way known."""
    now = int(time.time())
    good = {"iss": "x", "exp": now + 600}
    none = signed(b"", good, "none")
    head, claims, _ = none.split(".")
    rs, (own, body, signature) = signed(KEY, good, "RS256"), signed(KEY, good).split(".")
    jwts = [
        *(none, f"{head}.{claims}.", signed(b"", good, "None"), signed(b"another key" * 4, good), signed(b"", good)),
        *(rs, signed(KEY, good, "HS512"), signed(KEY, {"iss": "x", "exp": now - 60}), signed(KEY, {"iss": "x"})),
        *(signed(KEY, {"exp": "never"}), signed(KEY, good | {"nbf": now + 600}), signed(KEY, {"exp": -(10**30)})),
        *(f"{own}.{body}.", f"{own}.{claims}.{signature[:-2]}", f"{own}..{signature}", "a.b.c", "...", "", "a" * 7_000),
        *(
            base64.b64encode(b'{"alg":"HS256","jku":"http://127.0.0.1/","kid":"../../key"}').decode() + ".e30.e30",
            SECRET,
        ),
    ]
    tokens = [*jwts, "honest-toke", "honest-token.", "Honest-token", " ", "honest-token, x", "%00", HOSTILE_TOKEN * 100]

    def requests() -> Iterable[tuple[int, bytes]]:
        yield at.http, raw(at.http, f"/stream?topic={ALL}&mode=poll")
        yield at.http, raw(at.http, f"/stream?topic={ALL}&mode=poll", "Cookie: up_token=")
        for one in tokens:
            yield at.http, raw(at.http, f"/stream?topic={ALL}&mode=poll", f"Authorization: Bearer {one}")
            yield at.http, raw(at.http, f"/stream?topic={ALL}&mode=poll&token=honest-token", f"Cookie: up_token={one}")
            yield (
                at.http,
                raw(at.http, f"/stream?topic={ALL}", f"Authorization: Basic {one}", f"Cookie: up_token={one}"),
            )
        body = json.dumps({"items": [{"channel": "other", "http-stream": {"content": "forged"}}]}).encode()
        for one in jwts:
            bearer = f"Authorization: Bearer {one}"
            yield (
                at.publish,
                raw(at.publish, "/publish/", bearer, "Content-Type: application/json", body=body, method="POST"),
            )

    async def run() -> Reported:
        codes, sent = Counter[str](), 0
        begin()
        for port, request in itertools.islice(
            itertools.chain.from_iterable(requests() for _ in itertools.count()), at.count
        ):
            codes[await status(port, request)] += 1
            sent += 1
        return {"sent": sent, "codes": dict(codes)}

    return asyncio.run(run())


@attacker
def web_foreign(at: Places) -> Reported:
    """What a page of another origin can make a browser ask, DNS rebinding included."""
    hosts = ("evil.example", f"evil.example:{at.http}", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3.4")
    hosts = (
        *hosts,
        "127.0.0.1@evil.example",
        "[::ffff:1.2.3.4]",
        "[::1",
        "0x7f.1",
        "evil.example#127.0.0.1",
        "::1:80x",
    )
    origins = (
        "http://evil.example",
        "null",
        "http://127.0.0.1.evil.example",
        "https://localhost",
        "file://",
        "http://[",
        "",
    )
    origins = (*origins, f"http://{HOST}", f"http://x@{HOST}:{at.http}", "x")
    path, json_type = f"/stream?topic={ALL}&mode=poll", "Content-Type: application/json"
    body = json.dumps({"items": [{"channel": "other", "http-stream": {"content": "foreign"}}]}).encode()
    requests = [(at.http, raw(at.http, path, host=host)) for host in hosts]
    requests += [(at.http, raw(at.http, path, f"Host: {HOST}", host=host)) for host in hosts]
    requests += [(at.http, raw(at.http, "/held/honest", host=host)) for host in hosts]
    requests += [(at.http, raw(at.http, path, f"Origin: {origin}")) for origin in origins]
    requests += [(at.http, raw(at.http, path, f"Origin: http://{HOST}:{at.http}", f"Origin: {one}")) for one in origins]
    requests += [(at.http, raw(at.http, path, f"Sec-Fetch-Site: {site}")) for site in ("cross-site", "same-site")]
    requests += [(at.http, raw(at.http, path, f"Origin: {one}", method="OPTIONS")) for one in origins]
    requests += [(at.publish, raw(at.publish, "/publish/", json_type, method="POST", body=body, host=h)) for h in hosts]
    requests += [
        (at.publish, raw(at.publish, "/publish/", json_type, f"Origin: {one}", method="POST", body=body))
        for one in origins
    ]
    requests += [
        (at.publish, raw(at.publish, "/publish/", f"Content-Type: {kind}", method="POST", body=body))
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json2")
    ]

    async def run() -> Reported:
        begin()
        codes = Counter[str]()
        for port, request in requests:
            found = await status(port, request)
            codes[found] += 1
            if found in ("200", "204"):
                codes[request[:200].decode()] += 1
        return {"sent": len(requests), "codes": dict(codes)}

    return asyncio.run(run())


# A backend of the attacker


class RawBackend:
    """Keeps each request, and answers with what `answers` has next, as it is."""

    def __init__(self, answers: Callable[[], bytes]) -> None:
        self._answers, self.heads = answers, list[str]()

    @contextlib.asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, HOST, port)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, asyncio.CancelledError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.heads.append(head)
                if size := re.search(r"(?im)^content-length: *(\d+)", head):
                    await reader.readexactly(int(size[1]))
                elif re.search(r"(?im)^transfer-encoding:", head):
                    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                        await reader.readexactly(size + 2)
                    await reader.readuntil(b"\r\n")
                writer.write(self._answers())
        writer.close()


OK: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def against_backend(
    at: Places, requests: Iterable[bytes], answers: Callable[[], bytes] = lambda: OK
) -> list[str]:
    """Returns the heads that the backend got."""
    backend = RawBackend(answers)
    async with backend.open(at.hostile):
        begin()
        for request in requests:
            await answer(at.http, request, 0.5)
    return backend.heads


def within(paths: Iterable[str]) -> list[str]:
    """Returns those that a backend may read as a path outside of /hostile/."""
    found = []
    for path in paths:
        plain = re.sub(r"/{2,}", "/", unquote(path).replace("\\", "/").partition("?")[0])
        parts: list[str] = []
        for part in plain.split("/")[1:]:
            name = part.partition(";")[0]
            if name == "..":
                parts = parts[:-1]
            elif name != ".":
                parts.append(part)
        if not path.startswith("/") or parts[:1] != ["hostile"]:
            found.append(path)
    return found


@attacker
def web_smuggling(at: Places) -> Reported:
    """Requests whose end two parsers may see at different places. The second one is for /admin, which the edge does not
    pass."""
    hidden = b"GET /admin HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    size, chunk = b"%d" % len(hidden), b"%x\r\n%b\r\n" % (len(hidden), hidden)
    post = b"POST /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    chunked = (b"Transfer-Encoding: chunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding:\tchunked")
    chunked += (
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: \x0bchunked",
    )
    chunked += (b"X: y\nTransfer-Encoding: chunked", b"Transfer-Encoding:\r\n chunked", b"transfer-encoding: CHUNKED")
    chunked += (b"X: y\rTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity")
    requests = [post + b"Content-Length: " + size + b"\r\n" + one + b"\r\n\r\n0\r\n\r\n" + hidden for one in chunked]
    requests += [post + one + b"\r\nContent-Length: 4\r\n\r\n" + chunk + b"0\r\n\r\n" for one in chunked]
    requests += [post + one + b"\r\n\r\n0\r\n\r\n" + hidden for one in chunked]
    lengths = (
        b"0\r\nContent-Length: " + size,
        size + b", 0",
        b"+0",
        b"-1",
        b"0x0",
        b"0 ",
        b"\x0b0",
        b"0_0",
        "٠".encode(),
    )
    requests += [post + b"Content-Length: " + one + b"\r\n\r\n" + hidden for one in lengths]
    for line in (
        b"0;x=\n\r\n\r\n",
        b"0\r\nX: y\r\n\r\n",
        b"0\n\n",
        b"-0\r\n\r\n",
        b"0x0\r\n\r\n",
        b"\r\n0\r\n\r\n",
        b"0;\r\r\n\r\n",
    ):
        requests.append(post + chunked[0] + b"\r\n\r\n" + line + hidden)
    requests += [
        b"GET /hostile/x HTTP/1.1\nHost: 127.0.0.1\n\n" + hidden,
        b"GET /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " + size + b"\r\n\r\n" + hidden,
        b"GET /hostile/x\r\n\r\n" + hidden,
        b"GET /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\nX: y\r\n obs: fold\r\n\r\n",
        b"GET /hostile/ HTTP/1.1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /hostile/x\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + hidden,
        b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + hidden,
        b"TRACE /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: a\r\n\r\n",
        b"GET /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + hidden,
        b"GET /hostile/x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: content-length\r\nContent-Length: 3\r\n\r\nabc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    heads = asyncio.run(against_backend(at, requests))
    lines = [head.partition("\r\n")[0] for head in heads]
    wrong = [line for line in lines if not re.fullmatch(r"[A-Z]+ /hostile/\S* HTTP/1\.1", line) or "CONNECT" in line]
    return {"sent": len(requests), "seen": len(lines), "wrong": [*wrong, *(one for one in lines if "TRACE" in one)]}


@attacker
def web_paths(at: Places) -> Reported:
    """Paths that begin with the prefix, and lead out of it."""
    dots = (
        "..",
        "%2e%2e",
        ".%2e",
        "%2E.",
        "..;",
        "..;x=y",
        "..%2f",
        "..%5c",
        "%2e%2e%2f",
        "..\\",
        "%2e%2e%5c",
        ".",
        "%2e",
    )
    paths = [f"/hostile/{one}/admin" for one in dots] + [f"/hostile/{one}" for one in dots]
    paths += [f"/hostile%2f{one}/admin" for one in dots] + [f"/hostile/x%2f{one}%2f{one}%2fadmin" for one in dots]
    paths += [
        "//hostile/x",
        "/hostile//../admin",
        "/hostile/..//admin",
        "/Hostile/x",
        "/hostile",
        "/x/../hostile/",
        "*",
    ]
    paths += [f"http://{where}/hostile/x" for where in ("evil.example", "127.0.0.1:1", "u:p@evil.example", "[::1]")]
    paths += [f"http://evil.example/hostile/{one}/admin" for one in dots] + [
        "hostile/x",
        "/hostile/\\..\\admin",
        "/hostile/#/",
    ]
    requests = [raw(at.http, path) for path in paths]
    heads = asyncio.run(against_backend(at, requests))
    seen = [head.split(" ")[1] for head in heads]
    away = [head for head in heads if "evil.example" in head or "u:p@" in head]
    return {"sent": len(paths), "seen": len(seen), "wrong": within(seen) + away}


@attacker
def web_headers(at: Places) -> Reported:
    """Headers that a backend and a client forge."""
    forged = ["Grip-Sig: forged", "GRIP-LAST: honest; last-id=forged", "Grip-Hold: stream", "Grip-Sig:\tforged"]
    forged += [
        "Connection: X-Forwarded-For, Grip-Sig",
        "X: y\r\n Grip-Sig: forged",
        "Grip-Sig : forged",
        "X-Forwarded-Proto: https",
    ]
    injected = b"X-Injected: 1"
    values = (
        b"a\rX-Injected: 1",
        b"a\r\n X-Injected: 1",
        b"a\x00b",
        b"a\x0b",
        b"\xff\xfe",
        b"a" * 7_000,
    )
    names = (
        b"X-Of-Backend",
        b"Grip-Status",
        b"Grip-Channel",
        b"Grip-Link",
        b"Grip-Keep-Alive",
        b"Grip-Hold",
        b"Set-Cookie",
    )
    said = [b"%b: %b" % (name, value) for name in names for value in values]
    said += [
        b"Grip-Status: 200 OK\x0bX",
        b"Grip-Status: 101 Switching",
        b"Grip-Status: 204 No",
        b'Grip-Hold: stream\r\nGrip-Channel: honest; prev-id="a\\\r\nX-Injected: 1"',
        b"Grip-Hold: stream\r\nGrip-Channel: " + b", ".join(b"c%d" % one for one in range(300)),
        b"Grip-Hold: stream\r\nGrip-Channel: honest; prev-id=1\r\nGrip-Link: <http://[bad>; rel=next",
        b"Grip-Hold: stream\r\nGrip-Channel: honest; prev-id=1\r\nGrip-Link: <http://evil.example/>;rel=next;timeout=0",
        b"Grip-Hold: response\r\nGrip-Channel: honest\r\nGrip-Timeout: 0",
        b"Grip-Link: </hostile/again>; rel=next",
        b"Grip-Hold: stream\r\nGrip-Channel: honest\r\nGrip-Keep-Alive: \\x0d\\x0aX; format=cstring; timeout=0",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Encoding: gzip",
    ]
    turn = itertools.cycle(said)
    found, sent = Counter[str](), 0
    backend = RawBackend(lambda: b"HTTP/1.1 200 OK\r\n" + next(turn) + b"\r\nContent-Length: 2\r\n\r\nok")

    async def run() -> None:
        nonlocal sent
        async with backend.open(at.hostile):
            begin()
            until = time.monotonic() + at.seconds
            while sent < at.count and time.monotonic() < until:
                header = forged[sent % len(forged)]
                request = raw(at.http, f"/hostile/x?secret={SECRET}", header, f"Cookie: session={SECRET}")
                got = await answer(at.http, request, 0.3)
                sent += 1
                head = got.partition(b"\r\n\r\n")[0]
                lines = re.split(rb"\r\n|\r|\n", head)
                if any(line.startswith(injected) for line in lines):
                    found[f"injected: {head!r}"] += 1
                if any(line.lower().startswith(b"grip-") for line in lines):
                    found["grip to client"] += 1

    asyncio.run(run())
    text = "".join(backend.heads).lower()
    if re.search(r"(?m)^grip-.*forged|^grip-hold", text):
        found["grip to backend: " + ", ".join(re.findall(r"(?m)^grip-.*forged|^grip-hold.*", text)[:3])] += 1
    if "x-forwarded-proto: https" in text:
        found["proto"] += 1
    return {"sent": sent, "seen": len(backend.heads), "wrong": dict(found)}
