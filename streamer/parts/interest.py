"""Who has subscribed to what, as parts: as it is learned, and what no rule serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamer.assembly import Assembly
from streamer.config import Config
from streamer.part import Part, Parts
from streamer.reporting import STREAMER, Condition, Reporter, Sample
from streamer.walk.without_rule import WithoutRule
from usubscription_client import ServiceInterest, StaticFile


class InterestPart(Part):
    name = "learn the interest"

    async def run(self) -> None:
        await self.assembly.interest.start()

    async def stop(self) -> None:
        await self.assembly.interest.stop()

    def conditions(self) -> Iterator[Condition]:
        for authority in self.assembly.interest.unhealthy if self.assembly.ready.is_set() else ():
            owner, what = self.assembly.endpoints.owner(authority), f"uSubscription of {authority} does not answer"
            yield Condition(f"{what}: its last known subscriptions serve", owner.name if owner else STREAMER)

    def samples(self) -> Iterator[Sample]:
        yield "interest_version", (), self.assembly.interest.version

    async def check(self, old: Config, new: Config) -> StaticFile | None:
        if new.usubscription.static_file is None:
            return None
        static = StaticFile(new.usubscription.static_file)
        await static.load()
        return static

    def change(self, old: Config, new: Config, checked: Any) -> None:
        for source in self.assembly.interest.sources:
            if isinstance(source, ServiceInterest):
                source.refresh_ms = int(new.usubscription.refresh_s * 1000)

    async def after_change(self, old: Config, new: Config, checked: StaticFile | None) -> None:
        interest = self.assembly.interest
        files = [source for source in interest.sources if isinstance(source, StaticFile)]
        if old.usubscription.static_file == new.usubscription.static_file:
            for source in files:
                await source.refresh()
            return
        if checked is not None:
            await interest.add_source(checked)
        for source in files:
            await interest.remove_source(source)


class WithoutRulePart(Part):
    name = "subscriptions without rule"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.without_rule = WithoutRule(assembly.endpoints, assembly.rules, assembly.interest)

    async def run(self) -> None:
        await self.without_rule.run()

    def reporters(self) -> tuple[Reporter]:
        return (self.without_rule,)
