"""Who meets the HTTP edge: a backend with numbered lines, a publisher of them, and readers that come back after a cut.

ItemBackend: all lines <- ItemPublisher -> POST /publish/, until it is answered      EventReader, PageReader: /stream
      '-> the lines that a held stream or a link lacks                               HeldReader: a proxied request

Standard library only: they share no code with the product. Item N of a channel is the line "N".
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

HOST: Final = "127.0.0.1"
AGAIN_S: Final = 0.05  # before a client connects again
ANSWER_S_MAX: Final = 20.0  # without a byte: the connection is dead
LINK_IDLE_S: Final = 2  # timeout of the Grip-Link: held streams ask after so long without an item
JWT_S: Final = 3_600
NETWORK_ERRORS: Final = (OSError, http.client.HTTPException)
AGAIN: Final = (429, 503)  # statuses that pass by themselves


def signed(key: bytes, claims: dict[str, Any] | None = None, algorithm: str = "HS256") -> str:
    """Returns a JWT."""
    claims = {"iss": "chaos", "exp": int(time.time()) + JWT_S} if claims is None else claims
    parts = [_encoded(json.dumps(one).encode()) for one in ({"typ": "JWT", "alg": algorithm}, claims)]
    return ".".join([*parts, _encoded(hmac.digest(key, ".".join(parts).encode(), hashlib.sha256))])


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class ItemBackend:
    """Keeps no request open. `/held/NAME?after=N` has the lines behind N and Grip-Hold; `/link/NAME` those behind its
    Grip-Last, for the link of the channel."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.newest: dict[str, int] = {}  # channel -> its newest item
        self.asked = 0
        self._server: ThreadingHTTPServer | None = None
        self._open: set[socket.socket] = set()

    def add(self, channel: str) -> int:
        """Returns the number of one more item."""
        self.newest[channel] = self.newest.get(channel, 0) + 1
        return self.newest[channel]

    def start(self) -> None:
        """Does nothing if it runs."""
        if self._server is not None:
            return
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                backend._open.add(self.connection)

            def finish(self) -> None:
                backend._open.discard(self.connection)
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

            def do_GET(self) -> None:
                backend._answer(self)

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    super().handle()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            allow_reuse_address = daemon_threads = True
            request_queue_size = 128

        self._server = Server((HOST, self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuses and cuts all connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for one in list(self._open):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        url = urlsplit(request.path)
        kind, name = url.path.strip("/").split("/")[:2]
        last = re.search(r"last-id=(\d+)", request.headers.get("Grip-Last", ""))
        after = int(last[1]) if last else int(parse_qs(url.query).get("after", ["0"])[0])
        newest = self.newest.get(name, 0)
        body = "".join(f"{number}\n" for number in range(after + 1, newest + 1)).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Type", "text/plain")
        request.send_header("Grip-Channel", f"{name}; prev-id={newest}")
        if kind == "held":
            request.send_header("Grip-Hold", "stream")
            request.send_header("Grip-Link", f"</held/{name}?recover=true>; rel=next; timeout={LINK_IDLE_S}")
        request.end_headers()
        request.wfile.write(body)


class Party:
    """Works in a thread of its own until `end`."""

    def __init__(self, name: str) -> None:
        self.name, self.ended, self.failures = name, threading.Event(), list[str]()
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.ended.set()
        self._thread.join(2 * ANSWER_S_MAX)

    def _guarded(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.failures.append(f"{self.name}: {error!r}")

    def work(self) -> None:
        raise NotImplementedError

    def fail(self, what: str) -> None:
        self.failures.append(f"{self.name}: {what}")
        self.ended.set()


class ItemPublisher(Party):
    """Publishes each item of a channel, with the id of the one before it, until it is answered. `loses`: the share of
    items that it leaves out on purpose, and of those that it publishes twice."""

    def __init__(
        self,
        port: int,
        backend: ItemBackend,
        channel: str,
        *,
        pause_s: float,
        loses: float = 0.0,
        key: bytes = b"",
        rng: random.Random | None = None,
        on_item: Callable[[int, bool], None] = lambda number, is_answered: None,
    ) -> None:
        super().__init__(f"publisher of {channel}")
        self._port, self._backend, self.channel, self._key = port, backend, channel, key
        self._pause_s, self._loses, self._rng, self._on_item = pause_s, loses, rng or random.Random(0), on_item
        self.answered: list[int] = []
        self.lost: list[int] = []

    def work(self) -> None:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_S_MAX)
        while not self.ended.wait(self._pause_s):
            number = self._backend.add(self.channel)
            if self._rng.random() < self._loses:
                self.lost.append(number)
                continue
            self._on_item(number, False)
            for _ in range(2 if self._rng.random() < self._loses else 1):
                self._publish(connection, number)
            self.answered.append(number)
            self._on_item(number, True)
        connection.close()

    def _publish(self, connection: http.client.HTTPConnection, number: int) -> None:
        item = {"channel": self.channel, "id": str(number), "prev-id": str(number - 1)}
        body = json.dumps({"items": [item | {"formats": {"http-stream": {"content": f"{number}\n"}}}]})
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {signed(self._key)}"
        while True:
            try:
                connection.request("POST", "/publish/", body, headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status == 200:
                    return
                if answer.status not in AGAIN:
                    self.fail(f"item {number} was answered {answer.status}: {text[:200]!r}")
                    return
            except NETWORK_ERRORS:
                connection.close()
            time.sleep(AGAIN_S)


class WebReader(Party):
    """Asks again whenever its answer ends. `port` may lead to a proxy."""

    def __init__(self, name: str, port: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(name)
        self._port, self._headers = port, headers or {}
        self.connects = 0
        self.gaps: list[str] = []

    def work(self) -> None:
        while not self.ended.is_set():
            connection = http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_S_MAX)
            with contextlib.suppress(*NETWORK_ERRORS), contextlib.closing(connection):
                path, more = self.asks()
                connection.request("GET", path, headers=self._headers | more)
                answer = connection.getresponse()
                self.connects += 1
                self.take(answer)
            self.ended.wait(AGAIN_S)

    def asks(self) -> tuple[str, dict[str, str]]:
        """Returns the path to ask now, and headers."""
        raise NotImplementedError

    def take(self, answer: http.client.HTTPResponse) -> None:
        raise NotImplementedError

    def lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yields the whole lines of an answer, as they come."""
        data = b""
        while not self.ended.is_set() and (part := answer.read1(1 << 16)):
            *whole, data = (data + part).split(b"\n")
            yield from whole


Seen = dict[str, Any]


class EventReader(WebReader):
    """An EventSource: from the earliest event on, and behind the last one after a cut."""

    def __init__(
        self,
        name: str,
        port: int,
        topics: list[str],
        headers: dict[str, str] | None = None,
        on_event: Callable[[Seen], None] = lambda seen: None,
    ) -> None:
        super().__init__(name, port, headers)
        self.topics, self._on_event = topics, on_event
        self._last_id = ""
        self.seen: list[Seen] = []

    def asks(self) -> tuple[str, dict[str, str]]:
        query = urlencode([*(("topic", one) for one in self.topics), ("since", "earliest")])
        return f"/stream?{query}", {"Last-Event-ID": self._last_id} if self._last_id else {}

    def take(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != 200:
            text = answer.read()[:200]
            if answer.status not in (502, 503, 504):
                self.fail(f"was answered {answer.status}: {text!r}")
            return
        id, event, data = "", "", ""
        for line in self.lines(answer):
            name, _, value = line.decode().partition(": ")
            if name == "id":
                id = value
            elif name == "event":
                event = value
            elif name == "data":
                data = value
            elif not line:  # the end of an event
                self._last_id = id or self._last_id
                if event == "gap":
                    self.gaps.append(data)
                elif data:
                    self.seen.append(json.loads(data))
                    self._on_event(self.seen[-1])
                event = data = ""


class PageReader(WebReader):
    """Polls: one page after the other."""

    def __init__(
        self, name: str, port: int, topics: list[str], headers: dict[str, str] | None = None, max: int = 50
    ) -> None:
        super().__init__(name, port, headers)
        self.topics, self._max = topics, max
        self._next = "earliest"
        self.seen: list[Seen] = []
        self.is_at_end = False

    def asks(self) -> tuple[str, dict[str, str]]:
        topics = (("topic", one) for one in self.topics)
        return "/stream?" + urlencode([*topics, ("mode", "poll"), ("since", self._next), ("max", self._max)]), {}

    def take(self, answer: http.client.HTTPResponse) -> None:
        body = answer.read()
        if answer.status in (200, 410):
            page = json.loads(body)
            self.seen += page.get("events", ())
            self.gaps += [json.dumps(gap) for gap in page.get("gaps", ())]
            self._next, self.is_at_end = page["next"], answer.status == 200 and not page["more"]
        elif answer.status not in AGAIN:
            self.fail(f"was answered {answer.status}: {body[:200]!r}")


class HeldReader(WebReader):
    """A request that the backend holds: says which line it has, and gets those behind it."""

    def __init__(
        self,
        name: str,
        port: int,
        channel: str,
        headers: dict[str, str] | None = None,
        on_line: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(name, port, headers)
        self.channel, self._on_line = channel, on_line
        self.last = 0
        self.got = 0

    def asks(self) -> tuple[str, dict[str, str]]:
        return f"/held/{self.channel}?after={self.last}", {}

    def take(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != 200:
            if answer.status not in (502, 503, 504):
                self.fail(f"was answered {answer.status}: {answer.read()[:200]!r}")
            return
        for line in self.lines(answer):
            if int(line) != self.last + 1:
                self.fail(f"line {line.decode()} came after {self.last}")
                return
            self.last, self.got = int(line), self.got + 1
            self._on_line(self.last)
