"""Operations: what the control socket and the admin port offer alike."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from streamer.config import AdminSection
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket, call
from streamer.operation import Arguments, Operation, Operations
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode


async def _echo(given: Arguments) -> dict[str, Any]:
    return {"text": given.text("text"), "number": given.number("number", 7), "flag": given.flag("flag")}


def echoing() -> Operations:
    return Operations({"echo": Operation(_echo, ("text", "number", "flag"))})


@pytest.mark.parametrize(
    ("name", "given", "code", "what"),
    [
        ("dance", {}, UCode.NOT_FOUND, "known: echo"),
        ("echo", {}, UCode.INVALID_ARGUMENT, "text: expected a text"),
        ("echo", {"text": "a", "number": True}, UCode.INVALID_ARGUMENT, "number: expected a whole number"),
        ("echo", {"text": "a", "number": 1 << 80}, UCode.INVALID_ARGUMENT, "number: expected a whole number"),
        ("echo", {"text": "a", "flag": "yes"}, UCode.INVALID_ARGUMENT, "flag: expected true or false"),
        ("echo", {"txet": "a"}, UCode.INVALID_ARGUMENT, "unknown argument 'txet' of echo; known: text, number, flag"),
    ],
)
async def test_arguments_have_types_and_unknown_ones_are_refused(
    name: str, given: dict[str, Any], code: UCode.ValueType, what: str
) -> None:
    with pytest.raises(UStatusError, match=what) as error:
        await echoing().answer(name, given)
    assert error.value.code == code


async def test_the_socket_and_the_admin_port_answer_alike(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    admin = Admin("127.0.0.1:0", list, guard=AdminSection(token_file=token), operations=echoing())
    async with ControlSocket(tmp_path, echoing()), admin:
        by_socket = await asyncio.to_thread(call, tmp_path, "echo", {"text": "x", "flag": True})
        status, by_port = await asyncio.to_thread(_post, admin.port, "echo", {"text": "x", "flag": True}, "secret")
        assert (status, by_port) == (200, by_socket) == (200, {"text": "x", "number": 7, "flag": True})
        assert (await asyncio.to_thread(_post, admin.port, "dance", {}, "secret"))[0] == 404
        assert (await asyncio.to_thread(_post, admin.port, "echo", {"text": 1}, "secret"))[0] == 400
        assert (await asyncio.to_thread(_post, admin.port, "echo", {"text": "x"}, "wrong"))[0] == 401


@pytest.mark.parametrize("given", [{"text": ["x" * 9_000]}, {"text": "a", "number": "x" * 9_000}])
async def test_an_error_repeats_no_endless_argument(given: dict[str, Any]) -> None:
    with pytest.raises(UStatusError) as error:
        await echoing().answer("echo", given)
    assert len(error.value.message) < 200


async def test_a_line_that_is_too_long_is_answered(tmp_path: Path) -> None:
    async with ControlSocket(tmp_path, echoing()):
        with pytest.raises(UStatusError, match="in one line of at most 64 KiB"):
            await asyncio.to_thread(call, tmp_path, "echo", {"text": "x" * (65 << 10)})


async def test_without_a_token_the_admin_port_does_no_operations() -> None:
    async with Admin("127.0.0.1:0", list, operations=echoing()) as admin:
        status, answer = await asyncio.to_thread(_post, admin.port, "echo", {"text": "x"}, "")
    assert status == 403
    assert "admin.token_file" in answer["message"]


def _post(port: int, name: str, arguments: dict[str, Any], token: str) -> tuple[int, dict[str, Any]]:
    """Returns the status and the JSON object of the answer; {} if it is none."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps(arguments).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/operations/{name}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else {}
