"""uP-L1: the interface and the checks of filters. The conformance suite tests the transports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from uprotocol import uri as uris
from uprotocol.attributes import validate_filters
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UBatchListener, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

spec = pytest.mark.spec


class SendOnly(UTransport):
    """Supports neither push nor pull, and refuses every second message."""

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        return [
            UStatus(code=UCode.PERMISSION_DENIED, message="no") if message.attributes.ttl else OK
            for message in messages
        ]


class Listener:
    def on_receive(self, message: UMessage) -> None: ...


class BatchListener(Listener):
    def on_receive_batch(self, messages: Sequence[UMessage]) -> None: ...


@spec("dsn~ulistener-declaration~1")
def test_a_listener_is_whatever_has_on_receive() -> None:
    assert isinstance(Listener(), UListener)
    assert not isinstance(Listener(), UBatchListener)
    assert isinstance(BatchListener(), UBatchListener)
    assert not isinstance(object(), UListener)


@spec("dsn~utransport-declaration~1")
def test_a_transport_has_the_four_methods_of_the_specification() -> None:
    for name in ("send", "receive", "register_listener", "unregister_listener"):
        assert callable(getattr(UTransport, name))
    with pytest.raises(TypeError):
        UTransport()  # type: ignore[abstract]


@spec("dsn~utransport-receive-error-unimplemented~1")
@spec("dsn~utransport-registerlistener-error-unimplemented~1")
@spec("dsn~utransport-unregisterlistener-error-unimplemented~1")
async def test_what_a_transport_does_not_implement_says_so() -> None:
    async with SendOnly() as transport:
        assert transport.capabilities == Capability.NONE
        for call in (
            transport.receive(uris.ANY),
            transport.register_listener(uris.ANY, Listener()),
            transport.unregister_listener(uris.ANY, Listener()),
        ):
            with pytest.raises(UStatusError) as caught:
                await call
            assert caught.value.code == UCode.UNIMPLEMENTED


async def test_send_raises_what_send_batch_answers() -> None:
    builder = UMessageBuilder.publish(uris.uri("a", 1, 1, 0x8000))
    await SendOnly().send(builder.build())
    with pytest.raises(UStatusError, match="PERMISSION_DENIED: no"):
        await SendOnly().send(builder.with_ttl(1).build())


@spec("dsn~localuriprovider-declaration~1")
@spec("dsn~localuriprovider-getauthority~1")
@spec("dsn~localuriprovider-getsource-uri-segments~1")
@spec("dsn~localuriprovider-getresource~1")
def test_the_local_entity_knows_its_addresses() -> None:
    local = LocalUriProvider("vcu.my_vin", 0x2_0010, 3)
    assert local.get_authority() == "vcu.my_vin"
    assert uris.format(local.get_source()) == "up://vcu.my_vin/20010/3/0"
    assert uris.format(local.get_resource(0x8001)) == "up://vcu.my_vin/20010/3/8001"
    local.get_source().authority_name = "changed"
    assert local.get_source().authority_name == "vcu.my_vin", "what is handed out may be changed"
    with pytest.raises(UStatusError):
        local.get_resource(0x1_0000)


@pytest.mark.parametrize(
    ("authority", "ue_id", "version"), [("", 1, 1), ("*", 1, 1), ("A", 1, 1), ("a", 0xFFFF, 1), ("a", 1, 0xFF)]
)
def test_the_local_entity_is_concrete(authority: str, ue_id: int, version: int) -> None:
    with pytest.raises(UStatusError) as caught:
        LocalUriProvider(authority, ue_id, version)
    assert caught.value.code == UCode.INVALID_ARGUMENT


RESOURCES = {"reply": [0], "method": [1, 0x7FFF], "topic": [0x8000, 0xFFFE], "any": [0xFFFF], "none": [None]}
VALID = {
    ("topic", "none"),
    ("any", "none"),
    ("topic", "reply"),
    ("reply", "method"),
    ("method", "reply"),
    ("any", "reply"),
    ("any", "any"),
}


@spec("dsn~utransport-registerlistener-error-invalid-parameter~1")
@spec("dsn~utransport-unregisterlistener-error-invalid-parameter~1")
@pytest.mark.parametrize("source_kind", ["reply", "method", "topic", "any"])
@pytest.mark.parametrize("sink_kind", list(RESOURCES))
def test_only_the_listed_pairs_of_filters_are_valid(source_kind: str, sink_kind: str) -> None:
    for source in RESOURCES[source_kind]:
        for sink in RESOURCES[sink_kind]:
            assert source is not None
            pair = (uris.pattern(resource=source), None if sink is None else uris.pattern("me", 1, 1, sink))
            if (source_kind, sink_kind) in VALID:
                validate_filters(*pair)
            else:
                with pytest.raises(UStatusError) as caught:
                    validate_filters(*pair)
                assert caught.value.code == UCode.INVALID_ARGUMENT


def test_a_malformed_filter_is_refused() -> None:
    bad = uris.pattern()
    bad.authority_name = "NOT valid"
    for pair in ((bad, None), (uris.ANY, bad)):
        with pytest.raises(UStatusError):
            validate_filters(*pair)
