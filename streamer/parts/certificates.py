"""When the certificates of the configuration expire, as a part.

files, read again when they have changed: every FILES_LOOK_S -> metric, notes, a log line for each change
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog

from streamer import building
from streamer.assembly import Assembly, Attached
from streamer.config import Config, EndpointSection
from streamer.part import Part, Parts
from streamer.reporting import Sample
from transports import certificates
from transports.certificates import FILES_LOOK_S, CertificateFile, FileStamp, date_of, expires_s, stamp
from uprotocol.status import UStatusError

DAY_S: Final = 86_400
SOON_S: Final = 14 * DAY_S  # so long before its expiry a certificate is reported

log = structlog.get_logger()


@dataclass(slots=True)
class _WatchedFile:
    """The state of one file."""

    owner: str  # the endpoint's name; "": the admin port; EDGE
    file: CertificateFile
    stamp: FileStamp = ()
    expires_s: float | None = None  # None: it can't be read
    trouble: str = ""
    state: str | None = None  # as last logged; None: not read yet


class CertificatePart(Part):
    name = "certificates"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        config = assembly.config
        used = (file for file in building.certificates_of(config) if file[0] or config.streamer.admin is not None)
        self._known = [_WatchedFile(owner, file) for owner, file in used]

    def add(self, owner: str, files: Iterable[CertificateFile]) -> None:
        """They are read at the next `look`."""
        self._known = [*self._known, *(_WatchedFile(owner, file) for file in files)]

    def _remove(self, owner: str) -> None:
        self._known = [one for one in self._known if one.owner != owner]

    def __iter__(self) -> Iterator[tuple[str, str, float]]:
        """Endpoint, setting, and expiry in Unix seconds."""
        return ((one.owner, one.file.setting, one.expires_s) for one in self._known if one.expires_s is not None)

    async def start(self) -> None:
        await self.look()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FILES_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Reads the files that have changed, and logs changes of their state. The first call logs nothing: the notes
        report that state."""
        if self._known:
            await asyncio.to_thread(self._read_changed)
        for one in self._known:
            self._log_change(one)

    def _read_changed(self) -> None:
        for one in self._known:
            now = stamp([one.file.path])
            if now == one.stamp and not one.trouble:
                continue
            try:
                one.expires_s, one.trouble = expires_s(one.file), ""
            except UStatusError as error:
                one.expires_s, one.trouble = None, error.message
            one.stamp = now

    def _log_change(self, one: _WatchedFile) -> None:
        before, one.state = one.state, self._state(one)
        if before is None or before == one.state:
            return
        if one.state:
            log.warning("a certificate needs attention", why=self._sentence(one))
        else:
            log.info("a certificate was renewed", endpoint=one.owner, path=str(one.file.path))

    def _state(self, one: _WatchedFile) -> str:
        if one.expires_s is None:
            return one.trouble  # "" before the first look
        left_s = one.expires_s - self.assembly.runtime.now_ms() / 1000
        return "expired" if left_s <= 0 else "soon" if left_s < SOON_S else ""

    def notes(self) -> list[str]:
        """Returns a sentence for each certificate that expires within SOON_S, has expired, or can't be read."""
        return [self._sentence(one) for one in self._known if self._state(one)]

    def samples(self) -> Iterator[Sample]:
        for endpoint, setting, ends_s in self:
            yield "certificate_expires_seconds", (endpoint, setting), ends_s

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        self.add(section.name, building.certificates_of_endpoint(section))

    def pumps_removed(self, attached: Attached) -> None:
        self._remove(attached.endpoint.name)

    def change(self, old: Config, new: Config, checked: Any) -> None:
        for owner, files in (("", new.admin.certificate_files), (certificates.EDGE, new.http.certificate_files)):
            self._remove(owner)
            self.add(owner, files if owner or new.streamer.admin is not None else ())

    def _sentence(self, one: _WatchedFile) -> str:
        whose = {"": "the admin port", certificates.EDGE: "the HTTP edge"}.get(one.owner, f"endpoint {one.owner}")
        what = f"{whose}: {one.file.setting} {one.file.path}"
        if one.expires_s is None:
            return f"{what} {one.trouble}"
        days, ends = (one.expires_s - self.assembly.runtime.now_ms() / 1000) / DAY_S, date_of(one.expires_s)
        if days <= 0:
            return f"{what} has expired at {ends}: renew it; no restart is needed"
        return f"{what} expires in {days:.0f} days, at {ends}: renew it; no restart is needed"
