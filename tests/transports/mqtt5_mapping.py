"""The mapping of MQTT 5 with a clock of its own, for tests without a PublishCodec."""

from __future__ import annotations

from collections.abc import Callable

from transports.mqtt5 import mapping
from transports.mqtt5.mapping import FRESH_MS_MAX, Mode, Packet, TtlReading
from uprotocol import uuid as uuids
from uprotocol.v1.umessage_pb2 import UMessage


class Mapping(mapping.Mapping):
    def __init__(
        self,
        mode: Mode,
        local_authority: str,
        *,
        ttl_reading: TtlReading = TtlReading.RESTORED,
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        super().__init__(mode, local_authority, ttl_reading=ttl_reading)
        self._now_ms = now_ms

    def encode(self, message: UMessage, *, is_late: bool | None = None) -> Packet:
        if is_late is None:
            is_late = self._now_ms() - uuids.time_ms(message.attributes.id) > FRESH_MS_MAX
        return super().encode(message, is_late=is_late)

    def decode(self, packet: Packet) -> UMessage:
        return self.read(packet, self._now_ms())[0]
