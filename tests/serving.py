"""Serves a web application on loopback, for tests of what asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    """Yields its address, without a slash at the end."""
    async with TestServer(application) as server:
        yield f"http://{server.host}:{server.port}"
