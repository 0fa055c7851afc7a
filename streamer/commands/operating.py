"""up-streamer pause, resume, paused, vehicles, subscriptions: commands for operators.

over the control socket of a running streamer   -> pause, resume, paused (else in its files), vehicles
in the files of a data_dir                      -> subscriptions
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from storage import logs
from streamer.commands import terminal
from streamer.commands.letters import span_ms
from streamer.commands.options import AsJson, DataDir, endpoints, load
from streamer.commands.options import uri as uri_of
from streamer.commands.terminal import Misuse
from streamer.config import Config
from streamer.data_dir import SUBSCRIPTIONS_FILE
from streamer.operating import control
from streamer.parts.senders import VEHICLES_MAX
from streamer.walk import paused as pauses
from streamer.walk.paused import Pause
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode


@dataclass(frozen=True)
class Dispatched:
    """What is paused or resumed: a topic toward a peer, everything to an endpoint, or everything of a rule."""

    topic: Annotated[
        str | None, typer.Argument(help="A pattern of topics: resource FFFF for all of an entity, authority * for all.")
    ] = None
    peer: Annotated[
        str | None,
        typer.Argument(
            help="The endpoint for which they are paused, or an authority behind one.", autocompletion=endpoints
        ),
    ] = None
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", "-e", help="Everything for this endpoint.", autocompletion=endpoints)
    ] = None
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="FROM:TO", help="Everything that one endpoint sends to another.")
    ] = None

    def pause(self) -> Pause:
        """Raises Misuse unless it is one thing."""
        match self.topic, self.peer, self.endpoint, self.rule:
            case str(), str(), None, None:
                return Pause(uris.format(uri_of(self.topic)), self.peer)
            case None, None, str(), None:
                return Pause(uris.format(uris.ANY), self.endpoint)
            case None, None, None, str() if self.rule.count(":") == 1 and all(self.rule.split(":")):
                origin, peer = self.rule.split(":")
                return Pause(uris.format(uris.ANY), peer, origin)
        raise Misuse("say what: TOPIC PEER, or --endpoint NAME, or --rule FROM:TO")


def pause(at: DataDir, what: Dispatched, as_json: AsJson = False) -> None:
    """Stop dispatching a topic to a peer, everything to an endpoint, or everything of a rule: the records wait in the
    log, also over restarts, until it is resumed. Requests and responses go on. The streamer may run or be stopped.

    Example: [bold]up-streamer pause //vehicle1/8001/1/8001 cloud --config vehicle.toml[/]
    """
    _control("pause", at, what.pause(), as_json)


def resume(at: DataDir, what: Dispatched, as_json: AsJson = False) -> None:
    """Dispatch again, beginning with the records that wait. A pattern ends each pause that it covers; --endpoint all
    pauses toward it but those of rules.

    Example: [bold]up-streamer resume --endpoint cloud --config vehicle.toml[/]
    """
    _control("resume", at, what.pause(), as_json)


def paused(at: DataDir, as_json: AsJson = False) -> None:
    """Show which topics, endpoints and rules are paused.

    Example: [bold]up-streamer paused --config vehicle.toml[/]
    """
    _control("paused", at, None, as_json)


def _control(do: str, at: DataDir, pause: Pause | None, as_json: bool) -> None:
    config = load(at.config) if at.config is not None else None
    if pause is not None and do == "pause" and config is not None and control.call(at.path, "paused") is None:
        _require(config, pause)  # the streamer itself does it while it runs
    topic, peer, origin = pause or ("", "", "")
    in_force = control.ask(at.path, do, topic, peer, config.authority if config is not None else "", origin)
    if do == "resume" and not as_json:
        terminal.out.print(terminal.plain(f"resumed: {pause}"), markup=False)
    for each in in_force:
        terminal.tell(as_json, each.as_dict(), f"paused: {each}")
    if not in_force and not as_json:
        terminal.out.print("nothing is paused")


def _require(config: Config, pause: Pause) -> None:
    """Raises NOT_FOUND if the configuration lacks the peer, or the rule."""
    from streamer.building import rule_of

    names = [section.name for section in config.endpoint]
    is_behind = any(uris.is_one_of(pause.peer, section.authorities) for section in config.endpoint)
    if pause.peer not in names and not is_behind:
        raise pauses.unknown_peer(pause.peer, names)
    ways = {(rule.ingress, rule.egress) for rule in map(rule_of, config.rules)}
    if pause.origin and (pause.origin, pause.peer) not in ways:
        raise UStatusError(UCode.NOT_FOUND, f"there is no rule from {pause.origin!r} to {pause.peer!r}")


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


def log_level(
    at: DataDir,
    level: Annotated[logs.Level | None, typer.Argument(help="The level; without it, the present one is shown.")] = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="How long, as 30s, 10m, 2h, 7d; without it, until a restart.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or change the level of the log of a running streamer. Afterwards the configured level is back.

    Example: [bold]up-streamer log-level debug --for 10m --config vehicle.toml[/]
    """
    milliseconds = span_ms(duration) if duration is not None else None
    if duration is not None and (milliseconds is None or level is None):
        raise Misuse(f"expected a level and a duration as 30s, 10m, 2h, 7d; got --for {duration}")
    given = {"level": level} | ({} if milliseconds is None else {"for_s": milliseconds // 1_000})
    answer = control.require(at.path, "log_level", given if level is not None else {})
    ends = f" for {answer['ends_in_s']} s" if answer["ends_in_s"] is not None else ""
    configured = f", configured is {answer['configured']}" if answer["configured"] != answer["level"] else ""
    terminal.tell(as_json, answer, f"the log level is {answer['level']}{ends}{configured}")


def vehicles(
    at: DataDir,
    top: Annotated[int, typer.Option(min=1, max=VEHICLES_MAX, help="How many: those that send most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what each source authority sends: messages, bytes, topics, drops. Only while the streamer runs; the admin
    port lists all authorities.

    Example: [bold]up-streamer vehicles --top 10 --config cloud.toml[/]
    """
    vehicles = control.require(at.path, "vehicles", {"count": top})["vehicles"]
    columns = ("authority", "endpoint", "per_s", "messages", "bytes", "topics", "dropped")
    rows = vehicles if as_json else [{**row, "last seen": terminal.moment(row["seen_ms"])} for row in vehicles]
    title = f"the {len(vehicles)} source authorities that send most"
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
    """Show who is subscribed to what, from the store of a uSubscription service, while it runs or not; with --config,
    also which rule keeps a topic from its subscriber.

    Example: [bold]up-streamer subscriptions --config vehicle.toml --topic //vehicle1/FFFFFFFF/FF/FFFF --watch[/]
    """
    from usubscription.inspect import StoreView

    logs.configure()
    if (store is None) == (config is None):
        raise Misuse("say either --store FILE or --config FILE")
    filters = [uri_of(text) if text is not None else None for text in (topic, subscriber)]
    loaded = load(config) if config is not None else None
    path = loaded.streamer.data_dir / SUBSCRIPTIONS_FILE if loaded is not None else store or Path()
    if not path.is_file():
        raise invalid(f"there is no store at {path}: pass the file that the service was started with")
    with StoreView(path) as view:
        for entry in view.watch(*filters) if watch else ():
            line = f"{entry['event']:<8} {entry['status']:<17} {entry['topic']}  {entry['subscriber']}"
            terminal.tell(as_json, entry, line)
        if watch:
            return
        entries, summary = view.subscriptions(*filters), view.summary()
    if loaded is not None:
        from streamer.commands.stored_interest import add_causes

        add_causes(loaded, entries)
    counts = f"{summary['subscriptions']} subscriptions at {summary['authority']}"
    title = f"{counts}, {summary['remote_commands_pending']} commands pending"
    columns = ("topic", "subscriber", "status", "expires", "sample_period_ms", "waiting_for", "not_forwarded")
    terminal.tell_all(as_json, entries, title, columns)
