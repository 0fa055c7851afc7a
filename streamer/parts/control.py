"""Pause and resume by RPC, as a part.

core.ustreamer: Pause, Resume, ListPaused -> does [dispatch] control name the caller? -> Paused
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamer.assembly import HOSTED_DRAIN_MS_MAX, Assembly
from streamer.config import Config
from streamer.part import Part, Parts
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.ustreamer.ids import LIST_PAUSED, PAUSE, RESUME
from uprotocol.core.ustreamer.v1 import ustreamer_pb2 as wire
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage


class ControlPart(Part):
    """Serves callers that [dispatch] control names, and no others."""

    name = "control"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._paused = assembly.paused
        self._allow(assembly.config.dispatch.control)
        self._server = InMemoryRpcServer(
            assembly.hosted, assembly.local, check=self._check, drain_ms_max=HOSTED_DRAIN_MS_MAX
        )

    def _allow(self, texts: Iterable[str]) -> None:
        own = self.assembly.local.get_authority()
        self._allowed = [uris.with_authority(uris.parse(text), own) for text in texts]

    async def start(self) -> None:
        await self._server.register_request_handler(PAUSE, self._pause)
        await self._server.register_request_handler(RESUME, self._resume)
        await self._server.register_request_handler(LIST_PAUSED, self._list)

    async def stop(self) -> None:
        await self._server.close()

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self._allow(new.dispatch.control)

    def _check(self, request: UMessage) -> None:
        source = request.attributes.source
        if not any(uris.matches(pattern, source) for pattern in self._allowed):
            why = f"{uris.format(source)} may not stop or start dispatching: [dispatch] control does not name it"
            raise UStatusError(UCode.PERMISSION_DENIED, why)

    async def _pause(self, request: UMessage) -> wire.PauseResponse:
        asked = UPayload.of(request).unpack(wire.PauseRequest)
        await self._paused.pause(asked.topic, asked.peer)
        return wire.PauseResponse()

    async def _resume(self, request: UMessage) -> wire.ResumeResponse:
        asked = UPayload.of(request).unpack(wire.ResumeRequest)
        return wire.ResumeResponse(ended=await self._paused.resume(asked.topic, asked.peer))

    def _list(self, _: UMessage) -> wire.ListPausedResponse:
        found = wire.ListPausedResponse()
        for pause in sorted(self._paused):
            if not pause.origin:  # the message has no place for it: only operators of this machine pause rules
                found.paused.add(topic=uris.parse(pause.topic), peer=pause.peer)
        return found
