"""The file of tokens: a line for each client, its uEntity and its token (`//cloud/8001/1/0 TOKEN`).

A uEntity may have several tokens: a new one beside the old one, until all have it.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from pathlib import Path
from typing import Final

from streamer.config.edge import client_entity
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

FILE_BYTES_MAX: Final = 4 << 20  # some 50,000 tokens, parsed in 0.2 s
MISTAKES_SHOWN_MAX: Final = 10

Tokens = dict[bytes, UUri]  # by the SHA-256 of the token

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750; all of it may stand in a cookie, too


def read_tokens(data: bytes) -> Tokens:
    """Returns the clients by the digest of their tokens. Raises INVALID_ARGUMENT: every mistake with its line, and
    never a token."""
    found, lines, mistakes = Tokens(), dict[bytes, int](), list[str]()
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        fields = raw.split()
        if not fields or fields[0].startswith(b"#"):
            continue
        entity = _entity(fields[0])
        digest = digest_of(fields[1]) if len(fields) == 2 else b""
        if len(fields) != 2:
            what = f"expected a uEntity and its token, got {len(fields)} words"
        elif entity is None:  # it may be a token in the wrong place
            what = "expected a uEntity such as //cloud/8001/1/0 before the token"
        elif not _TOKEN.fullmatch(fields[1].decode(errors="replace")):
            what = "expected a token of letters, digits, and -._~+/, with = at its end only"
        elif digest in found:
            what = f"the token of line {lines[digest]} again: each client has its own"
        else:
            found[digest], lines[digest] = entity, number
            continue
        mistakes.append(f"line {number}: {what}")
    if mistakes:
        more = [f"and {len(mistakes) - MISTAKES_SHOWN_MAX} more"] if len(mistakes) > MISTAKES_SHOWN_MAX else []
        raise invalid("; ".join(mistakes[:MISTAKES_SHOWN_MAX] + more))
    if not found:
        raise invalid("it has no token: expected a line such as '//cloud/8001/1/0 TOKEN' for each client")
    return found


def _entity(field: bytes) -> UUri | None:
    try:
        return client_entity(field.decode())
    except (UStatusError, UnicodeDecodeError):
        return None


def digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def read_file(path: Path) -> Tokens:
    """Raises FAILED_PRECONDITION if the file can't be used."""
    try:
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise invalid(f"expected at most {FILE_BYTES_MAX >> 20} MiB")
        return read_tokens(data)
    except OSError as error:
        why = str(error.strerror)
    except UStatusError as error:
        why = error.message
    raise UStatusError(UCode.FAILED_PRECONDITION, f"http.tokens_file {path} can't be used: {why}")
