"""Asks backends for what was missed: the address of a Grip-Link.

url, last ids -> GET with Grip-Last for each channel, and Grip-Sig -> answer: status, body, Grip headers
                                                         'with a link, without a hold: the next page, at once
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urljoin, urlsplit, urlunsplit

import aiohttp
from yarl import URL

from streamer.grip.headers import Instruction, grip_last
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

LINK_TIMEOUT_S: Final = 10.0  # for a whole answer
LINK_ANSWER_BYTES_MAX: Final = 4 << 20
LINK_PAGES_MAX: Final = 100
PAGES_BYTES_MAX: Final = 16 << 20  # of all pages
CONNECTIONS_MAX: Final = 32  # more requests wait for one of these; a connection that is idle is kept for a while

Sign = Callable[[], Awaitable[str | None]]  # returns the value of Grip-Sig


class LinkAnswer(NamedTuple):
    """An answer of status 200 to 299."""

    status: int
    body: bytes
    instruction: Instruction


class Links:
    """Asks links, over connections that it keeps until `close`. Cookies are not kept, redirects not followed."""

    def __init__(
        self,
        sign: Sign | None = None,
        *,
        timeout_s: float = LINK_TIMEOUT_S,
        answer_bytes_max: int = LINK_ANSWER_BYTES_MAX,
    ) -> None:
        self._sign, self._timeout_s, self._answer_bytes_max = sign, timeout_s, answer_bytes_max
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, url: str, last_ids: Mapping[str, str], host: str = "") -> LinkAnswer:
        """Asks `url` for what came after the `last_ids` of channels. `host`: the Host header; "": that of `url`.

        Raises UNAVAILABLE if the backend is away, too slow, or answers with 408, 429 or 5xx; FAILED_PRECONDITION for
        other statuses than 2xx, for Grip headers that can't be read, and for an address that can't be asked;
        RESOURCE_EXHAUSTED if the answer is too large.
        """
        headers = [("Grip-Last", value) for value in grip_last(last_ids)]
        if host:
            headers.append(("Host", host))
        if self._sign is not None and (signature := await self._sign()) is not None:
            headers.append(("Grip-Sig", signature))
        try:
            return await self._get(url, headers)
        except TimeoutError:
            raise _away(f"the link {place_of(url)} has not answered within {self._timeout_s:g} s") from None
        except (aiohttp.InvalidURL, ValueError) as error:
            raise _wrong(f"the link {place_of(url)!r} can't be asked: {reason_of(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _away(f"the link {place_of(url)} can't be reached, or breaks off: {reason_of(error)}") from None

    async def pages(self, url: str, last_ids: Mapping[str, str]) -> AsyncIterator[LinkAnswer]:
        """Yields the answer of `url`, and at once those of the links of answers without `Grip-Hold`: their Grip-Last
        has the ids of the answers before. The last answer says how the hold goes on.

        Raises as `ask`, and RESOURCE_EXHAUSTED for more pages or bytes than are allowed.
        """
        last, size = dict(last_ids), 0
        for _ in range(LINK_PAGES_MAX):
            answer = await self.ask(url, last)
            size += len(answer.body)
            if size > PAGES_BYTES_MAX:
                raise _too_much(f"the pages of the link {place_of(url)} have more than {PAGES_BYTES_MAX} bytes")
            yield answer
            said = answer.instruction
            if said.hold is not None or said.link is None:
                return
            last.update(
                {one.name: one.prev_id for one in said.channels if one.name in last and one.prev_id is not None}
            )
            url = resolved(url, said.link.url)
        raise _too_much(f"the link has more than {LINK_PAGES_MAX} pages: {place_of(url)} would be one more")

    async def _get(self, url: str, headers: list[tuple[str, str]]) -> LinkAnswer:
        is_quoted = url.isascii() and " " not in url  # asked as it is written
        async with self._opened().get(URL(url, encoded=is_quoted), headers=headers, allow_redirects=False) as response:
            status, body = response.status, bytearray()
            if status >= 500 or status in (408, 429):
                raise _away(f"the link {place_of(url)} has answered {status}")
            if not 200 <= status < 300:
                raise _wrong(f"the link {place_of(url)} has answered {status}; expected 200 to 299")
            try:
                instruction = Instruction.of(response.headers.items())
            except UStatusError as error:
                raise _wrong(f"the answer of the link {place_of(url)} can't be read: {error.message}") from None
            async for part in response.content.iter_any():
                body += part
                if len(body) > self._answer_bytes_max:
                    raise _too_much(
                        f"the answer of the link {place_of(url)} has more than {self._answer_bytes_max} bytes"
                    )
        return LinkAnswer(status, bytes(body), instruction)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "up-streamer"},
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        return self._session


def resolved(url: str, link: str) -> str:
    """Returns the address of a link in an answer of `url`: at the backend that has answered, whatever host the link
    names, since that may be the public one. Raises FAILED_PRECONDITION."""
    try:
        here, there = urlsplit(url), urlsplit(urljoin(url, link))
    except ValueError as error:
        raise _wrong(f"the link {link!r} in an answer of {place_of(url)} is no address: {error}") from None
    return urlunsplit((here.scheme, here.netloc, there.path or "/", there.query, ""))


def place_of(url: str) -> str:
    """Returns an address as it may be shown: a query may have what is secret."""
    return url.partition("?")[0]


def reason_of(error: Exception) -> str:
    """Returns why a request has failed. The texts of some errors have the address, or headers of the answer."""
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is no HTTP that can be read"
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        return "the address is malformed"
    return str(error) or type(error).__name__


def _away(why: str) -> UStatusError:
    return UStatusError(UCode.UNAVAILABLE, why)


def _wrong(why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, why)


def _too_much(why: str) -> UStatusError:
    return UStatusError(UCode.RESOURCE_EXHAUSTED, why)
