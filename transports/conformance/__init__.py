"""The tests that every transport must pass. A plugin's whole test file is one class:

    class TestMynet(TransportConformance):
        capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

        async def make_end(self, authority: str, **limits: int) -> UTransport:
            return MyTransport(MyConfig(**limits), LocalUriProvider(authority, 0x10AB, 3))

base.py      the hooks that a plugin's class overrides
sending.py   addresses.py  listening.py  delivery.py  connection.py  loop.py
             the tests
messages.py  the messages of the tests  sinks.py  listeners that wait
deadline.py  deadlines of tests, which report what a test was waiting for
peer.py      the other end of the test with two processes
proxy.py     a TCP link that a test can cut

Needs the extra `conformance` (pytest, pytest-asyncio in strict or auto mode, pytest-timeout). With --strict-markers,
add "spec(id, doc): the requirement of the uProtocol specification that the test proves" to the markers of your project.
"""

import pytest

_REWRITTEN = "base sinks sending addresses listening delivery connection loop"
for _module in _REWRITTEN.split():
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from transports.conformance.addresses import AddressConformance  # noqa: E402
from transports.conformance.base import TransportHarness  # noqa: E402
from transports.conformance.connection import ConnectionConformance, ErrorConformance  # noqa: E402
from transports.conformance.delivery import DeliveryConformance, PressureConformance  # noqa: E402
from transports.conformance.listening import FilterConformance, ListeningConformance  # noqa: E402
from transports.conformance.loop import LoopConformance  # noqa: E402
from transports.conformance.messages import ALPHA, BETA  # noqa: E402
from transports.conformance.proxy import TcpProxy  # noqa: E402
from transports.conformance.sending import SendingConformance  # noqa: E402
from transports.conformance.sinks import Sink  # noqa: E402


class TransportConformance(
    SendingConformance,
    AddressConformance,
    FilterConformance,
    ListeningConformance,
    DeliveryConformance,
    PressureConformance,
    ConnectionConformance,
    LoopConformance,
    ErrorConformance,
):
    """All tests. See transports.conformance.base.TransportHarness for the hooks."""


__all__ = ["ALPHA", "BETA", "Sink", "TcpProxy", "TransportConformance", "TransportHarness"]
