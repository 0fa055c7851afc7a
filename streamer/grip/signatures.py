"""The JWT of GRIP, HS256: publishers sign their requests, the edge signs its requests to backends.

file of a key: the key itself, or base64:KEY, as in Pushpin's configuration; it is read again when it has changed
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import jwt

from streamer.reporting import Condition, Reporter
from transports.certificates import KeptFiles
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

ALGORITHM: Final = "HS256"
KEY_BYTES_MIN: Final = 32  # RFC 7518, section 3.2: as long as the hash
LEEWAY_S: Final = 10  # clocks differ
SIGNATURE_S: Final = 3_600  # for which a Grip-Sig is valid
RENEW_S: Final = 300  # a Grip-Sig is used for so long


class _KeyFile(Reporter):
    """A key in a file, which is read at once: this blocks for a moment. Raises FAILED_PRECONDITION if it can't be."""

    def __init__(self, path: Path) -> None:
        self._files = KeptFiles([path], lambda: read_key(path))
        self._files.current()

    async def get(self) -> bytes:
        """Returns the key of now; the last one if a new one can't be read."""
        return await asyncio.to_thread(self._files.current)

    def conditions(self) -> Iterator[Condition]:
        if self._files.trouble:
            yield Condition(self._files.trouble)


class PublisherKey(_KeyFile):
    async def check(self, authorization: str | None) -> None:
        """Checks the header `Authorization` of a request. Raises UNAUTHENTICATED."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise _denied("expected Authorization: Bearer, and a JWT")
        try:
            options: jwt.types.Options = {"require": ["exp"], "verify_aud": False}
            jwt.decode(token.strip(), await self.get(), algorithms=[ALGORITHM], options=options, leeway=LEEWAY_S)
        except jwt.InvalidTokenError as error:
            raise _denied(
                f"expected a JWT ({ALGORITHM}, with exp) that is signed with the key of publishers: {error}"
            ) from None


class Signer(_KeyFile):
    """Makes the value of `Grip-Sig`."""

    def __init__(self, path: Path, issuer: str, now_ms: Callable[[], int] = uuids.now_ms) -> None:
        super().__init__(path)
        self._issuer, self._now_ms = issuer, now_ms
        self._made: tuple[bytes, float, str] = b"", 0.0, ""  # key, time in seconds, signature

    async def sign(self) -> str:
        """Returns a JWT with `iss` and `exp`; the same one for some minutes."""
        key, now = await self.get(), self._now_ms() / 1_000
        used, made_at, made = self._made
        if key != used or not made_at <= now < made_at + RENEW_S:
            made = jwt.encode({"iss": self._issuer, "exp": int(now) + SIGNATURE_S}, key, ALGORITHM)
            self._made = key, now, made
        return made


def read_key(path: Path) -> bytes:
    """Raises FAILED_PRECONDITION if the file has no key."""
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).strip()
        key = base64.b64decode(text[7:], validate=True) if text.startswith(b"base64:") else text
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    except binascii.Error as error:
        raise _unusable(path, f"expected base64 after base64:, {error}") from None
    if len(key) < KEY_BYTES_MIN:
        raise _unusable(path, f"expected {KEY_BYTES_MIN} bytes or more (RFC 7518, section 3.2), got {len(key)}")
    return key


def _unusable(path: Path, why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, f"the key file {path} can't be used: {why}")


def _denied(why: str) -> UStatusError:
    return UStatusError(UCode.UNAUTHENTICATED, why)
