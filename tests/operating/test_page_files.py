"""The admin port gives the page to everybody, and what it shows only to those who may see it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

from streamer.config import AdminSection
from streamer.operating import http_port as ports
from streamer.operating.http_port import PAGE_FOLDER, HttpPort
from tests.operating.fake_gateway import TOKEN, FakeGateway

JSON = {"Content-Type": "application/json"}
MINE = {"Authorization": f"Bearer {TOKEN}"}


async def ask(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    return await asyncio.to_thread(_ask, url, body, headers or {})


def _ask(url: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[int, dict[str, str], str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, dict(headers)), timeout=20) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def files() -> Iterator[tuple[str, Path]]:
    for file in sorted(PAGE_FOLDER.iterdir()):
        yield ("" if file.name == "index.html" else f"page/{file.name}"), file


async def test_the_files_are_open_and_what_they_show_is_not(tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        for path, file in files():
            status, headers, body = await ask(gateway.url + path)
            assert (status, body) == (200, file.read_text())
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
        for path in ("status", "page/", "page/nothing.js", "page/../http_port.py", "nowhere", "page/%2e%2e/admin.py"):
            assert (await ask(gateway.url + path))[0] == 401, path
        status, headers, body = await ask(gateway.url + "status", headers=MINE)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert '"state": "ready"' in body
        for path in ("page/", "page/../http_port.py", "page/%2e%2e/admin.py"):
            assert (await ask(gateway.url + path, headers=MINE))[0] == 404, path


async def test_operations_take_json_from_those_with_the_token_only(tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        url = gateway.url + "operations/subscriptions"
        assert (await ask(url, b'{"limit": 1}', JSON | MINE))[0] == 200
        assert (await ask(url, b'{"limit": 1}', JSON))[0] == 401
        for type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, _, body = await ask(url, b'{"limit": 1}', MINE | {"Content-Type": type})
            assert status == 400
            assert f"expected Content-Type: application/json, got {type!r}" in body.replace('\\"', "'")
        assert len(gateway.calls) == 1


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("localhost:9464", True),
        ("[::1]:9464", True),
        ("10.0.0.7:9464", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:9464", False),
        ("", False),
    ],
)
async def test_without_a_token_no_foreign_name_leads_to_the_page(host: str, is_ours: bool) -> None:
    async with FakeGateway() as gateway:
        for path in ("", "page/main.js", "status"):
            status, _, body = await ask(gateway.url + path, headers={"Host": host})
            assert status == (200 if is_ours else 403 if host else 400), path
            assert is_ours or not host or "admin.token_file" in body


async def test_with_a_token_any_name_will_do(tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        assert (await ask(gateway.url + "status", headers=MINE | {"Host": "gateway.example"}))[0] == 200


async def test_the_name_in_the_configuration_is_ours() -> None:
    port = HttpPort({"/status": lambda: (200, "application/json", b"{}")}, {}, None, AdminSection())
    opened = await port.open("localhost:0")
    try:
        assert (await ask(f"http://localhost:{opened}/", headers={"Host": "LocalHost."}))[0] == 200
    finally:
        await port.close()


class Found(HTMLParser):
    """Collects what a policy would stop, and every reference."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.references: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_script = tag in ("script", "style")
        for name, value in attributes:
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")
            if name in ("src", "href", "action"):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._in_script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, _: str) -> None:
        self._in_script = False


def test_the_page_needs_nothing_from_elsewhere_and_no_inline_script() -> None:
    found = Found()
    found.feed((PAGE_FOLDER / "index.html").read_text())
    assert not found.inline
    ours = {f"/page/{file.name}" for file in PAGE_FOLDER.iterdir()}
    assert all(one.startswith("#") or one == "data:," or one in ours for one in found.references)
    for file in PAGE_FOLDER.glob("*.js"):
        text = file.read_text()
        imported = re.findall(r"from '([^']+)'", text)
        assert set(imported) <= ours, file.name
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http:", "https:"):
            assert forbidden not in text.replace("http://www.w3.org/2000/svg", ""), (file.name, forbidden)
    assert not re.search(r"url\((?!#)|@import", (PAGE_FOLDER / "page.css").read_text())


def test_a_gateway_without_an_admin_port_imports_none_of_it() -> None:
    code = (
        "import sys, streamer.app; sys.exit('aiohttp' in sys.modules or 'streamer.operating.http_port' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_file_has_a_type() -> None:
    assert {file.suffix for file in PAGE_FOLDER.iterdir()} <= set(ports.FILE_TYPES)
