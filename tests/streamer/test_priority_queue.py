"""The send queue: by class, in order, counted."""

from __future__ import annotations

from streamer.walk.sender import PriorityQueue
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.uattributes_pb2 import UPriority

TOPIC = uris.parse("//vehicle1/8001/1/8001")
Item = tuple[int, EncodedMessage, str]


def item(number: int, priority: UPriority.ValueType, stream: str = "") -> Item:
    builder = UMessageBuilder.publish(TOPIC).with_priority(priority)
    return number, EncodedMessage.of(builder.build_from_upayload(UPayload(bytes(10)))), stream


def firsts(queue: PriorityQueue[Item]) -> list[Item]:
    """The oldest item of each class."""
    return [waiting[0] for waiting in queue.classes if waiting]


def numbers(items: list[Item]) -> list[int]:
    return [number for number, _, _ in items]


def test_the_highest_class_leaves_first_and_what_comes_back_stays_ahead() -> None:
    queue: PriorityQueue[Item] = PriorityQueue()
    low, high = UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS4
    queue.add([item(1, low), item(2, high), item(3, low), item(4, high)])
    assert (len(queue), queue.bytes, sorted(numbers(firsts(queue)))) == (
        4,
        40,
        [1, 2],
    )
    taken = queue.take(3, 1_000)
    assert numbers(taken) == [2, 4, 1]
    queue.put_back(taken)
    assert numbers(queue.take(10, 1_000)) == [2, 4, 1, 3]
    assert (len(queue), queue.bytes, list(queue), firsts(queue)) == (
        0,
        0,
        [],
        [],
    )


def test_a_batch_is_bounded_in_bytes_and_has_one_message_at_least() -> None:
    queue: PriorityQueue[Item] = PriorityQueue()
    queue.add([item(number, UPriority.UPRIORITY_CS1) for number in range(4)])
    assert numbers(queue.take(10, 1)) == [0]
    assert numbers(queue.take(10, 11)) == [1, 2]
    assert (len(queue), queue.bytes) == (1, 10)


def test_the_items_of_some_streams_can_be_taken_out() -> None:
    queue: PriorityQueue[Item] = PriorityQueue()
    queue.add([item(number, UPriority.UPRIORITY_CS1, "ab"[number % 2]) for number in range(4)])
    assert numbers(queue.take_out(lambda one: one[2] == "a")) == [0, 2]
    assert (numbers(list(queue)), queue.bytes) == ([1, 3], 20)
