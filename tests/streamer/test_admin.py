"""The admin port against malformed and hostile clients."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamer.config import AdminSection
from streamer.operating import admin as admins
from streamer.operating import http_port as ports
from streamer.operating import states
from streamer.operating.states import of_one_that_cant_start
from tests.certificates import DAY, TestAuthority
from uprotocol.status import UStatusError

MakeWorld = Any


@pytest.fixture
async def port(make_world: MakeWorld) -> int:
    world = await make_world(start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    opened: int = world.streamer.admin.port
    return opened


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def fetch(url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": token})
    try:
        with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"HEAD /readyz?verbose HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"HEAD /vehicles HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"DELETE /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"\xff\xfe\x00 \x80\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
    ],
)
async def test_every_request_has_an_answer(port: int, request_: bytes, status: bytes) -> None:
    answer = await ask(port, request_)
    assert answer.split()[1] == status
    assert b"Connection: close" in answer or answer.startswith(b"HTTP/1.0 400 ")


async def test_who_sends_too_much_or_nothing_is_let_go_and_the_next_one_served(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await ask(port, b"GET /" + b"x" * (2 * ports.LIMITS.head_bytes_max) + b" HTTP/1.1\r\nHost: x\r\n\r\n") == b""
    monkeypatch.setattr(ports.LIMITS, "head_s", 0.05)
    assert await ask(port, b"GET /healthz HT") == b""
    assert await ask(port, b"") == b""
    assert await ask(port, b"\r\n\r\n") == b""
    monkeypatch.undo()
    assert b"alive" in await ask(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_metrics_are_what_prometheus_reads(port: int) -> None:
    answer = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
    body = answer.partition("\r\n\r\n")[2]
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert all(name.startswith(("up_streamer_", "process_")) for name in families)
    assert all(family.documentation for family in families.values())
    assert {"endpoint": "vehicle"} in [sample.labels for sample in families["up_streamer_received"].samples]
    assert re.search(r"^up_streamer_ready 1\.0$", body, re.MULTILINE)


async def test_who_asks_without_end_takes_a_tenth_of_the_loop_and_gets_no_list_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that advances only when an answer is built."""
    now, made = 1_000.0, []
    monkeypatch.setattr(admins, "time", SimpleNamespace(perf_counter=lambda: now))

    def metrics() -> bytes:
        nonlocal now
        now += 0.05
        made.append(now)
        return b"metrics"

    def vehicles() -> Iterator[dict[str, int]]:
        nonlocal now
        for number in range(2 * admins.VEHICLES_AT_ONCE):
            now += 0.001
            yield {"vehicle": number}

    wrong = "wrong " * 1_000
    answers = admins.Admin(
        "127.0.0.1:0",
        lambda: [wrong] * 1_000,
        metrics,
        lambda: ["a note"],
        vehicles,
        states=lambda: of_one_that_cant_start(["cloud"], wrong, 0),
    )
    for _ in range(4):
        assert answers.metrics().body == b"metrics"
    assert len(made) == 4, "who asks now and then gets what is so now"
    for _ in range(10_000):
        assert answers.metrics().body == b"metrics"
        now += 0.001
    assert len(made) * 0.05 <= admins.LOOP_SHARE * (now - 1_000.0) + admins.LOOP_S_MAX + 0.05
    assert len(made) > 10
    now += 60
    slices = list(answers.vehicles() or ())
    assert len(slices) == 2
    assert b"".join(slices).count(b"{") == 2 * admins.VEHICLES_AT_ONCE
    assert answers.vehicles() is None
    assert answers.metrics().body == b"metrics"
    now += 20
    assert answers.vehicles() is not None
    answer = json.loads(answers.ready().body)
    assert answers.ready().status == 503
    assert len(answer["problems"]) == states.LINES_SHOWN_MAX + 1
    assert answer["problems"][-1] == f"and {1_000 - states.LINES_SHOWN_MAX} more"
    assert max(map(len, answer["problems"])) == states.LINE_CHARACTERS_MAX + 3
    assert len(answer["endpoints"]["cloud"]["reason"]) == states.LINE_CHARACTERS_MAX + 3
    assert answer["notes"] == ["a note"]


