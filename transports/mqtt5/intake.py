"""What arrived -> listeners, in order, acknowledged last; what a listener did not take comes again (see Arrivals).

BYTES_MAX or MESSAGES_MAX here
              -> pressed: the socket is not read, which holds the broker      -> half of it taken: read again
   for PRESSED_S_MAX
              -> shedding: it is read, since what a listener waits for        -> half of it taken: a new connection,
                 may be behind; messages are neither kept nor acknowledged       they come again
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from transports.arrivals import Arrivals
from transports.listeners import Filter

# of QoS 0, which Receive Maximum does not hold back: beyond it they are dropped
UNACKNOWLEDGED_MESSAGES_MAX: Final = 8_192
# waiting or being taken: 2,048 messages of 16 KiB. Receive Maximum can't count bytes
BYTES_MAX: Final = 32 << 20
# the same; some 1.5 KB each if small. A broker may not keep to Receive Maximum: mosquitto with
# `max_inflight_messages 0` does not
MESSAGES_MAX: Final = 8_192
PRESSED_S_MAX: Final = 5.0  # how long the socket stands; far less than a keep-alive, or than a PUBACK may take

Message = tuple[Filter | None, bytes, bytes]
"""As ListenerTable.deliver_encoded takes it: the filter is None, for all; payload; serialised UAttributes."""


class Arrived(NamedTuple):
    message: Message | None  # None: nothing to deliver, only to acknowledge in its turn
    # which of our connections brought it: on another one the broker would take our answer for another message's
    connection: int
    packet_id: int  # 0: QoS 0
    size: int = 0  # bytes of its message; 0 if it is one of many that are small


class Intake(Arrivals[Arrived]):
    """Lives on the event loop."""

    def __init__(
        self,
        deliver: Callable[[list[Message]], Awaitable[None] | None],
        acknowledge: Callable[[Sequence[Arrived]], None],
        pressed: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(
            lambda batch: deliver([one.message for one in batch if one.message is not None]),
            lambda batch, _error: acknowledge(batch),
            messages_max=MESSAGES_MAX,
            bytes_max=BYTES_MAX,
            redeliver=True,
            gathers=False,
            pressed=pressed,
        )

    @property
    def full(self) -> bool:
        return self.not_handed_over >= UNACKNOWLEDGED_MESSAGES_MAX

    def arrive(self, arrived: Sequence[Arrived], octets: int = 0) -> None:
        """`octets` is the sum of their sizes, 0 where they are small or count here already."""
        self.put_now(arrived, [one.size for one in arrived] if octets else ())
