"""Who may ask at the HTTP edge: tokens, hosts, origins."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import HTTPBadRequest, HTTPException, HTTPForbidden, HTTPUnauthorized, Request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from structlog.testing import capture_logs

from campaigns.fuzz.registry import refusing
from streamer.config.edge import HttpSection
from streamer.edge import callers as modules
from streamer.edge.callers import Callers
from streamer.edge.tokens import FILE_BYTES_MAX, MISTAKES_SHOWN_MAX, read_tokens
from streamer.http.places import Places
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

WAIT_S = 20
TOKEN = "c2VjcmV0LW9mLW9uZQ=="
LINE = f"//cloud/8001/1/0 {TOKEN}\n"
TOKENS = st.from_regex(r"\A[A-Za-z0-9._~+/-]{1,40}={0,2}\Z")
ENTITIES = st.builds("//{}/{:X}/1/0".format, st.sampled_from(["cloud", "ecu1.vin123"]), st.integers(1, 0xFFFE))


def asked(headers: Mapping[str, str] | CIMultiDict[str] = {}, host: str | None = "localhost") -> Request:  # noqa: B006
    given_ = CIMultiDict(headers)
    if host is not None:
        given_.add("Host", host)
    return make_mocked_request("GET", "/stream", headers=given_)


async def opened(tokens: Path | None = None, listen: str = "127.0.0.1:8080", **settings: object) -> Callers:
    callers = Callers(HttpSection.model_validate({"listen": listen, "tokens_file": tokens, **settings}), "vehicle1")
    await callers.open()
    return callers


async def refusal(callers: Callers, request: Request) -> HTTPException | None:
    try:
        await callers.of(request)
    except HTTPException as error:
        refused = error
    else:
        return None
    assert refused.text is not None
    assert refused.text.startswith("expected ")
    assert len(refused.text) < 200
    return refused


# The file of tokens


@given(st.dictionaries(TOKENS, ENTITIES, min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_a_file_of_tokens_is_read(clients: dict[str, str], end: str, bom: bool) -> None:
    lines = ["# who may read", "", *(f"  {entity}\t{token} " for token, entity in clients.items())]
    data = codecs.BOM_UTF8 * bom + end.join(lines).encode()
    assert sorted(map(uris.format, read_tokens(data).values())) == sorted(
        uris.format(uris.parse(entity)) for entity in clients.values()
    )


MISTAKES = st.sampled_from(
    [
        (TOKEN, "expected a uEntity and its token, got 1 words"),
        (f"{LINE.strip()} more", "expected a uEntity and its token, got 3 words"),
        (f"{TOKEN} //cloud/8001/1/0", "expected a uEntity such as //cloud/8001/1/0 before the token"),
        (f"//cloud/8001/1/8001 {TOKEN}", "expected a uEntity such as //cloud/8001/1/0 before the token"),
        (f"//*/8001/1/0 {TOKEN}", "expected a uEntity such as //cloud/8001/1/0 before the token"),
        (f"/8001/1/0 {TOKEN}", "expected a uEntity such as //cloud/8001/1/0 before the token"),
        (f"//cloud/8001/1/0 {TOKEN};x", "expected a token of letters"),
        (f"//cloud/8001/1/0 {TOKEN}\u00fc", "expected a token of letters"),
        (LINE.strip(), "again: each client has its own"),
    ]
)


@given(st.lists(MISTAKES, min_size=1, max_size=MISTAKES_SHOWN_MAX))
def test_every_mistake_has_its_line_and_no_token_is_shown(mistakes: list[tuple[str, str]]) -> None:
    text = LINE + "".join(f"# a comment\n{line}\n" for line, _ in mistakes)
    with pytest.raises(UStatusError) as raised:
        read_tokens(text.encode())
    assert raised.value.code == UCode.INVALID_ARGUMENT
    found = raised.value.message.split("; ")
    for number, (one, (_, what)) in enumerate(zip(found, mistakes, strict=True)):
        assert one.startswith(f"line {3 + 2 * number}: ")
        assert what in one
    assert TOKEN.rstrip("=") not in raised.value.message


@given(st.binary(max_size=200))
def test_any_bytes_are_tokens_or_mistakes(data: bytes) -> None:
    with refusing(UCode.INVALID_ARGUMENT):
        assert read_tokens(data)


def test_many_mistakes_are_cut() -> None:
    with pytest.raises(UStatusError, match=r"line 1: .*; line 10: .*; and 90 more$"):
        read_tokens(b"nothing\n" * 100)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("", "it has no token: expected a line such as"),
        ("# nobody\n", "it has no token"),
        (f"{LINE}{TOKEN}\n", "line 2: expected a uEntity and its token"),
        (LINE + "#" * FILE_BYTES_MAX, "expected at most 4 MiB"),
    ],
)
async def test_a_file_that_cant_be_used_ends_the_start(tmp_path: Path, content: str | None, why: str) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UStatusError, match=f"http.tokens_file {file} can't be used: {why}") as raised:
        await opened(file)
    assert raised.value.code == UCode.FAILED_PRECONDITION


# Tokens


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ({"Authorization": f"Bearer {TOKEN}"}, True),
        ({"Authorization": f"bearer  {TOKEN} "}, True),
        ({"Cookie": f"up_token={TOKEN}"}, True),
        ({"Cookie": f"other=1; up_token={TOKEN}"}, True),
        ({"Authorization": "Bearer wrong", "Cookie": f"up_token={TOKEN}"}, False),
        ({}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, False),
        ({"Authorization": f"Bearer {TOKEN}\u00fc"}, False),
        ({"Authorization": f"Basic {TOKEN}"}, False),
        ({"Authorization": TOKEN}, False),
        ({"Cookie": "up_token="}, False),
        ({"Cookie": f"up_tokens={TOKEN}"}, False),
    ],
)
async def test_a_token_says_who_asks(tmp_path: Path, headers: dict[str, str], *, is_known: bool) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"//cloud/8002/1/0 other\n{LINE}")
    callers, request = await opened(file), asked(headers, host="any.example")
    if is_known:
        caller = await callers.of(request)
        assert uris.format(caller) == uris.format(uris.parse("//cloud/8001/1/0"))
        assert callers.still_allowed(request, caller)
        return
    refused = await refusal(callers, request)
    assert isinstance(refused, HTTPUnauthorized)
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")


async def test_without_tokens_everybody_is_one_client() -> None:
    callers = await opened()
    assert uris.format(await callers.of(asked())) == uris.format(uris.parse("//vehicle1/8000/1/0"))
    caller = await (other := await opened(client="//cloud/8001/1/0")).of(asked())
    assert caller == uris.parse("//cloud/8001/1/0")
    assert other.still_allowed(asked(), caller)


async def test_a_changed_file_counts_within_a_second_and_ends_who_is_not_in_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "TOKENS_LOOK_S", 0.01)
    file = tmp_path / "tokens"
    file.write_text(f"{LINE}//cloud/8002/1/0 stays\n")
    callers, places = await opened(file), Places(10)
    running = asyncio.create_task(callers.run(places.look))

    async def stream(token: str) -> None:
        request = asked({"Authorization": f"Bearer {token}"})
        caller = await callers.of(request)
        with places.taken("stream", lambda: callers.still_allowed(request, caller)):
            await asyncio.Event().wait()

    revoked, stays = (asyncio.create_task(stream(token)) for token in (TOKEN, "stays"))
    await asyncio.sleep(0.05)
    file.write_text("//cloud/8002/1/0 stays\n//cloud/8003/1/0 new\n")
    await asyncio.wait({revoked}, timeout=WAIT_S)
    assert (revoked.cancelled(), stays.done(), len(places)) == (True, False, 1)
    assert (await callers.of(asked({"Authorization": "Bearer new"}))).ue_id == 0x8003
    assert not list(callers.conditions())

    with capture_logs() as logs:
        for content, why in ((None, "No such file"), ("half of a", "line 1: expected"), ("", "it has no token")):
            file.unlink(missing_ok=True)
            if content is not None:
                replaced = tmp_path / "new"
                replaced.write_text(content)
                replaced.rename(file)
            await until(lambda why=why: _says(callers, why))  # type: ignore[misc]
            assert (await callers.of(asked({"Authorization": "Bearer new"}))).ue_id == 0x8003, "the last content counts"
    assert len([one for one in logs if one["log_level"] == "warning"]) == 3, "each is logged at once, and once"
    file.write_text("//cloud/8002/1/0 stays\n")
    await until(lambda: not list(callers.conditions()))
    assert not stays.done()
    for task in (running, stays):
        task.cancel()
    await asyncio.wait({running, stays})


def _says(callers: Callers, why: str) -> bool:
    return any(why in one.text and "the last content stays in use" in one.text for one in callers.conditions())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.005)


# Hosts and origins


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("192.0.2.7", True),
        ("192.0.2.7:8080", True),
        ("localhost:8080", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9", True),
        ("[::1]:8080", True),
        ("app.example.com", True),
        ("App.Example.com:443", True),
        ("only.example.com:8443", True),
        ("only.example.com", False),
        ("[2001:db8::1]:8080", True),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.0.2.8", False),
        ("[::2]", False),
        ("]", False),
        ("[", False),
        (":", False),
    ],
)
async def test_without_tokens_a_request_is_for_a_host_of_ours(host: str, *, is_ours: bool) -> None:
    hosts = ["app.example.com", "only.example.com:8443", "2001:db8::1"]
    callers = await opened(listen="192.0.2.7:8080", hosts=hosts)
    refused = await refusal(callers, asked(host=host))
    assert refused is None if is_ours else isinstance(refused, HTTPForbidden)


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
async def test_a_request_has_one_host(hosts: tuple[str, ...]) -> None:
    headers = CIMultiDict([("Host", host) for host in hosts])
    assert isinstance(await refusal(await opened(), asked(headers, None)), HTTPBadRequest)


ORIGINS = [
    # origin, allowed without TLS at https.example, and with it
    (None, True, True),
    ("https://app.example.com", True, True),
    ("HTTPS://App.Example.com", True, True),
    ("https://app.example.com:8443", False, False),
    ("http://app.example.com", False, False),
    ("https://edge.example", True, True),
    ("http://edge.example", True, False),
    ("https://edge.example:444", False, False),
    ("https://evil.example", False, False),
    ("https://edge.example.evil.example", False, False),
    ("ftp://edge.example", False, False),
    ("null", False, False),
    ("", False, False),
    ("https://", False, False),
    ("https://[", False, False),
]


@pytest.mark.parametrize(("origin", "plain", "tls"), ORIGINS)
@pytest.mark.parametrize("shown", ["bearer", "cookie", "nothing"])
async def test_pages_ask_if_they_are_ours_or_listed(
    tmp_path: Path, origin: str | None, shown: str, *, plain: bool, tls: bool
) -> None:
    file = tmp_path / "tokens"
    file.write_text(LINE)
    tokens = file if shown != "nothing" else None
    headers = {"bearer": {"Authorization": f"Bearer {TOKEN}"}, "cookie": {"Cookie": f"up_token={TOKEN}"}}.get(shown, {})
    request = asked(headers | ({} if origin is None else {"Origin": origin}), host="edge.example")
    for is_allowed, certificate in ((plain, None), (tls, tmp_path / "edge.pem")):
        callers = await opened(
            tokens,
            hosts=["edge.example"],
            origins=["https://app.example.com"],
            cert_file=certificate,
        )
        refused = await refusal(callers, request)
        assert refused is None if is_allowed else isinstance(refused, HTTPForbidden)
        cors = callers.cors(request)
        assert cors["Vary"] == "Origin", "whatever is kept on the way is kept for one origin"
        assert cors.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
        assert ("Access-Control-Allow-Credentials" in cors) == (is_allowed and origin is not None)
        if is_allowed:
            answer = callers.preflight(request)
            assert (answer.status, answer.headers["Access-Control-Allow-Methods"]) == (204, "GET")
            assert "Authorization" in answer.headers["Access-Control-Allow-Headers"]
        else:
            with pytest.raises(HTTPForbidden):
                callers.preflight(request)


async def test_a_page_may_send_the_headers_that_its_libraries_add() -> None:
    callers = await opened(origins=["https://app.example.com"])
    headers = {"Origin": "https://app.example.com", "Access-Control-Request-Headers": "authorization,x-requested-with"}
    assert (
        callers.preflight(asked(headers)).headers["Access-Control-Allow-Headers"] == "authorization, x-requested-with"
    )


async def test_a_refusal_says_what_came() -> None:
    refused = await refusal(await opened(), asked({"Origin": "https://other.example"}))
    assert refused is not None
    assert refused.text == (
        "expected a page of an origin that is listed in http.origins, got 'https://other.example'\n"
    )
    refused = await refusal(await opened(), asked({}, host="other.example:80"))
    assert refused is not None
    assert refused.text == "expected a Host that is named in http.hosts, got 'other.example:80'\n"


@pytest.mark.parametrize(
    ("site", "is_allowed"), [("same-origin", True), ("none", True), ("cross-site", False), ("same-site", False)]
)
async def test_what_a_foreign_page_loads_without_saying_its_origin_is_refused(site: str, *, is_allowed: bool) -> None:
    """An image, say: its request has the cookies of who looks at the page."""
    refused = await refusal(await opened(), asked({"Sec-Fetch-Site": site}))
    assert (refused is None) == is_allowed


async def test_two_origins_are_none() -> None:
    headers = CIMultiDict([("Origin", "http://localhost"), ("Origin", "http://localhost")])
    assert isinstance(await refusal(await opened(), asked(headers)), HTTPForbidden)
