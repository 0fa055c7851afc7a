"""Ports for processes: each named once, none that the system hands out by itself."""

from __future__ import annotations

import socket

import pytest

from streamer.demo import processes
from streamer.demo.processes import PORTS, free_port
from uprotocol.status import UStatusError


def test_free_ports_differ_and_are_not_those_that_connections_get() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert set(ports) <= set(PORTS)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    with socket.socket() as one:
        one.bind(("127.0.0.1", taken))
        monkeypatch.setattr(processes, "_ports", iter([taken, free]))
        assert free_port() == free
        monkeypatch.setattr(processes, "_ports", iter([taken]))
        with pytest.raises(UStatusError, match="no port"):
            free_port()
