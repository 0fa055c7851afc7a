"""Certificates in files: loaded again after a renewal, checked, and reported before they expire.

files -> KeptFiles: changed? -> a new SSLContext; if a pair can't be loaded (half-written, say) the last one is kept
CertificateFile, one for each setting -> mistake: for `up-streamer check`
                                      -> Expiries: read every FILES_LOOK_S -> metric, notes, a log line for each change
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import structlog

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

FILES_LOOK_S: Final = 2.0  # between two checks whether a file has changed, which costs a stat of each
DAY_S: Final = 86_400
SOON_S: Final = 14 * DAY_S  # so long before its expiry a certificate is reported
EDGE: Final = "[http]"  # in place of an endpoint's name, which can't be that
FILE_BYTES_MAX: Final = 4 << 20  # the bundle of a system has 250 KiB

_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

log = structlog.get_logger()
T = TypeVar("T")

FileStamp = tuple[
    tuple[int, int, int] | None, ...
]  # of each file: modified at (ns), inode, bytes; None: it is not there


@dataclass(frozen=True, slots=True)
class CertificateFile:
    """A PEM file that a setting names. `is_ca`: other certificates are checked against those in it."""

    setting: str  # such as "tls.cert_file", below the settings of its endpoint
    path: Path
    key: Path | None = None  # of the first certificate
    is_ca: bool = False


def stamp(files: Iterable[Path | None]) -> FileStamp:
    """Changes when one of `files` does. Blocks."""

    def one(file: Path) -> tuple[int, int, int] | None:
        try:
            found = file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    return tuple(one(file) for file in files if file is not None)


class KeptFiles(Generic[T]):
    """An object that `make` makes from `files`, made again when they change. Its methods block; threads may share
    it."""

    def __init__(self, files: Sequence[Path | None], make: Callable[[], T]) -> None:
        """`make` raises UStatusError if the files can't be used."""
        self._files, self._make = files, make
        self._lock = threading.Lock()
        self._stamp: FileStamp = ()
        self._made: T | None = None
        self.trouble = ""  # why the last one is still in use

    def __repr__(self) -> str:
        return f"KeptFiles({[str(file) for file in self._files if file is not None]}, trouble={self.trouble!r})"

    def current(self) -> T:
        """Returns the object, made again if a file has changed. If that fails the last one is kept, `trouble` says why,
        and the next call tries again. If there was never one, raises the exception of `make`."""
        with self._lock:
            now = stamp(self._files)  # before they are read: the next call notices later changes
            if self._made is not None and now == self._stamp:
                self._set_trouble("")
                return self._made
            try:
                made = self._make()
            except UStatusError as error:
                if self._made is None:
                    raise
                self._set_trouble(f"{error.message}; the last content stays in use until then")
                return self._made
            if self._made is not None:
                log.info("changed files were read again", files=[str(file) for file in self._files if file])
            self._made, self._stamp = made, now
            self._set_trouble("")
            return made

    def _set_trouble(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("changed files can't be used yet", why=trouble)
        self.trouble = trouble


TlsFiles = KeptFiles[ssl.SSLContext]


def read(file: CertificateFile) -> list[Certificate]:
    """The readable certificates in `file`, at least one, in order. Blocks. Raises UStatusError(FAILED_PRECONDITION).

    Unreadable ones are skipped: some in the bundle of a system may be odd, and OpenSSL accepts the bundle.
    """
    try:
        with file.path.open("rb") as opened:
            blocks = _PEM.findall(opened.read(FILE_BYTES_MAX))
    except OSError as error:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"can't be read: {error.strerror}") from None
    found = []
    for block in blocks:
        with contextlib.suppress(ValueError):
            found.append(_x509().load_pem_x509_certificate(block))
    if not found:
        why = "holds no certificate in PEM form (-----BEGIN CERTIFICATE-----), or a damaged one"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)
    return found


@functools.cache
def _x509() -> ModuleType:
    """Imported only if there are certificates: 0.1 s and 9 MiB."""
    from cryptography import x509
    from cryptography.utils import CryptographyDeprecationWarning

    # these warnings concern certificates that we can't change, and standard error is for the log
    warnings.filterwarnings("ignore", category=CryptographyDeprecationWarning)
    return x509


def expires_s(file: CertificateFile) -> float:
    """Unix seconds: the first expiry in our own chain; the last one of CA certificates, since an old and a new CA are
    both in the file during a replacement. Blocks. Raises as `read`."""
    ends = [one.not_valid_after_utc.timestamp() for one in read(file)]
    return max(ends) if file.is_ca else min(ends)