async def test_a_list_that_is_asked_for_too_often_is_refused_until_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(admins, "time", SimpleNamespace(perf_counter=lambda: now))

    def vehicles() -> Iterator[dict[str, int]]:
        nonlocal now
        now += 2 * admins.LOOP_S_MAX
        yield from ({"vehicle": number} for number in range(3 * admins.VEHICLES_AT_ONCE))

    async with admins.Admin("127.0.0.1:0", list, vehicles=vehicles) as admin:
        status, body = await asyncio.to_thread(fetch, f"http://127.0.0.1:{admin.port}/vehicles")
        assert (status, len(body.splitlines())) == (200, 3 * admins.VEHICLES_AT_ONCE)
        assert (await asyncio.to_thread(fetch, f"http://127.0.0.1:{admin.port}/vehicles"))[0] == 503
        now += 10
        assert (await asyncio.to_thread(fetch, f"http://127.0.0.1:{admin.port}/vehicles"))[0] == 200


async def test_of_connections_beyond_the_limit_the_oldest_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with many open connections does not lock out a monitor."""
    monkeypatch.setattr(ports.LIMITS, "connections_max", 3)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for oldest in range(6):
        assert b"alive" in await ask(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(idle[oldest][0].read(), 20) == b""
        idle.append(await asyncio.open_connection("127.0.0.1", port))
    for _, writer in idle:
        writer.close()


# Beyond this machine


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> AdminSection:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("admin")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "port.key", "-out", "port.crt"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True, timeout=60)
    (folder / "token").write_bytes(codecs.BOM_UTF8 + b"s3cret-of-the-monitor\n")  # as editors on Windows do
    return AdminSection(
        cert_file=folder / "port.crt", key_file=folder / "port.key", token_file=folder / "token", unprotected=False
    )


@pytest.fixture
def trusting(guard: AdminSection) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=guard.cert_file)


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ("Bearer s3cret-of-the-monitor", 200),
        ("bearer  s3cret-of-the-monitor ", 200),
        (None, 401),
        ("Bearer ", 401),
        ("Bearer s3cret-of-the-monito", 401),
        ("Bearer s3cret-of-the-monitor\u00e9", 401),
        ("Basic s3cret-of-the-monitor", 401),
        ("s3cret-of-the-monitor", 401),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/vehicles", "/nowhere"])
async def test_nothing_is_answered_without_the_token(
    guard: AdminSection, trusting: ssl.SSLContext, path: str, shown: str | None, status: int
) -> None:
    async with admins.Admin("127.0.0.1:0", list, guard=guard) as admin:
        url = f"https://127.0.0.1:{admin.port}{path}"
        given, _ = await asyncio.to_thread(fetch, url, shown, trusting)
    assert given == (404 if path == "/nowhere" and status == 200 else status)


async def test_with_a_certificate_there_is_tls_alone_and_the_limits_hold(
    guard: AdminSection, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports.LIMITS, "connections_max", 3)
    token = "Bearer s3cret-of-the-monitor"
    vehicles = [{"vehicle": number} for number in range(2_000)]
    async with admins.Admin("127.0.0.1:0", list, vehicles=lambda: vehicles, guard=guard) as admin:
        url = f"https://127.0.0.1:{admin.port}"
        _, body = await asyncio.to_thread(fetch, f"{url}/vehicles", token, trusting)
        assert [json.loads(line) for line in body.splitlines()] == vehicles
        assert not await ask(admin.port, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"), "not without TLS"
        monkeypatch.setattr(ports.LIMITS, "head_s", 0.5)
        silent = [await asyncio.open_connection("127.0.0.1", admin.port) for _ in range(3)]  # no handshake comes
        for reader, _ in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b"", "let go"
        for _, writer in silent:
            writer.close()
        monkeypatch.setattr(ports.LIMITS, "head_s", 20)
        assert (await asyncio.to_thread(fetch, f"{url}/healthz", token, trusting))[0] == 200

        def early_and_large() -> bytes:
            with (
                socket.create_connection(("127.0.0.1", admin.port), 20) as plain,
                trusting.wrap_socket(plain, server_hostname="127.0.0.1") as line,
                contextlib.suppress(OSError),
            ):
                line.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 2 * ports.LIMITS.head_bytes_max)
                return line.recv(10)
            return b""

        assert await asyncio.to_thread(early_and_large) == b""


async def test_a_renewed_certificate_is_shown_to_who_connects_next(tmp_path: Path) -> None:
    first, second = TestAuthority(tmp_path, "first"), TestAuthority(tmp_path, "second")
    certificate, key = first.issue("port")
    old = certificate.read_bytes()

    async def health(authority: TestAuthority) -> int:
        url = f"https://127.0.0.1:{admin.port}/healthz"
        trusting = ssl.create_default_context(cafile=authority.ca)
        return (await asyncio.to_thread(fetch, url, None, trusting))[0]

    guard = AdminSection(cert_file=certificate, key_file=key, unprotected=False)
    async with admins.Admin("127.0.0.1:0", list, guard=guard) as admin:
        assert await health(first) == 200
        second.issue("port")
        assert await health(second) == 200
        certificate.write_bytes(old[: len(old) // 2])
        assert await health(second) == 200, "half of a file changes nothing"
        first.issue("port")
        assert await health(first) == 200


async def test_a_token_that_has_changed_counts_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with admins.Admin("127.0.0.1:0", list, guard=AdminSection(token_file=file)) as admin:

        async def status(token: str) -> int:
            url = f"http://127.0.0.1:{admin.port}/healthz"
            return (await asyncio.to_thread(fetch, url, f"Bearer {token}"))[0]

        assert await status("old") == 200
        file.write_text("other")
        assert (await status("old"), await status("other")) == (401, 200)
        file.write_text("")
        assert (await status(""), await status("other")) == (401, 200)


async def test_a_certificate_has_a_metric_and_a_note_before_it_ends(make_world: MakeWorld, tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    certificate, key = authority.issue("port", 5 * DAY)
    world = await make_world(start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    guard = AdminSection(cert_file=certificate, key_file=key)
    world.config = world.config.model_copy(update={"streamer": section, "admin": guard})
    await world.start()
    at, trusting = f"https://127.0.0.1:{world.streamer.admin.port}", ssl.create_default_context(cafile=authority.ca)
    _, ready = await asyncio.to_thread(fetch, f"{at}/readyz", None, trusting)
    (note,) = (note for note in json.loads(ready)["notes"] if "cert_file" in note)
    assert note.startswith(f"the admin port: cert_file {certificate} expires in 5 days, at ")
    _, text = await asyncio.to_thread(fetch, f"{at}/metrics", None, trusting)
    families = {one.name: one.samples for one in text_string_to_metric_families(text.decode())}
    (sample,) = families["up_streamer_certificate_expires_seconds"]
    assert sample.labels == {"endpoint": "", "setting": "cert_file"}
    assert sample.value == pytest.approx(time.time() + 5 * 86_400, abs=120)


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "token_file"])
@pytest.mark.parametrize("content", [None, ""])
async def test_an_unusable_file_is_reported(
    guard: AdminSection, tmp_path: Path, missing: str, content: str | None
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    admin = admins.Admin("127.0.0.1:0", list, guard=guard.model_copy(update={missing: path}))
    with pytest.raises(UStatusError, match=f"admin.{missing} {path}.* can't be used"):
        await admin.open()
    await admin.close()
