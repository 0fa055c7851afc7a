"""up-streamer pause, resume, paused, vehicles, subscriptions: commands for operators.

over the control socket of a running streamer   -> pause, resume, paused (else in its files), vehicles
in the files of a data_dir                      -> subscriptions
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from storage import logs
from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir, endpoints, load
from streamer.commands.options import uri as uri_of
from streamer.commands.terminal import Misuse
from streamer.config import Config
from streamer.egress import paused as pauses
from streamer.operating import control
from streamer.operations import VEHICLES_MAX
from uprotocol import uri as uris
from uprotocol.status import invalid

Topic = Annotated[
    str, typer.Argument(help="A pattern of topics: resource FFFF for all of an entity, authority * for all.")
]
Peer = Annotated[
    str,
    typer.Argument(
        help="The endpoint for which they are paused, or an authority behind one.", autocompletion=endpoints
    ),
]


def pause(topic: Topic, peer: Peer, at: DataDir, as_json: AsJson = False) -> None:
    """Stop dispatching a topic to a peer: its records wait in the log, also over restarts, until it is resumed. The
    streamer may run or be stopped.

    Example: [bold]up-streamer pause //vehicle1/8001/1/8001 cloud --config vehicle.toml[/]
    """
    _control("pause", topic, peer, at, as_json)


def resume(topic: Topic, peer: Peer, at: DataDir, as_json: AsJson = False) -> None:
    """Dispatch a topic again, beginning with the records that wait. The pattern ends each pause that it covers.

    Example: [bold]up-streamer resume //vehicle1/8001/1/FFFF cloud --config vehicle.toml[/]
    """
    _control("resume", topic, peer, at, as_json)


def paused(at: DataDir, as_json: AsJson = False) -> None:
    """Show which topics are paused, and for whom.

    Example: [bold]up-streamer paused --config vehicle.toml[/]
    """
    _control("paused", "", "", at, as_json)


def _control(do: str, topic: str, peer: str, at: DataDir, as_json: bool) -> None:
    if topic:
        uri_of(topic)
    config = load(at.config) if at.config is not None else None
    if do == "pause" and config is not None and control.call(at.path, "paused") is None:
        _require_peer(config, peer)  # the streamer itself does it while it runs
    found = control.ask(at.path, do, topic, peer, config.authority if config is not None else "")
    if do == "resume" and not as_json:
        terminal.out.print(f"resumed: {topic} to {peer}", markup=False)
    for one in found:
        terminal.tell(as_json, one._asdict(), f"paused: {one.topic} to {one.peer}")
    if not found and not as_json:
        terminal.out.print("nothing is paused")


def reload(
    at: DataDir,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file, and show what it changes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have a running streamer take over its changed file. If anything in it is wrong, nothing is changed.

    Example: [bold]up-streamer reload --config vehicle.toml --dry-run[/]
    """
    answer = control.require(at.path, "reload", {"dry_run": dry_run}, answer_s=None)
    done = "ok: these changes are possible" if dry_run else "ok: reloaded"
    lines = [*answer["changes"], done] if answer["changes"] else ["ok: nothing has changed in the file"]
    terminal.tell(as_json, answer, "\n".join(lines))


def _require_peer(config: Config, peer: str) -> None:
    names = [section.name for section in config.endpoint]
    if peer not in names and not any(uris.is_one_of(peer, section.authorities) for section in config.endpoint):
        raise pauses.unknown_peer(peer, names)


def vehicles(
    at: DataDir,
    top: Annotated[int, typer.Option(min=1, max=VEHICLES_MAX, help="How many: those that send most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what each source authority sends: messages, bytes, topics, drops. Only while the streamer runs; the admin
    port lists all authorities.

    Example: [bold]up-streamer vehicles --top 10 --config cloud.toml[/]
    """
    found = control.require(at.path, "vehicles", {"count": top})["vehicles"]
    columns = ("authority", "endpoint", "per_s", "messages", "bytes", "topics", "dropped")
    rows = found if as_json else [{**one, "last seen": terminal.moment(one["seen_ms"])} for one in found]
    title = f"the {len(found)} source authorities that send most"
    terminal.tell_all(as_json, rows, title, (*columns, "last seen"))


def subscriptions(
    store: Annotated[Path | None, typer.Option(help="The file of a uSubscription service ...")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="... or the TOML file of a streamer that embeds one.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only topics that match this pattern.")] = None,
    subscriber: Annotated[str | None, typer.Option(help="Only subscribers that match this pattern.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print each change as it happens, until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who is subscribed to what, from the store of a uSubscription service, while it runs or not.

    Example: [bold]up-streamer subscriptions --config vehicle.toml --topic //vehicle1/FFFFFFFF/FF/FFFF --watch[/]
    """
    from usubscription.inspect import StoreView

    logs.configure()
    if (store is None) == (config is None):
        raise Misuse("say either --store FILE or --config FILE")
    filters = [uri_of(text) if text is not None else None for text in (topic, subscriber)]
    path = store if store is not None else load(config or Path()).streamer.data_dir / "usubscription.db"
    if not path.is_file():
        raise invalid(f"there is no store at {path}: pass the file that the service was started with")
    with StoreView(path) as view:
        for entry in view.watch(*filters) if watch else ():
            line = f"{entry['event']:<8} {entry['status']:<17} {entry['topic']}  {entry['subscriber']}"
            terminal.tell(as_json, entry, line)
        if watch:
            return
        entries, summary = view.subscriptions(*filters), view.summary()
    counts = f"{summary['subscriptions']} subscriptions at {summary['authority']}"
    title = f"{counts}, {summary['remote_commands_pending']} commands pending"
    columns = ("topic", "subscriber", "status", "expires", "sample_period_ms", "waiting_for")
    terminal.tell_all(as_json, entries, title, columns)