def expires_of(certificate: bytes) -> float:
    """Unix seconds: the expiry of a certificate in DER form."""
    ends: datetime = _x509().load_der_x509_certificate(certificate).not_valid_after_utc
    return ends.timestamp()


def mistake(file: CertificateFile, now_s: float) -> str:
    """Why TLS can't work with `file`, what was expected and what to do; "" if nothing is wrong. Blocks."""
    try:
        certificates = read(file)
        end = expires_s(file)
    except UStatusError as error:
        return error.message
    if end <= now_s:
        return f"has expired at {_date(end)}: renew it"
    if file.is_ca and not any(_may_be_trusted(one) for one in certificates):
        return "holds no certificate of a CA (basicConstraints CA:TRUE, or self-signed): name the file of the CA"
    return "" if file.key is None else _pair_mistake(file.path, file.key)


def _may_be_trusted(certificate: Certificate) -> bool:
    """It is that of a CA, or self-signed."""
    if certificate.issuer == certificate.subject:
        return True
    with contextlib.suppress(_x509().ExtensionNotFound, ValueError):
        return bool(certificate.extensions.get_extension_for_class(_x509().BasicConstraints).value.ca)
    return False


def _pair_mistake(certificate: Path, key: Path) -> str:
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"belongs to another key than {key}: name the key that it was made with"
        return f"and its key {key} can't be used: {error}"
    except (OSError, ValueError) as error:
        return f"and its key {key} can't be used: {error}"
    return ""


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load both into `context`. Raises OSError (SSLError is one), or ValueError for a key with a passphrase."""
    context.load_cert_chain(certificate, key, password="")  # without, OpenSSL asks on the terminal


def client_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Trusts the certificates in `ca` (None: the system's), and shows our own. Blocks. Raises FAILED_PRECONDITION."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None and key is not None:
            load_pair(context, certificate, key)
    except (OSError, ValueError) as error:
        files = ", ".join(str(file) for file in (ca, certificate, key) if file is not None)
        raise UStatusError(UCode.FAILED_PRECONDITION, f"the TLS files {files} can't be used: {error}") from None
    return context


@dataclass(slots=True)
class _WatchedFile:
    owner: str  # the endpoint's name; "": the admin port; EDGE
    file: CertificateFile
    stamp: FileStamp = ()
    expires_s: float | None = None  # None: it can't be read
    trouble: str = ""
    state: str | None = None  # as last logged; None: not read yet


class Expiries:
    """When the configured certificates expire. `run` is its only task; everything else may be called at any time."""

    def __init__(self, files: Iterable[tuple[str, CertificateFile]], now_ms: Callable[[], int]) -> None:
        """`files`: with the name of the endpoint, "" for the admin port, EDGE. `now_ms`: Unix milliseconds."""
        self._known = [_WatchedFile(owner, file) for owner, file in files]
        self._now_ms = now_ms

    def add(self, owner: str, files: Iterable[CertificateFile]) -> None:
        """They are read at the next `look`."""
        self._known = [*self._known, *(_WatchedFile(owner, file) for file in files)]

    def remove(self, owner: str) -> None:
        self._known = [one for one in self._known if one.owner != owner]

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[tuple[str, str, float]]:
        """Endpoint, setting, and expiry in Unix seconds."""
        return ((one.owner, one.file.setting, one.expires_s) for one in self._known if one.expires_s is not None)

    async def run(self) -> None:
        """Check the files every FILES_LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(FILES_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the files that have changed, and log changes of their state. The first call logs nothing: the notes
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
        left_s = one.expires_s - self._now_ms() / 1000
        return "expired" if left_s <= 0 else "soon" if left_s < SOON_S else ""

    def notes(self) -> list[str]:
        """A sentence for each certificate that expires within SOON_S, has expired, or can't be read."""
        return [self._sentence(one) for one in self._known if self._state(one)]

    def _sentence(self, one: _WatchedFile) -> str:
        whose = {"": "the admin port", EDGE: "the HTTP edge"}.get(one.owner, f"endpoint {one.owner}")
        what = f"{whose}: {one.file.setting} {one.file.path}"
        if one.expires_s is None:
            return f"{what} {one.trouble}"
        days, ends = (one.expires_s - self._now_ms() / 1000) / DAY_S, _date(one.expires_s)
        if days <= 0:
            return f"{what} has expired at {ends}: renew it; no restart is needed"
        return f"{what} expires in {days:.0f} days, at {ends}: renew it; no restart is needed"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
