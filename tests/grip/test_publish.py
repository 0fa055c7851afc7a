"""POST /publish/, and GRIP's own libraries as publishers, unchanged."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog
from aiohttp import ClientSession, web
from gripcontrol import GripPubControl, HttpResponseFormat, HttpStreamFormat, parse_grip_uri, validate_sig
from pubcontrol import Item as SentItem
from pubcontrol import PubControl

from streamer.edge.server import PUBLISH_PATH as PATH
from streamer.grip.items import Item, ResponseFormat, StreamFormat
from streamer.grip.publish import PublishHandler
from streamer.grip.signatures import PublisherKey, Signer
from streamer.parts.edge import EdgePart
from tests.grip.test_channels import NETWORKS, channels_of, grip, heard_by, recorded
from tests.serving import serving
from tests.tiers import full
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

KEY = b"a key of thirty-two bytes or more"
APPLE = {"items": [{"channel": "fruit", "http-stream": {"content": "apple"}}]}

Serve = Callable[..., Awaitable[str]]


class Publisher:
    """Takes what is published, or fails with `error`."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.error: UStatusError | None = None

    async def publish(self, items: Sequence[Item]) -> None:
        if self.error is not None:
            raise self.error
        self.items += items


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    return path


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(publish: Any, key: Path | None = None, bytes_max: int = 1 << 20) -> str:
            application = web.Application(client_max_size=1 << 22)
            handler = PublishHandler(publish, None if key is None else PublisherKey(key), bytes_max)
            application.router.add_post(PATH, handler.post)
            return await stack.enter_async_context(serving(application))

        yield start


async def post(url: str, body: Any = APPLE, **headers: str) -> tuple[int, str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    all = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with ClientSession() as session, session.post(url + PATH, data=data, headers=all) as response:
        return response.status, await response.text(), response.headers


def bearer(claims: dict[str, Any], key: bytes = KEY, algorithm: str = "HS256") -> str:
    return f"Bearer {jwt.encode(claims, key, algorithm)}"


async def test_items_are_taken_and_answered_as_pushpin_does(serve: Serve) -> None:
    publisher = Publisher()
    url = await serve(publisher.publish)
    assert (await post(url))[:2] == (200, "Published\n")
    assert (await post(url, APPLE, Content_Type="application/json; charset=utf-8"))[0] == 200
    large = {"items": [{"channel": "fruit", "http-stream": {"content": "x" * 100_000}}]}
    assert (await post(url, large))[0] == 200
    assert [len(item.content) for item in publisher.items] == [5, 5, 100_000]


async def test_what_is_wrong_is_said(serve: Serve) -> None:
    url = await serve(Publisher().publish, bytes_max=4)
    assert (await post(url, APPLE, Content_Type="text/plain"))[:2] == (
        415,
        "expected Content-Type: application/json, got text/plain\n",
    )
    status, text, _ = await post(url)
    assert (status, "items[0]: http-stream: content: expected 4 bytes at most" in text) == (400, True)
    assert (await post(url, b"{"))[0] == 400


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"items": [{"channel": "STRANGE", "http-stream": {"content": "x"}}]}, {}),
        ({"items": [{"channel": "fruit", "http-stream": {"action": "STRANGE"}}]}, {}),
        ({"items": "STRANGE"}, {"Content_Type": "text/STRANGE"}),
    ],
    ids=["channel", "action", "content type"],
)
@pytest.mark.parametrize("signs", [False, True])
async def test_what_a_stranger_sends_does_not_enter_the_log(
    body: Any, headers: dict[str, str], signs: bool, make_world: Any, serve: Serve, key_file: Path
) -> None:
    world = await make_world(NETWORKS, more=grip())
    url = await serve(channels_of(world).publish, key_file if signs else None)
    key = {"Authorization": bearer({"exp": int(time.time()) + 60})} if signs else {}
    with structlog.testing.capture_logs() as logs:
        status, text, _ = await post(url, body, **headers, **key)
    assert status in (400, 415)
    assert "strange" in text.lower(), "who has sent it is told"
    (line,) = (str(one) for one in logs if "status" in one)
    assert ("strange" in line.lower()) == signs


@pytest.mark.parametrize(
    ("code", "status", "header"),
    [
        (UCode.NOT_FOUND, 400, None),
        (UCode.RESOURCE_EXHAUSTED, 429, "1"),
        (UCode.UNAVAILABLE, 503, "1"),
        (UCode.INTERNAL, 500, None),
    ],
)
async def test_errors_of_channels(serve: Serve, code: UCode.ValueType, status: int, header: str | None) -> None:
    publisher = Publisher()
    publisher.error = UStatusError(code, "why")
    answered, text, headers = await post(await serve(publisher.publish))
    assert (answered, text, headers.get("Retry-After")) == (status, "why\n", header)


