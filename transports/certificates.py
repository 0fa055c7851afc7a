"""Certificates in files: loaded again after a renewal, checked, and reported before they expire.

files -> KeptFiles: changed? -> a new SSLContext; if a pair can't be loaded (half-written, say) the last one is kept
CertificateFile, one for each setting -> mistake: for `up-streamer check`
                                      -> expires_s: for metric, notes and log of the streamer
"""

from __future__ import annotations

import contextlib
import functools
import re
import ssl
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
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
        return f"has expired at {date_of(end)}: renew it"
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


def date_of(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
