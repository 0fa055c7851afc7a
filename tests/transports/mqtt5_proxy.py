"""A link to a broker that refuses topic filters: with a reason code in SUBACK, by a disconnect, or by no answer.
And topics of messages, with a reason code in PUBACK.

end -> SUBSCRIBE -> refused?      -> another topic filter to the broker -> SUBACK -> with that reason code -> end
                    disconnects? -> both connections are reset
                    silent about? -> nothing
    -> PUBLISH   -> refused?      -> another topic to the broker -> PUBACK -> with that reason code -> end
"""

from __future__ import annotations

from typing import Final

from campaigns.chaos.proxy import RoughProxy, Tap
from transports.mqtt5 import wire

PUBLISH: Final = 0x32  # of QoS 1
PUBACK: Final = 0x40
SUBSCRIBE: Final = 0x82
SUBACK: Final = 0x90
UNSUBSCRIBE: Final = 0xA2
CONNECT: Final = 0x10


class RefusingProxy(RoughProxy):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.refused: dict[str, int] = {}  # topic filter -> reason code
        self.refused_topics: dict[str, int] = {}  # of messages -> reason code
        self.disconnects_on: set[str] = set()
        self.silent_about: set[str] = set()
        self.subscriptions_max = 1 << 20  # of one connection; one more, and it disconnects
        self.asked: list[str] = []  # topic filters of SUBSCRIBE, in order, and "" for each connection
        self.unsubscribed: list[str] = []

    def taps(self) -> tuple[Tap, Tap]:
        one = _Link(self)
        return one.to_broker, one.to_end

    def connections(self) -> int:
        return self.asked.count("")


class _Link:
    """One connection; each direction keeps what is no whole packet yet."""

    def __init__(self, proxy: RefusingProxy) -> None:
        self._proxy = proxy
        self._sent = self._answered = b""
        self._reasons: dict[bytes, int] = {}  # packet id -> reason code for the end
        self._published: dict[bytes, int] = {}  # the same for PUBACK
        self._subscriptions = 0

    def to_broker(self, data: bytes) -> bytes:
        found, used = wire.split(self._sent + data)
        self._sent = (self._sent + data)[used:]
        return b"".join(self._asked(first, body) for first, body in found)

    def to_end(self, data: bytes) -> bytes:
        found, used = wire.split(self._answered + data)
        self._answered = (self._answered + data)[used:]
        passed_on = []
        for first, body in found:
            if first == PUBACK and body[:2] in self._published:
                body = body[:2] + bytes((self._published.pop(body[:2]),))
            if first == SUBACK and body[:2] in self._reasons:
                body = body[:-1] + bytes((self._reasons.pop(body[:2]),))
            passed_on.append(_packet(first, body))
        return b"".join(passed_on)

    def _asked(self, first: int, body: bytes) -> bytes:
        proxy = self._proxy
        if first == CONNECT:
            proxy.asked.append("")
        if first == PUBLISH and proxy.refused_topics:
            return _packet(first, self._sends(body))
        if first not in (SUBSCRIBE, UNSUBSCRIBE):
            return _packet(first, body)
        length, start = wire.read_varint(body, 2, len(body))
        at = start + length
        end = at + 2 + int.from_bytes(body[at : at + 2], "big")
        topic_filter = body[at + 2 : end].decode()
        if first == UNSUBSCRIBE:
            proxy.unsubscribed.append(topic_filter)
            return _packet(first, body)
        proxy.asked.append(topic_filter)
        self._subscriptions += 1
        if topic_filter in proxy.disconnects_on or self._subscriptions > proxy.subscriptions_max:
            raise ConnectionResetError
        if topic_filter in proxy.silent_about:
            return b""
        if topic_filter in proxy.refused:
            self._reasons[body[:2]] = proxy.refused[topic_filter]
            body = body[: at + 2] + b"~" * (end - at - 2) + body[end:]
        return _packet(first, body)

    def _sends(self, body: bytes) -> bytes:
        """A PUBLISH to a topic that is refused goes to one that nobody subscribes to."""
        end = 2 + int.from_bytes(body[:2], "big")
        reason = self._proxy.refused_topics.get(body[2:end].decode())
        if reason is None:
            return body
        self._published[body[end : end + 2]] = reason
        return body[:2] + b"~" * (end - 2) + body[end:]


def _packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + wire.varint(len(body)) + body
