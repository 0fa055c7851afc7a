"""Permission levels are transported and readable; a hook enforces them."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor

from uprotocol import uoptions_pb2 as options
from uprotocol.communication import api as permissions
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3_pb2
from uprotocol.v1.uattributes_pb2 import UAttributes

spec = pytest.mark.spec


def service(level: int | None, *, methods: dict[str, int | None]) -> ServiceDescriptor:
    """A service as declared by a .proto."""
    file = descriptor_pb2.FileDescriptorProto(name="levels.proto", package="levels")
    file.message_type.add(name="Empty")
    declared = file.service.add(name="Service")
    if level is not None:
        declared.options.Extensions[options.service_permission_level] = level
    for name, of_method in methods.items():
        method = declared.method.add(name=name, input_type=".levels.Empty", output_type=".levels.Empty")
        if of_method is not None:
            method.options.Extensions[options.method_permission_level] = of_method
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindServiceByName("levels.Service")


@spec("local~cap-level")
def test_a_request_claims_a_level_or_the_default() -> None:
    assert permissions.claimed(UAttributes()) == permissions.LEVEL_DEFAULT == 0
    assert permissions.claimed(UAttributes(permission_level=4)) == 4


@spec("local~cap-missing")
def test_without_any_declaration_the_level_is_n() -> None:
    bare = service(None, methods={"Get": None})
    assert permissions.declared(bare.methods_by_name["Get"]) == permissions.LEVEL_MAX
    assert (
        permissions.declared(v3_pb2.DESCRIPTOR.services_by_name["uSubscription"].methods_by_name["Subscribe"])
        == permissions.LEVEL_MAX
    )


@spec("local~cap-level")
def test_the_nearest_declaration_counts() -> None:
    declared = service(2, methods={"Get": None, "Set": 0})
    assert permissions.declared(declared.methods_by_name["Get"]) == 2
    assert permissions.declared(declared.methods_by_name["Set"]) == 0
