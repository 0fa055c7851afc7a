"""A DDS application of somebody else: it has docs/dds-mapping.md, protobuf's wire format and cyclonedds, and nothing of
ours.

page -> the IDL -> type, topics -> writers and readers, each in a Publisher or Subscriber of its own partition
stdin: a JSON object a line, {"do": NAME, ...} -> the function of that name -> stdout: its answer, as JSON

The messages are made and read by hand, field by field of uprotocol.v1.UAttributes.
"""

import dataclasses
import json
import re
import sys
import time
import types
from typing import Any

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsSubscription
from cyclonedds.core import Policy, Qos
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.sub import DataReader, Subscriber
from cyclonedds.topic import Topic

Fields = dict[int, list[Any]]  # of a protobuf message: number -> values

RELIABLE = Policy.Reliability.Reliable(1_000_000_000)
KINDS = {"octet": uint8, "boolean": bool, "sequence<octet>": sequence[uint8]}
DEADLINE_S = 30.0


def type_of(page: str) -> Any:
    """The struct of the page's IDL."""
    idl = re.search(r"```idl\n(.*?)```", page, re.DOTALL)
    assert idl is not None
    code = re.sub(r"//.*", "", idl[1])
    modules = re.findall(r"module (\w+)", code)
    name, body = re.search(r"@final struct (\w+) \{(.*?)\}", code, re.DOTALL).groups()
    members = [line.split() for line in body.split(";") if line.strip()]
    fields = [(member, KINDS[kind]) for kind, member in members]
    made = types.new_class(
        name,
        (IdlStruct,),
        {"typename": ".".join([*modules, name])},
        lambda space: space.update(__annotations__=dict(fields)),
    )
    return dataclasses.dataclass(made)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def packed(fields: dict[int, Any]) -> bytes:
    """protobuf: int is a varint, bytes a length and its octets, a tuple (n,) a fixed64."""
    out = b""
    for number, value in fields.items():
        if isinstance(value, tuple):
            out += varint(number << 3 | 1) + value[0].to_bytes(8, "little")
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def unpacked(data: bytes) -> Fields:
    fields: Fields = {}
    at = 0

    def number() -> int:
        nonlocal at
        shift = value = 0
        while True:
            octet, at = data[at], at + 1
            value |= (octet & 127) << shift
            shift += 7
            if octet < 128:
                return value

    while at < len(data):
        tag = number()
        kind = tag & 7
        if kind == 0:
            value: Any = number()
        else:
            length = {1: 8, 5: 4}.get(kind) or number()
            value, at = data[at : at + length], at + length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def new_id() -> bytes:
    """A UUID of version 7."""
    new_id.count = getattr(new_id, "count", 0) + 1  # type: ignore[attr-defined]
    milliseconds = time.time_ns() // 1_000_000
    return packed({1: (milliseconds << 16 | 7 << 12 | new_id.count & 0xFFF,), 2: (2 << 62 | 4711,)})  # type: ignore[attr-defined]


def address(authority: str, entity: int, version: int, resource: int) -> bytes:
    return packed({1: authority.encode(), 2: entity, 3: version, **({4: resource} if resource else {})})


def partition(source: list[Any], sink: list[Any] | None) -> str:
    """Section 4. None in an address is a wildcard."""

    def segments(authority: Any, entity: Any, version: Any, resource: Any) -> str:
        numbers = (None, None) if entity is None else (entity & 0xFFFF, entity >> 16)
        return "/".join([authority or "*", *("*" if n is None else f"{n:X}" for n in (*numbers, version, resource))])

    return f"up/{segments(*source)}/{segments(*sink) if sink else '{}/{}/{}/{}/{}'}"


