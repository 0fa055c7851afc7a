"""Permission levels (CAP, spec basics/permissions.adoc): carried and readable, never enforced here.

request.permission_level --claimed()--> level | level <--declared()-- options of method, service, topic in the .proto
                                        who enforces compares the two: see `check` of InMemoryRpcServer
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from uprotocol import uoptions_pb2 as options
from uprotocol.v1.uattributes_pb2 import UAttributes

LEVEL_DEFAULT: Final = 0  # of a caller that claims none
LEVEL_MAX: Final = 0xFFFF_FFFF  # N, the most permissive: the specification gives no number, the field is 32 bits wide


def claimed(attributes: UAttributes) -> int:
    """The level that travels with a request (local~cap-carry)."""
    return attributes.permission_level if attributes.HasField("permission_level") else LEVEL_DEFAULT


def declared(method: MethodDescriptor) -> int:
    """What `method` declares, else its service, else N (local~cap-missing)."""
    of_method = method.GetOptions()
    if of_method.HasExtension(options.method_permission_level):
        return of_method.Extensions[options.method_permission_level]
    of_service = method.containing_service.GetOptions()
    if of_service.HasExtension(options.service_permission_level):
        return of_service.Extensions[options.service_permission_level]
    return LEVEL_MAX


def declared_for_topic(service: ServiceDescriptor, resource_id: int) -> int:
    """What `service` declares for its topic `resource_id`, else for itself, else N (local~cap-missing)."""
    of_service = service.GetOptions()
    for kind in (options.publish_topic, options.notification_topic):
        for topic in of_service.Extensions[kind]:
            if topic.id == resource_id and topic.HasField("permission_level"):
                return topic.permission_level
    if of_service.HasExtension(options.service_permission_level):
        return of_service.Extensions[options.service_permission_level]
    return LEVEL_MAX
