"""The other process of the test with two: it sends every notification back to its sender, from a topic of its own.

python -m transports.conformance.peer MODULE:PLUGIN AUTHORITY JSON_SETTINGS     prints "ready"; ends at the end of its
input
"""

from __future__ import annotations

import asyncio
import json
import pkgutil
import sys
from collections.abc import Sequence

import structlog

from transports.plugin import TransportPlugin
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage

ENTITY, VERSION, TOPIC = 0x0003_10AB, 4, 0x9A01


class Echo:
    """Sends each batch back to the authorities of its sources."""

    def __init__(self, transport: UTransport, local: LocalUriProvider) -> None:
        self._transport, self._local = transport, local

    async def on_receive(self, message: UMessage) -> None:
        await self.on_receive_batch([message])

    async def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for status in await self._transport.send_batch([self._back(message) for message in messages]):
            if status.code:
                raise UStatusError.from_status(status)

    def _back(self, message: UMessage) -> UMessage:
        source = message.attributes.source
        sink = uris.uri(source.authority_name, source.ue_id, source.ue_version_major, 0)
        builder = UMessageBuilder.notification(self._local.get_resource(TOPIC), sink)
        return builder.build_from_upayload(UPayload.of(message))


async def serve(plugin: TransportPlugin, authority: str, settings: dict[str, object]) -> None:
    local = LocalUriProvider(authority, ENTITY, VERSION)
    async with plugin.create(plugin.config.model_validate(settings), local) as transport:
        anything = uris.pattern(resource=uris.WILDCARD_RESOURCE)
        await transport.register_listener(anything, Echo(transport, local), local.get_source())
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main(name: str, authority: str, settings: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for "ready"
    asyncio.run(serve(pkgutil.resolve_name(name), authority, json.loads(settings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
