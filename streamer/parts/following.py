"""Following, as parts: other histories into our log, and ours handed over to who follows it."""

from __future__ import annotations

from typing import Any

from streamer import building
from streamer.assembly import Attached
from streamer.config import Config, EndpointSection, FollowSection
from streamer.part import Part
from streamer.reporting import Reporter
from uprotocol import uri as uris


class HandOverPart(Part):
    name = "hand-overs"

    async def load(self) -> None:
        self.assembly.handovers.load()

    async def run(self) -> None:
        await self.assembly.handovers.run()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.handovers,)

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        """After the pumps have begun, which it may set back."""
        followed_by = uris.parse(section.followed_by) if section.followed_by is not None else None
        self.assembly.handovers.add_endpoint(attached.endpoint, attached.pumps, followed_by)
        self.assembly.handovers.load_endpoint(section.name)

    def pumps_removed(self, attached: Attached) -> None:
        self.assembly.handovers.remove_endpoint(attached.endpoint.name)

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self.assembly.handovers.absent_ms_max = new.history.absent_ms


class FollowPart(Part):
    name = "follows"

    async def load(self) -> None:
        self.assembly.follows.load()

    async def start(self) -> None:
        await self.assembly.follows.start()

    async def stop(self) -> None:
        await self.assembly.follows.stop()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.follows,)

    def endpoint_added(self, attached: Attached, section: EndpointSection) -> None:
        self._add(self.assembly.config, section.name)

    async def before_change(self, old: Config, new: Config) -> None:
        names = {section.name for section in new.endpoint}
        for name in [
            *_changed_follows(old, new),
            *(section.name for section in old.endpoint if section.name not in names),
        ]:
            await self.assembly.follows.remove_endpoint(self.assembly.endpoints[name])

    def change(self, old: Config, new: Config, checked: Any) -> None:
        for name in _changed_follows(old, new):
            self._add(new, name)

    def _add(self, config: Config, name: str) -> None:
        endpoints = self.assembly.endpoints
        follows = [building.follow_of(section, endpoints) for section in config.follow if section.endpoint == name]
        self.assembly.follows.add_endpoint(endpoints[name], follows)


def _changed_follows(old: Config, new: Config) -> list[str]:
    """Returns the endpoints whose followed histories begin anew."""
    names = {section.endpoint for section in (*old.follow, *new.follow)}

    def followed(config: Config) -> dict[str, tuple[list[str], list[FollowSection]]]:
        return {
            section.name: (section.authorities, [follow for follow in config.follow if follow.endpoint == section.name])
            for section in config.endpoint
            if section.name in names
        }

    before, after = followed(old), followed(new)
    return [name for name in before if name in after and before[name] != after[name]]
