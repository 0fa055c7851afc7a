"""Permission levels (CAP, spec basics/permissions.adoc): transported and readable, not enforced here.

request.permission_level --claimed()--> level | level <--declared()-- options of method and service in the .proto
                                        an application that enforces levels compares the two in the `check` of
                                        InMemoryRpcServer
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import MethodDescriptor

from uprotocol import uoptions_pb2 as options
from uprotocol.v1.uattributes_pb2 import UAttributes

LEVEL_DEFAULT: Final = 0  # the level of a caller that claims none
LEVEL_MAX: Final = 0xFFFF_FFFF  # N, the most permissive: the specification gives no number, the field has 32 bits


def claimed(attributes: UAttributes) -> int:
    """The level in the attributes of a request (local~cap-carry)."""
    return attributes.permission_level if attributes.HasField("permission_level") else LEVEL_DEFAULT


def declared(method: MethodDescriptor) -> int:
    """The level that `method` declares, else its service, else N (local~cap-missing)."""
    of_method = method.GetOptions()
    if of_method.HasExtension(options.method_permission_level):
        return of_method.Extensions[options.method_permission_level]
    of_service = method.containing_service.GetOptions()
    if of_service.HasExtension(options.service_permission_level):
        return of_service.Extensions[options.service_permission_level]
    return LEVEL_MAX