async def test_publishers_sign(serve: Serve, key_file: Path) -> None:
    publisher, now = Publisher(), int(time.time())
    url = await serve(publisher.publish, key_file)
    good = bearer({"iss": "realm", "exp": now + 60, "aud": "anybody"})
    assert (await post(url, APPLE, Authorization=good))[0] == 200
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    wrong = [
        "",
        "Bearer",
        "Bearer x",
        "Basic eDp5",
        good[:-3],
        bearer({"exp": now - 60}),
        bearer({"iss": "realm"}),
        bearer({"exp": now + 60}, b"another key of thirty-two bytes or more"),
        bearer({"exp": now + 60}, KEY * 2, "HS512"),
        f"Bearer {none}.{good.split('.')[1]}.",
    ]
    for authorization in wrong:
        status, text, headers = await post(url, APPLE, **{"Authorization": authorization} if authorization else {})
        assert (status, headers["WWW-Authenticate"], text[:8]) == (401, "Bearer", "expected"), authorization
    assert len(publisher.items) == 1


async def test_a_key_is_read_again_when_it_has_changed(serve: Serve, key_file: Path) -> None:
    url = await serve(Publisher().publish, key_file)
    claims = {"exp": int(time.time()) + 60}
    assert (await post(url, Authorization=bearer(claims)))[0] == 200
    new = bytes(range(200, 240))
    key_file.write_bytes(b"base64:" + base64.b64encode(new))
    assert (await post(url, Authorization=bearer(claims)))[0] == 401
    assert (await post(url, Authorization=bearer(claims, new)))[0] == 200
    key_file.write_bytes(b"short")
    assert (await post(url, Authorization=bearer(claims, new)))[0] == 200, "the last one stays in use"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "expected 32 bytes or more"),
        (b"short", "expected 32 bytes or more"),
        (b"base64:%%", "expected base64 after base64:"),
        (b"base64:AAAA", "expected 32 bytes or more .*, got 3"),
    ],
)
def test_a_key_that_cant_be_used(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(UStatusError, match=f"FAILED_PRECONDITION: the key file .*/key can't be used: {why}"):
        Signer(tmp_path / "key", "edge")


@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")  # of gripcontrol, from Python 3.12 on
async def test_a_grip_sig_is_made_for_some_minutes_and_is_what_gripcontrol_expects(key_file: Path) -> None:
    now_ms = int(time.time() * 1_000)
    signer = Signer(key_file, "edge", lambda: now_ms)
    first = await signer.sign()
    assert validate_sig(first, KEY, "edge")
    assert not validate_sig(first, KEY, "another")
    assert not validate_sig(first, b"another key of thirty-two bytes or more", "edge")
    now_ms += 299_000
    assert await signer.sign() == first
    now_ms += 2_000
    second = await signer.sign()
    assert second != first
    assert jwt.decode(second, KEY, ["HS256"]) == {"iss": "edge", "exp": now_ms // 1_000 + 3_600}
    key_file.write_bytes(KEY * 2)
    assert validate_sig(await signer.sign(), KEY * 2, "edge")


async def test_a_streamer_serves_publishers_at_an_address_of_their_own(make_world: Any, key_file: Path) -> None:
    world = await make_world(NETWORKS, more=grip().replace("[grip]\n", f"[grip]\npublish_key_file = '{key_file}'\n"))
    url = f"http://127.0.0.1:{world.parts.of(EdgePart).publish_port}"
    with structlog.testing.capture_logs() as logs:
        assert [(await post(url))[0] for _ in range(3)] == [401, 401, 401]
    ((event, why),) = [(one["event"], one["why"]) for one in logs if "status" in one]
    assert event == "a publisher is refused: its items are lost if it does not repeat them"
    assert why == "expected Authorization: Bearer, and a JWT"
    assert ("edge_refused", ("publisher",), 3) in list(world.parts.samples())
    good = bearer({"iss": "realm", "exp": int(time.time()) + 60})
    assert (await post(url, Authorization=good))[:2] == (200, "Published\n")
    unknown = {"items": [{"channel": "veg", "http-stream": {"content": "x"}}]}
    assert (await post(url, unknown, Authorization=good))[:2] == (400, "unknown channel 'veg'; known: fruit, brief\n")
    assert await recorded(world) == ["apple"]
    assert ("grip_items", ("items",), 1) in list(world.parts.samples())
    key_file.write_bytes(b"short")
    assert (await post(url, Authorization=good))[0] == 200, "the last one stays in use"
    (problem,) = world.parts.problems()
    assert problem.startswith(f"the key file {key_file} can't be used: expected 32 bytes or more")


async def test_a_streamer_does_not_start_without_the_key_of_its_publishers(make_world: Any, tmp_path: Path) -> None:
    more = grip().replace("[grip]\n", f"[grip]\npublish_key_file = '{tmp_path}/none'\n")
    with pytest.raises(ExceptionGroup) as group:
        await make_world(NETWORKS, more=more)
    assert group.group_contains(UStatusError, match="the key file .* can't be used: No such file")


# The libraries. They block, so each runs in a thread


UTC_NOW = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")  # pubcontrol's


@full
@UTC_NOW
@pytest.mark.parametrize("signs", [False, True])
async def test_gripcontrol_and_pubcontrol_publish(make_world: Any, serve: Serve, key_file: Path, signs: bool) -> None:
    world = await make_world(NETWORKS, more=grip())
    heard: list[Item] = []
    channels_of(world).listen("fruit", heard.append)
    url = await serve(channels_of(world).publish, key_file if signs else None)

    def publish() -> None:
        """Each in its own way to give a key."""
        given = {"control_iss": "realm", "key": KEY} if signs else {}
        with_grip = GripPubControl({"control_uri": url, **given})
        with_grip.publish_http_stream("fruit", "apple\n", id="1", blocking=True)
        with_grip.publish_http_stream("fruit", HttpStreamFormat(b"\xff"), id="2", prev_id="1", blocking=True)
        with_grip.publish_http_response("fruit", HttpResponseFormat(201, "Made", {"X-A": "b"}, "body"), blocking=True)
        formats = [HttpStreamFormat("both"), HttpResponseFormat(body=b"\xfe")]
        with_grip.publish("fruit", SentItem(formats, "3", None), blocking=True)
        with_grip.publish_http_stream("fruit", HttpStreamFormat(close=True), blocking=True)
        with_grip.close()
        plain = PubControl({"uri": url, **({"iss": "realm", "key": KEY} if signs else {})})
        answers: list[tuple[bool, str]] = []
        for number in range(4, 40):
            formats = [HttpStreamFormat(f"{number}\n")]
            item = SentItem(formats, str(number), str(number - 1))
            plain.publish("fruit", item, callback=lambda *answer: answers.append(answer))
        plain.close()  # waits for all
        assert answers == [(True, None)] * 36

    await asyncio.to_thread(publish)
    assert (heard[0].id, heard[0].stream) == ("1", StreamFormat(b"apple\n"))
    assert (heard[1].prev_id, heard[1].stream) == ("1", StreamFormat(b"\xff"))
    assert heard[2].response == ResponseFormat(201, "Made", (("X-A", "b"),), b"body")
    assert (heard[3].stream, heard[3].response) == (StreamFormat(b"both"), ResponseFormat(body=b"\xfe"))
    assert heard[4].stream == StreamFormat(closes=True)
    assert [item.id for item in heard[5:]] == [str(number) for number in range(4, 40)]
    assert channels_of(world).last_id("fruit") == "39"
    assert len(heard) == 41


@full
@UTC_NOW
async def test_a_publisher_with_the_wrong_key_or_channel_gets_the_reason(
    make_world: Any, serve: Serve, key_file: Path
) -> None:
    world = await make_world(NETWORKS, more=grip())
    heard = heard_by(world)
    url = await serve(channels_of(world).publish, key_file)

    def publish(key: bytes, channel: str) -> str:
        config = {"uri": url, "iss": "realm", "key": key}
        control = PubControl(config)
        try:
            control.publish(channel, SentItem([HttpStreamFormat("x")]), blocking=True)
        except ValueError as error:
            return str(error)
        finally:
            control.close()
        return ""

    assert "401" in await asyncio.to_thread(publish, b"another key of thirty-two bytes or more", "fruit")
    assert "unknown channel 'veg'; known: fruit, brief" in await asyncio.to_thread(publish, KEY, "veg")
    assert not await asyncio.to_thread(publish, KEY, "fruit")
    assert await recorded(world) == heard == ["x"]
    uri = parse_grip_uri(f"{url}?iss=realm&key=base64:{base64.b64encode(KEY).decode()}")
    assert uri == {"control_uri": url, "control_iss": "realm", "key": KEY}
