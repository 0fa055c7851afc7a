"""A streamer with recovery sources, on in-process networks."""

from __future__ import annotations

from tests.streamer.conftest import make_world as make_world
