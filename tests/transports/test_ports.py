"""Ports for processes: each returned once, and none from the system's ephemeral range."""

from __future__ import annotations

import socket

import pytest

from transports import ports as ports_module
from transports.ports import PORTS, free_port
from uprotocol.status import UStatusError


def test_free_ports_differ_and_are_not_those_that_connections_get() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert set(ports) <= set(PORTS)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    with socket.socket() as one:
        one.bind(("127.0.0.1", taken))
        monkeypatch.setattr(ports_module, "_ports", iter([taken, free]))
        assert free_port() == free
        monkeypatch.setattr(ports_module, "_ports", iter([taken]))
        with pytest.raises(UStatusError, match="no port"):
            free_port()


def test_processes_that_run_side_by_side_choose_from_parts_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[set[int]] = []
    for number in range(3):
        monkeypatch.setattr(ports_module, "_ports", None)  # put back at the end
        ports_module.use_part(number, 3)
        chosen.append({free_port() for _ in range(50)})
    assert len(set.union(*chosen)) == 150
    assert all({port % 3 for port in part} == {next(iter(part)) % 3} for part in chosen)
    assert len({next(iter(part)) % 3 for part in chosen}) == 3