class App:
    def __init__(self, page: str, domain_id: int, configuration: str) -> None:
        self.domain = Domain(domain_id, configuration)
        self.participant = DomainParticipant(domain_id)
        self.type = type_of(page)
        self.topic = Topic(self.participant, "uprotocol/v1", self.type)
        self.seen = Topic(self.participant, "uprotocol/v1/seen", self.type)
        self.readers: dict[str, DataReader] = {}
        self.writers: dict[str, DataWriter] = {}
        self.known_keys: set[bytes] = set()  # of readers that somebody has announced
        kept = (RELIABLE, Policy.Durability.TransientLocal)
        self.announced = DataReader(self.participant, self.seen, Qos(*kept, Policy.History.KeepAll))
        self.found = BuiltinDataReader(self.participant, BuiltinTopicDcpsSubscription)
        self.announcing = DataWriter(self.participant, self.seen, Qos(*kept, Policy.History.KeepLast(64)))

    def open(self, keys: list[Any], representation: str = "", numbered: bool = False) -> str:
        """A writer, on the partition of (source, sink): the partition is its Publisher's."""
        where = partition(*keys)
        policies = [RELIABLE, Policy.History.KeepAll, Policy.DestinationOrder.ByReceptionTimestamp]
        policies += [Policy.TransportPriority(8)]
        if representation:
            xcdr2 = representation == "XCDR2"
            policies += [Policy.DataRepresentation(use_cdrv0_representation=not xcdr2, use_xcdrv2_representation=xcdr2)]
        if numbered:
            policies += [Policy.Userdata(b"uprotocol/1 numbered")]
        self.writers[where] = DataWriter(
            Publisher(self.participant, Qos(Policy.Partition([where]))), self.topic, Qos(*policies)
        )
        return where

    def ready(self, where: str) -> bool:
        """True when the writer has a matching reader."""
        return wait(lambda: self.writers[where].get_matched_subscriptions())

    def write(self, where: str, attributes: bytes, payload: bytes | None, number: int = 0) -> None:
        sample = self.type(1, payload is not None, list(attributes), list(payload or b""))
        if number:  # section 9: the lowest 24 bits of the source time stamp
            stamp = (time.time_ns() // 2**24 + 1) * 2**24 + number % 2**24
            self.writers[where].write(sample, stamp)
        else:
            self.writers[where].write(sample)

    def publish(self, where: str, source: list[Any], payload: str | None, numbers: list[int] | None = None) -> None:
        for number in numbers or [0]:
            attributes = packed({1: new_id(), 2: 1, 3: address(*source), **({12: 7} if payload is not None else {})})
            self.write(where, attributes, None if payload is None else payload.encode(), number)

    def listen(self, keys: list[Any], representation: str = "") -> str:
        """A reader, on the partition of a pair of filters: the partition is its Subscriber's."""
        where = partition(*keys)
        limits = Policy.ResourceLimits(max_samples=8192, max_instances=-1, max_samples_per_instance=-1)
        policies = [RELIABLE, Policy.History.KeepAll, limits]
        if representation:
            policies += [
                Policy.DataRepresentation(
                    use_cdrv0_representation=representation != "XCDR2",
                    use_xcdrv2_representation=representation != "XCDR1",
                )
            ]
        subscriber = Subscriber(self.participant, Qos(Policy.Partition([where])))
        self.readers[where] = DataReader(subscriber, self.topic, Qos(*policies))
        return where

    def known(self, where: str) -> bool:
        """True when another participant has announced that it has found this reader: section 8."""

        def is_announced() -> bool:
            for sample in self.announced.take(64):
                participant, keys = bytes(sample.attributes), bytes(sample.payload)
                assert len(participant) == 16, participant.hex()
                assert participant[12:] == b"\x00\x00\x01\xc1", participant.hex()
                assert len(keys) % 16 == 0, keys.hex()
                self.known_keys.update(keys[at : at + 16] for at in range(0, len(keys), 16))
            return self.readers[where].guid.bytes in self.known_keys

        return wait(is_announced)

    def announce(self) -> int:
        """Announce the known readers of others once: section 8. Returns their number."""
        own = self.participant.guid.bytes
        found = [one for one in self.found.take(1_024) if one.sample_info.valid_data]
        keys = [one.key.bytes for one in found if one.topic_name == "uprotocol/v1" and one.participant_key.bytes != own]
        if keys:
            self.announcing.write(self.type(1, True, list(own), list(b"".join(keys))))
        return len(keys)

    def announce_when_found(self) -> bool:
        return wait(self.announce)

    def take(self, where: str, count: int = 1) -> list[dict[str, Any]]:
        """The next messages of a reader, decoded."""
        messages: list[dict[str, Any]] = []

        def more() -> bool:
            for sample in self.readers[where].take(count - len(messages)):
                assert sample.version == 1
                fields = unpacked(bytes(sample.attributes))
                payload = bytes(sample.payload).decode() if sample.has_payload else None
                one = {
                    "type": fields[2][0],
                    "priority": fields.get(5, [0])[0],
                    "ttl": fields.get(6, [0])[0],
                    "payload": payload,
                }
                messages.append(one | {"id": fields[1][0].hex(), "source": fields[3][0].hex()})
            return len(messages) >= count

        wait(more)
        return messages

    def call(self, where: str, source: list[Any], sink: list[Any], payload: str) -> str:
        """Send a request; returns its id."""
        number = new_id()
        called = {1: number, 2: 2, 3: address(*source), 4: address(*sink), 5: 5, 6: 20_000, 12: 7}
        self.write(where, packed(called), payload.encode())
        return number.hex()

    def answer(self, where: str, method: list[Any], caller: list[Any], request: dict[str, Any], payload: str) -> None:
        """Send the response to a message of `take`."""
        said = {1: new_id(), 2: 3, 3: address(*method), 4: address(*caller), 5: request["priority"], 6: request["ttl"]}
        self.write(where, packed({**said, 9: bytes.fromhex(request["id"]), 12: 7}), payload.encode())


def wait(done: Any) -> bool:
    until = time.monotonic() + DEADLINE_S
    while not (is_done := done()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(is_done)


def main(page: str, domain_id: str, configuration: str) -> None:
    with open(page, encoding="utf-8") as file:
        app = App(file.read(), int(domain_id), configuration)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(app, order.pop("do"))(**order)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
