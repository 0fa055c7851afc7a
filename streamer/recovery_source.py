"""A recovery source: where messages can be had that a topic's stream has lost. How a plugin is written: docs/edge.md.

[project.entry-points."up_streamer.recovery"]
drive = "my_package.drive:PLUGIN"   # PLUGIN = RecoveryPlugin("drive", DriveConfig, DriveSource)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from transports import plugin as plugins
from uprotocol import uuid as uuids
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

SOURCE_GROUP: Final = "up_streamer.recovery"

_SHAPE: Final = 'PLUGIN = RecoveryPlugin("drive", DriveConfig, DriveSource)'


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer of a source: the next messages of a topic, oldest first.

    `next`: the position behind them; None: that of the last message. `more`: there are more; ask again from `next`.
    """

    messages: Sequence[UMessage] = ()
    next: str | None = None
    more: bool = False


class RecoverySource:
    """The interface that authors implement. All methods are called on the event loop, and none may block it.

    A position says how far a topic was recorded. It is a printable text of at most asking.POSITION_CHARACTERS_MAX
    characters, which only the source understands.
    """

    async def fetch(self, topic: UUri, after: str | None) -> Fetched:
        """Returns the messages of `topic` after the position `after`; None: nothing was recorded yet. No message: none
        was missed. Their source is `topic`, and they have the ids with which they were published.

        Raises UStatusError; then the source is asked again. It is cancelled after `timeout_s` of its section.
        """
        raise NotImplementedError

    def position(self, message: UMessage) -> str:
        """Returns the position behind `message`; by default its id."""
        return uuids.format(message.attributes.id)

    def predecessor(self, message: UMessage) -> str | None:
        """Returns the position behind which `message` was published; None: unknown. A source that has this method
        notices each gap at once. Without it, a gap between two messages that came is not noticed."""
        return None

    async def close(self) -> None:
        """Called once, when the gateway stops."""


@dataclass(frozen=True)
class RecoveryPlugin:
    """A source that can be configured by name. `config` is a pydantic model with extra="forbid", which gets the
    `settings` of the section; `create(config)` does no I/O: `fetch` does."""

    name: str
    config: type[BaseModel]
    create: Callable[[Any], RecoverySource]


def _mistake(plugin: Any) -> str:
    if not isinstance(plugin, RecoveryPlugin):
        what = f"a streamer.recovery.source.RecoveryPlugin, such as {_SHAPE}"
        return f"its entry point must name {what}, and names {plugins.shown(plugin)}"
    return plugins.mistake_of(plugin.config, plugin.create, "create(config)")


SOURCES: Final = plugins.PluginKind(
    "recovery source", SOURCE_GROUP, _mistake, RecoverySource, "streamer.recovery.source.RecoverySource", "docs/edge.md"
)


def create(name: str, settings: Mapping[str, Any]) -> RecoverySource:
    """Make a source from its name and its settings. Raises as `transports.plugin.create_of`."""
    source: RecoverySource = plugins.create_of(SOURCES, name, settings)
    return source
