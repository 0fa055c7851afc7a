"""What a part gives for the metrics: samples of the families in metrics.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Sample = tuple[str, tuple[str, ...], float]  # the family's name, the values of its labels, the value


def each(name: str, labels: tuple[str, ...], counts: Mapping[str, float]) -> Iterator[Sample]:
    """One sample for each value of the family's last label."""
    return ((name, (*labels, key), count) for key, count in counts.items())
