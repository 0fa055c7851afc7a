"""What the HTTP edge is made of, and what it needs. It imports nothing that only the edge needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from streamer.config import Config
from streamer.reporting import Reporter
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from streamer.edge.server import Handler
    from streamer.grip.channels import Channels

EXTRA: Final = {"aiohttp_sse": "aiohttp-sse", "jwt": "pyjwt"}  # modules of the extra `http`, and their packages


class Handlers(NamedTuple):
    """What answers requests; the rest of the edge does not know what they mean."""

    channels: Channels | None = None
    stream: Handler | None = None  # GET /stream; wherever http.listen is configured
    proxied: Handler | None = None  # everything else at http.listen; None: 404
    publish: Handler | None = None  # POST /publish/; wherever grip.publish is configured
    reporters: Sequence[Reporter] = ()
    opening: Sequence[Callable[[], Awaitable[object]]] = ()  # called before the ports are open; may raise UStatusError
    closing: Sequence[Callable[[], None]] = ()  # called before the ports close
    closed: Sequence[Callable[[], Awaitable[None]]] = ()  # called when no request is left


def is_wanted(config: Config) -> bool:
    return config.http.listen is not None or config.grip.publish is not None


def check_extra(config: Config) -> None:
    """Raises FAILED_PRECONDITION if the edge is configured and a package that it needs is missing."""
    missing = [package for module, package in EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing and is_wanted(config):
        why = f"the HTTP edge needs {' and '.join(missing)}: try pip install {' '.join(missing)} (the extra 'http')"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)
