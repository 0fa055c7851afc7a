"""What the demo counts, and how it shows that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from streamer.commands.demo.vehicle import Vehicle
from uprotocol import uri as uris


@dataclass
class DemoResult:
    """All counts of one run; Counters are by topic."""

    vehicles: list[Vehicle] = field(default_factory=list)
    published: Counter[str] = field(default_factory=Counter)
    wanted: set[str] = field(default_factory=set)  # topics
    received: Counter[str] = field(default_factory=Counter)  # distinct ids
    cloud_disorder: int = 0
    parquet: Counter[str] = field(default_factory=Counter)  # distinct ids
    rows: Counter[str] = field(default_factory=Counter)  # with duplicates
    forwarded: Counter[str] = field(default_factory=Counter)  # all on the cloud's network
    dropped: Counter[str] = field(default_factory=Counter)  # by gateway, endpoint and reason
    problems: int = 0
    seconds: float = 0.0
    plot: Path | None = None

    @property
    def subscribed(self) -> int:
        return sum(count for topic, count in self.published.items() if topic in self.wanted)

    @property
    def vehicles_stored(self) -> int:
        """Vehicles of which rows are in Parquet."""
        return sum(any(self.rows[topic] for topic in _of(one, self.rows)) for one in self.vehicles)

    def gaps_of(self, topic: str) -> int:
        """Returns how many messages are missing in Parquet and, if subscribed, in the cloud."""
        published = self.published[topic]
        in_cloud = max(0, published - self.received[topic]) if topic in self.wanted else 0
        return max(0, published - self.parquet[topic]) + in_cloud

    def duplicates_of(self, topic: str) -> int:
        """Returns how many messages came again, in Parquet or the cloud."""
        in_cloud = self.forwarded[topic] - self.received[topic] if topic in self.wanted else 0
        return self.rows[topic] - self.parquet[topic] + in_cloud

    @property
    def unsubscribed(self) -> int:
        """Messages that reached the cloud's network without a subscription to their topic."""
        return sum(count for topic, count in self.forwarded.items() if topic not in self.wanted)

    def as_dict(self) -> dict[str, int | float]:
        return {
            "vehicles": self.vehicles_stored,
            "published": self.published.total(),
            "subscribed": self.subscribed,
            "cloud_received": self.received.total(),
            "parquet_rows": self.rows.total(),
            "gaps": sum(map(self.gaps_of, self.published)),
            "duplicates": sum(map(self.duplicates_of, self.published | self.rows | self.forwarded)),
            "unsubscribed_forwarded": self.unsubscribed,
            "seconds": round(self.seconds, 1),
        }

    @property
    def adds_up(self) -> bool:
        counts = self.as_dict()
        return (
            counts["published"] > 0
            and counts["vehicles"] == len(self.vehicles)
            and counts["cloud_received"] == counts["subscribed"]
            and counts["parquet_rows"] == counts["published"]
            and not (counts["gaps"] or counts["duplicates"] or self.unsubscribed or self.cloud_disorder)
        )

    def show(self, console: Console) -> None:
        table = Table(title="what crossed to the cloud", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("vehicle", "published", "forwarded", "received", "Parquet", "gaps", "duplicates"):
            table.add_column(column, justify="left" if column == "vehicle" else "right", no_wrap=True)
        for one in self.vehicles:
            self._add(table, one.name, _of(one, self.published), end_section=one is self.vehicles[-1])
        self._add(table, "together", list(self.published))
        console.print(table)
        console.print(
            f"subscribed to {len(self.wanted)} of {len(self.published)} topics; forwarded though not subscribed "
            f"{self.unsubscribed}, out of order {self.cloud_disorder}, unreadable cells {self.problems}"
        )
        if self.dropped:
            drops = ", ".join(f"{where} {count}" for where, count in sorted(self.dropped.items()))
            console.print(f"dropped at the gateways: {drops}")
        if self.plot is not None:
            console.print(f"plot: {self.plot}")

    def _add(self, table: Table, name: str, topics: list[str], *, end_section: bool = False) -> None:
        counts = (self.published, self.forwarded, self.received, self.rows)
        sums = [sum(count[topic] for topic in topics) for count in counts]
        sums += [sum(map(self.gaps_of, topics)), sum(map(self.duplicates_of, topics))]
        table.add_row(name, *(f"{number:,}" for number in sums), end_section=end_section)


def _of(vehicle: Vehicle, topics: Iterable[str]) -> list[str]:
    authorities = (vehicle.name, vehicle.controller)
    return [topic for topic in topics if uris.parse(topic).authority_name in authorities]
