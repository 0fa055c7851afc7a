"""The control of a running streamer from the command line.

command line on this machine -> data_dir/control.sock, which only its owner may open -> Operations (operations.py)
             streamer stopped: the file of Paused, under the lock of the log
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from storage.disk import REAL_DISK, InUseError, Lock
from streamer.data_dir import CONTROL_SOCKET, LOG_LOCK, PAUSES_FILE
from streamer.operation import Arguments, Operation, Operations
from streamer.walk import paused as pauses
from streamer.walk.paused import Pause, Paused
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

LINE_BYTES_MAX: Final = 64 << 10  # of a request
CONTROL_ANSWER_BYTES_MAX: Final = 16 << 20
CONTROL_S: Final = 10.0  # enough for a slow disk; a client that is silent, or takes nothing, is disconnected then

log = structlog.get_logger()


PAUSE_ARGUMENTS: Final = ("topic", "peer", "endpoint", "rule_from", "rule_to")


def pause_operations(paused: Paused, has_rule: Callable[[str, str], bool] = lambda *_: True) -> dict[str, Operation]:
    """Returns pause, resume and paused, for those who may do everything; each answers with the pauses after it. What is
    paused: topic and peer, or an endpoint, or a rule. `has_rule(from, to)`: there is a rule between these endpoints."""

    async def pause(given: Arguments) -> dict[str, Any]:
        topic, peer, origin = _asked_pause(given)
        if origin and not has_rule(origin, peer):
            raise UStatusError(UCode.NOT_FOUND, f"there is no rule from {origin!r} to {peer!r}")
        await paused.pause(topic, peer, origin)
        return await listed(given)

    async def resume(given: Arguments) -> dict[str, Any]:
        await paused.resume(*_asked_pause(given))
        return await listed(given)

    async def listed(_: Arguments) -> dict[str, Any]:
        return {"paused": sorted(paused)}

    return {
        "pause": Operation(pause, PAUSE_ARGUMENTS, is_change=True),
        "paused": Operation(listed),
        "resume": Operation(resume, PAUSE_ARGUMENTS, is_change=True),
    }


def _asked_pause(given: Arguments) -> tuple[UUri, str, str]:
    """Returns pattern, peer and origin. Raises INVALID_ARGUMENT unless one thing to pause is named."""
    named = [one for one in PAUSE_ARGUMENTS if one in given]
    if named == ["endpoint"]:
        return uris.ANY, given.text("endpoint"), ""
    if named == ["rule_from", "rule_to"]:
        return uris.ANY, given.text("rule_to"), given.text("rule_from")
    if named and not {"topic", "peer"}.issuperset(named):
        raise invalid(f"expected topic and peer, or endpoint, or rule_from and rule_to; got {', '.join(named)}")
    return uris.parse(given.text("topic")), given.text("peer"), ""


# Commands on this machine


class ControlSocket:
    """Listens in `folder` while the streamer runs. If no socket can be made there, only the command line fails."""

    def __init__(self, folder: Path, operations: Operations) -> None:
        self._folder, self._operations = folder, operations
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> None:
        try:
            self._server = await asyncio.start_unix_server(self._serve, sock=self._socket(), limit=LINE_BYTES_MAX)
        except OSError as error:
            what = "the command line can't reach this streamer: no socket can be made"
            log.warning(what, folder=str(self._folder), why=str(error))

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                (self._folder / CONTROL_SOCKET).unlink()

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            # of a killed process: the lock of the log proves that no other runs
            (self._folder / CONTROL_SOCKET).unlink(missing_ok=True)
            with _address(self._folder) as address:
                made.bind(address)
            (self._folder / CONTROL_SOCKET).chmod(0o600)  # before it listens, so that no other user can connect first
        except BaseException:
            made.close()
            raise
        return made

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONTROL_S):
                try:
                    line = await reader.readline()
                except ValueError:  # it is too long
                    line = b""
            answer = json.dumps(await self._answer(line)).encode() + b"\n"
            async with asyncio.timeout(CONTROL_S):
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            name = asked.pop("do")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            name = None
        try:
            if not isinstance(name, str):
                raise invalid(
                    'expected {"do": OPERATION, ARGUMENT: value, ...} as JSON in one line of at most '
                    f"{LINE_BYTES_MAX >> 10} KiB"
                )
            return await self._operations.answer(name, asked)
        except UStatusError as error:
            return {"code": int(error.code), "message": error.message}


class SpareSocket(ControlSocket):
    """The same for a streamer that has not started: it listens only if no other one uses the folder."""

    async def __aenter__(self) -> None:
        self._lock: Lock | None = None
        with contextlib.suppress(OSError, InUseError):
            self._lock = REAL_DISK.lock(self._folder / LOG_LOCK)
            await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self._lock is not None:
            self._lock.release()


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yields a path of the socket that is short for any folder: the kernel limits it to 107 bytes."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{at}/{CONTROL_SOCKET}"
    finally:
        os.close(at)


def ask(folder: Path, do: str, topic: str = "", peer: str = "", own: str = "", origin: str = "") -> list[Pause]:
    """Sends the command to the streamer with this data_dir, or changes its file if it is stopped. Blocks.

    Returns the pauses after it. `own`: authority of a topic without one. `origin`: of a rule; its topic is all.
    Raises the error of the streamer; UNAVAILABLE if it does not answer.
    """
    arguments = {"rule_from": origin, "rule_to": peer} if origin else {"topic": topic, "peer": peer}
    answer = call(folder, do, {} if do == "paused" else arguments)
    if answer is None:
        return _ask_file(folder, do, topic, peer, own, origin)
    return [Pause(*one) for one in answer["paused"]]


def require(
    folder: Path, operation: str, arguments: Mapping[str, Any] | None = None, *, answer_s: float | None = CONTROL_S
) -> dict[str, Any]:
    """Returns what `call` returns. Raises UNAVAILABLE if the streamer is stopped, too."""
    answer = call(folder, operation, arguments, answer_s=answer_s)
    if answer is None:
        raise UStatusError(UCode.UNAVAILABLE, f"no streamer with data_dir {folder} runs: start it, then ask again")
    return answer


def call(
    folder: Path, operation: str, arguments: Mapping[str, Any] | None = None, *, answer_s: float | None = CONTROL_S
) -> dict[str, Any] | None:
    """Returns the answer of the streamer with this data_dir; None if it is stopped. Waits for `answer_s`; None: until
    it answers. Blocks. Raises as `ask`."""
    if not folder.is_dir():
        raise invalid(f"there is no folder {folder}: is this the data_dir of a streamer?")
    try:
        with socket.socket(socket.AF_UNIX) as line, _address(folder) as address:
            line.settimeout(answer_s)
            line.connect(address)
            line.sendall(json.dumps({"do": operation, **(arguments or {})}).encode() + b"\n")
            with line.makefile("rb") as answers:
                answer: dict[str, Any] = json.loads(answers.readline(CONTROL_ANSWER_BYTES_MAX))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UStatusError(UCode.UNAVAILABLE, f"the streamer with data_dir {folder} does not answer: {error}") from None
    if "code" in answer:
        raise UStatusError(answer["code"], answer["message"])
    return answer


def _ask_file(folder: Path, do: str, topic: str, peer: str, own: str, origin: str) -> list[Pause]:
    file = pauses.file_of(folder / PAUSES_FILE)
    if do == "paused":
        return pauses.read(file)
    pattern = pauses.pattern_of(uris.parse(topic), own)
    if not pattern.authority_name:
        raise invalid(f"the streamer is stopped, so say whose topic it is: //AUTHORITY{topic.removeprefix('up:')}")
    try:
        lock = REAL_DISK.lock(folder / LOG_LOCK)
    except InUseError as error:
        why = f"the streamer runs as process {error}, and there is no {CONTROL_SOCKET} in {folder}"
        raise UStatusError(UCode.UNAVAILABLE, f"{why}: see its log, or stop it first") from None
    try:
        change = pauses.added if do == "pause" else pauses.removed
        after = change(pauses.read(file), pattern, peer, origin)
        pauses.save(file, after)
    finally:
        lock.release()
    return after
