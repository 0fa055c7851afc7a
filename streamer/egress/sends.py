"""Sends: the running calls of a transport's `send_batch`, and how they end if the transport hangs.

begin -> send_batch -> it returns: answered
                    -> not within ms_max: all calls under way are answered UNAVAILABLE and cancelled; their owners send
                       again. `hung` is set: nothing is sent until the transport was closed and opened again
                       (networks.py)

A later answer of a cancelled call is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from transports.base import NOT_TRIED
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

# Well above the limits of our transports: MQTT ends an idle connection after 20 s, a Zenoh put waits 5 s for a peer
# that does not read, a DDS write 4 s for a slow receiver
SEND_MS_MAX: Final = 60_000
# Gives a call more time for the bytes under way: a slow link (64 kbit/s) is no hang
BYTES_PER_S_MIN: Final = 8 << 10
ENVELOPE_BYTES: Final = 256  # about the size of a message without its payload

REOPENED: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the transport did not return, and is opened again: this is sent again after that"
)
BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)

log = structlog.get_logger()

Messages = Sequence[EncodedMessage]
Statuses = list[UStatus]


@dataclass(eq=False, slots=True)
class _SendCall:
    messages: int
    bytes: int
    began: float  # loop time
    due: float  # loop time: if it has not returned by then, it hangs
    answer: asyncio.Future[Statuses]
    on_answer: Callable[[Statuses], None]
    task: asyncio.Task[None] | None = None


class Sends:
    """The calls of one endpoint. Lives on the event loop."""

    def __init__(self, name: str, send: Callable[[Messages], Awaitable[Statuses]]) -> None:
        """`send` hands messages to the network; it never raises."""
        self._name, self._send = name, send
        self.ms_max = SEND_MS_MAX
        self.hung = asyncio.Event()
        self.hangs = 0
        self.trouble = ""  # says since when no call has returned; empty once one does
        self._calls: dict[_SendCall, None] = {}  # in the order in which they began
        self._bytes = 0  # of all these calls
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Sends({self._name}, under_way={len(self._calls)}, hangs={self.hangs})"

    def begin(
        self,
        messages: Messages,
        on_answer: Callable[[Statuses], None] = lambda _: None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[Statuses]:
        """Send the messages behind what is under way. Returns one status for each. Cancelling it cancels the call.

        `on_answer` is called in the loop step in which the network answers. Sending begins one loop step later; if
        `is_held` is true then, the messages are not sent and are answered UNAVAILABLE.
        """
        loop = asyncio.get_running_loop()
        octets = sum([len(message.payload) for message in messages]) + ENVELOPE_BYTES * len(messages)
        self._bytes += octets
        due = loop.time() + self.ms_max / 1_000 + self._bytes / BYTES_PER_S_MIN
        call = _SendCall(len(messages), octets, loop.time(), due, loop.create_future(), on_answer)
        self._calls[call] = None
        task = call.task = loop.create_task(self._run(call, messages, is_held))
        call.answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)
        return call.answer

    def close(self) -> None:
        """Send nothing more, and stop the timer, which would keep the endpoint in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_idle(self) -> bool:
        """True if no call is under way and none hangs."""
        return not self._calls and not self.hung.is_set()

    def resume(self) -> None:
        """Send again: the transport was reopened. It works if a call returns, or none is under way after `ms_max`."""
        self.hung.clear()
        asyncio.get_running_loop().call_later(self.ms_max / 1_000, self._check_trouble)

    def _check_trouble(self) -> None:
        if self.trouble and self.is_idle:
            self._works()

    async def _run(self, call: _SendCall, messages: Messages, is_held: Callable[[], bool]) -> None:
        try:
            if self.hung.is_set() or is_held():
                statuses = [REOPENED if self.hung.is_set() else BEHIND] * call.messages
            else:
                statuses = await self._send(messages)
                if self.trouble and call in self._calls:
                    self._works()
            if call in self._calls and not call.answer.done():
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        except asyncio.CancelledError:
            call.answer.cancel()
            raise
        finally:
            self._forget(call)

    def _forget(self, call: _SendCall) -> None:
        if call in self._calls:
            del self._calls[call]
            self._bytes -= call.bytes

    def _works(self) -> None:
        log.info("a transport that did not return from sending works again", endpoint=self._name)
        self.trouble = ""

    def _look(self) -> None:
        """Give up if a call hangs."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._calls:
            return
        due = min(call.due for call in self._calls)
        if due > loop.time():
            self._timer = loop.call_at(due, self._look)
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Answer and cancel all calls: the transport is about to be closed."""
        self.hangs += 1
        calls = list(self._calls)
        if not self.trouble:
            now_ms, loop_now = uuids.now_ms(), asyncio.get_running_loop().time()
            since = datetime.fromtimestamp(now_ms / 1_000 - (loop_now - calls[0].began), UTC)
            self.trouble = (
                f"since {since.isoformat(timespec='seconds')} its transport does not return from sending within "
                f"{self.ms_max} ms (egress.send_ms_max): it is closed and opened again, and what was not answered is "
                "sent again"
            )
        log.error("a transport hangs", endpoint=self._name, calls=len(calls), hangs=self.hangs, why=self.trouble)
        self.hung.set()
        for call in calls:
            self._forget(call)
            if not call.answer.done():
                statuses = [REOPENED] * call.messages
                call.on_answer(statuses)
                call.answer.set_result(statuses)
        for call in calls:
            if call.task is not None:
                call.task.cancel()
