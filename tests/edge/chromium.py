"""A headless Chromium, driven by its DevTools protocol over a WebSocket. Without a Chromium, tests skip."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

WAIT_S = 60
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Chromium:
    """One browser with one page."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """`arguments`: of the program, in addition."""
        self._folder, self._arguments, self._numbers = folder, arguments, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        if program is None:
            pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
        self._process = await asyncio.create_subprocess_exec(
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-port=0", f"--user-data-dir={self._folder}", "--window-size=900,860"),
            *(*self._arguments, "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._session = aiohttp.ClientSession()
        port = await self._port()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=64 << 20)
        self._reading = asyncio.create_task(self._read())
        await self.call("Page.enable")
        return self

    async def _port(self) -> int:
        file = self._folder / "DevToolsActivePort"
        async with asyncio.timeout(WAIT_S):
            while not (file.exists() and file.read_text().strip()):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        return int(file.read_text().split()[0])

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._session.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> None:
        async for message in self._socket:
            answer = message.json()
            if (future := self._answers.pop(answer.get("id", 0), None)) is not None:
                future.set_result(answer)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = future = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, WAIT_S)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Returns the value of an expression; a promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(WAIT_S):
            while not await self.evaluate(condition):  # noqa: ASYNC110 - the page sends no event
                await asyncio.sleep(0.05)

    async def look(self, path: Path, scheme: str = "light") -> None:
        """Save a picture of the page in a colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await asyncio.sleep(0.2)  # drawn with the next frames
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))
