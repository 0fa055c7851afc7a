"""When the certificates of the configuration expire, as a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamer import building
from streamer.assembly import Assembly, Attached
from streamer.config import Config, EndpointSection
from streamer.part import Part, Parts
from streamer.reporting import Sample
from transports import certificates
from transports.certificates import Expiries


class CertificatePart(Part):
    name = "certificates"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        config = assembly.config
        used = (file for file in building.certificates_of(config) if file[0] or config.streamer.admin is not None)
        self.expiries = Expiries(used, assembly.runtime.now_ms)

    async def start(self) -> None:
        await self.expiries.look()

    async def run(self) -> None:
        await self.expiries.run()

    def notes(self) -> Iterator[str]:
        yield from self.expiries.notes()

    def samples(self) -> Iterator[Sample]:
        for endpoint, setting, expires_s in self.expiries:
            yield "certificate_expires_seconds", (endpoint, setting), expires_s

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        self.expiries.add(section.name, building.certificates_of_endpoint(section))

    def pumps_removed(self, attached: Attached) -> None:
        self.expiries.remove(attached.endpoint.name)

    def change(self, old: Config, new: Config, checked: Any) -> None:
        for owner, files in (("", new.admin.certificate_files), (certificates.EDGE, new.http.certificate_files)):
            self.expiries.remove(owner)
            self.expiries.add(owner, files if owner or new.streamer.admin is not None else ())
