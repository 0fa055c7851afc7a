"""All faults, in the order of their table."""

from __future__ import annotations

from tests.transports.mutants import faults_of_connections, faults_of_listening, faults_of_sending
from tests.transports.mutants.mutant import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "faults_of_connections", "faults_of_listening", "faults_of_sending"]
