"""up-streamer pause, resume, paused, vehicles: what is done and asked over the control socket of a streamer."""

from __future__ import annotations

from typing import Annotated

import typer

from streamer import config as configs
from streamer import control
from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir

Topic = Annotated[
    str, typer.Argument(help="A pattern of topics: FFFF as resource for all of an entity, * as authority for all.")
]
Peer = Annotated[str, typer.Argument(help="The endpoint that gets them no more, or an authority behind one.")]


def pause(topic: Topic, peer: Peer, at: DataDir, as_json: AsJson = False) -> None:
    """Stop dispatching a topic to a peer: it waits in the log, over restarts, until it is resumed. The streamer may run
    or not.

    Example: [bold]up-streamer pause //vehicle1/8001/1/8001 cloud --config vehicle.toml[/]
    """
    _control("pause", topic, peer, at, as_json)


def resume(topic: Topic, peer: Peer, at: DataDir, as_json: AsJson = False) -> None:
    """Dispatch again, what has waited first. The pattern ends each pause that it covers.

    Example: [bold]up-streamer resume //vehicle1/8001/1/FFFF cloud --config vehicle.toml[/]
    """
    _control("resume", topic, peer, at, as_json)


def paused(at: DataDir, as_json: AsJson = False) -> None:
    """What is not dispatched now, and to whom.

    Example: [bold]up-streamer paused --config vehicle.toml[/]
    """
    _control("paused", "", "", at, as_json)


def _control(do: str, topic: str, peer: str, at: DataDir, as_json: bool) -> None:
    folder = at.path
    own = configs.load(at.config).authority if at.config is not None else ""
    found = control.ask(folder, do, topic, peer, own)
    for one in found:
        terminal.tell(as_json, one._asdict(), f"paused: {one.topic} to {one.peer}")
    if not found and not as_json:
        terminal.out.print("nothing is paused")


def vehicles(
    at: DataDir,
    top: Annotated[int, typer.Option(min=1, max=control.VEHICLES_MAX, help="So many of those that send most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """What each source authority sends: messages, bytes, topics, drops. While the streamer runs; the admin port has all
    of it.

    Example: [bold]up-streamer vehicles --top 10 --config cloud.toml[/]
    """
    found = control.vehicles(at.path, top)
    columns = ("authority", "endpoint", "per_s", "messages", "bytes", "topics", "dropped")
    rows = found if as_json else [{**one, "last seen": terminal.moment(one["seen_ms"])} for one in found]
    title = f"the {len(found)} source authorities that send most"
    terminal.tell_all(as_json, rows, title, (*columns, "last seen"))
