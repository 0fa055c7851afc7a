"""Steps that change the configuration of a running gateway, one for each kind of change."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from campaigns.operate.sites import Site, Table, toml
from campaigns.operate.stage import Stage, has_command, step
from transports.ports import free_port

RELOADS: Final = "reloads_total"
_can: Final = has_command("reload")


@contextmanager
def changed(stage: Stage, site: Site, change: Callable[[Table], None]) -> Iterator[str]:
    """Change the configuration, reload it by the command, and reload the former one at the end by SIGHUP, which a
    metric reports. Yields what the command has said."""
    before = copy.deepcopy(site.config)
    change(site.config)
    site.write()
    try:
        yield stage.command(site, "reload")
    finally:
        site.config = before
        reload_by_signal(stage, site)


def reload_by_signal(stage: Stage, site: Site) -> None:
    count = site.metric(RELOADS, "applied")
    site.hang_up()
    stage.reported("SIGHUP", lambda: site.metric(RELOADS, "applied") > count)


def _expect(stage: Stage, said: str, *parts: str) -> None:
    if missing := [part for part in parts if part not in said]:
        stage.row.problems.append(f"the reload did not tell {missing}: {said[:300]}")


@step("reload: rules", _can, is_calm=True)
def rules(stage: Stage) -> None:
    """A rule for each direction, which keeps from leaving what nobody sends."""

    def change(config: Table) -> None:
        up = {"from": "vehicle", "to": "offboard", "deny": ["//ecu2/8009/1/FFFF"]}
        config["rule"] = [up, {"from": "offboard", "to": "vehicle"}]

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "rule")
        stage.flowing()


@step("reload: record", _can, is_calm=True)
def record(stage: Stage) -> None:
    def change(config: Table) -> None:
        config["history"]["record"].append("//backend/FFFFFFFF/FF/FFFF")

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "~ history.record")
        stage.flowing()


@step("reload: access", _can, is_calm=True)
def access(stage: Stage) -> None:
    def change(config: Table) -> None:
        config["access"] = [{"callers": ["//ecu9/FFFFFFFF/FF/0"], "allow": ["/FFFFFFFF/FF/FFFF"]}]

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "access")
        stage.flowing()


@step("reload: egress", _can, is_calm=True)
def egress(stage: Stage) -> None:
    def change(config: Table) -> None:
        config["egress"] |= {"retry_max_ms": 700, "messages_per_s": 3000}

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "egress.retry_max_ms")
        stage.flowing()


@step("reload: settings of an endpoint", _can, is_calm=True)
def settings(stage: Stage) -> None:
    """The link to the broker is closed and opened again: its session keeps what comes meanwhile."""

    def change(config: Table) -> None:
        config["endpoint"][1]["settings"] |= {"host": "localhost", "keep_alive_s": 20}

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "~ endpoint offboard", "settings.host")
        stage.calm()
        stage.flowing()
    stage.calm()


@step("reload: an endpoint comes and goes", _can, is_calm=True)
def endpoint(stage: Stage) -> None:
    def change(config: Table) -> None:
        config["endpoint"].append(
            {"name": "diag", "transport": "local", "authorities": ["tester"], "usubscription": "none"}
        )

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "+ endpoint diag")
        stage.reported("the endpoint", lambda: stage.vin1.ready()["endpoints"].get("diag"))
        stage.flowing()
    stage.ended("the endpoint", lambda: stage.vin1.ready()["endpoints"].get("diag"))


@step("reload: the admin port", _can, is_calm=True)
def admin(stage: Stage) -> None:
    site, port = stage.vin1, free_port()
    before = site.gateway.admin_port
    site.config["streamer"]["admin"] = f"127.0.0.1:{port}"
    site.write()
    _expect(stage, stage.command(site, "reload"), "streamer.admin")
    site.gateway.admin_port = port
    stage.reported("the new port", site.ready)
    site.config["streamer"]["admin"] = f"127.0.0.1:{before}"
    site.hang_up()
    site.gateway.admin_port = before
    stage.reported("the former port", site.ready)


@step("reload: the log's level", _can, is_calm=True)
def log_level(stage: Stage) -> None:
    def change(config: Table) -> None:
        config["streamer"]["log_level"] = "debug"

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "streamer.log_level")
        stage.flowing()


@step("reload: a mistake", _can, is_calm=True)
def mistake(stage: Stage) -> None:
    """Nothing changes, and each way of asking says why."""
    site = stage.vin1
    site.write(toml(site.config) + "\n[hstory]\nrecord = []\n")
    _expect(stage, stage.command(site, "reload", fails=True), "hstory")
    failed = site.metric(RELOADS, "failed")
    site.gateway.signal(signal.SIGHUP)
    stage.reported("SIGHUP", lambda: site.line("the last reload changed nothing"))
    if site.metric(RELOADS, "failed") <= failed:
        stage.row.problems.append("the metric does not count the failed reload")
    stage.flowing()
    reload_by_signal(stage, site)
    stage.ended("the mistake", lambda: site.line("the last reload changed nothing"))


@step("reload: what needs a restart", _can)
def needs_restart(stage: Stage) -> None:
    """It stays as it is; a note says so until the file is right again."""

    def change(config: Table) -> None:
        config["history"] = config["history"] | {"volatile": ["//ecu1/8001/1/7FFF"]}

    with changed(stage, stage.vin1, change) as said:
        _expect(stage, said, "! history.volatile")
        stage.reported("a note", lambda: stage.vin1.line("needs a restart"))
    stage.ended("a note", lambda: stage.vin1.line("needs a restart"))


@step("reload: the name of an endpoint", _can, is_calm=True)
def name(stage: Stage) -> None:
    site = stage.vin2
    for was, name in (("offboard", "uplink"), ("uplink", "offboard")):
        site.endpoint(was).update(name=name, renamed_from=was)
        reload_by_signal(stage, site)
        stage.calm()
        stage.flowing()
    del site.endpoint("offboard")["renamed_from"]
    reload_by_signal(stage, site)


@step("rename", _can)
def rename(stage: Stage) -> None:
    """With a backlog: the broker is away, so records wait under the old name."""
    site, broker = stage.vin2, stage.fleet.broker
    broker.stop()
    stage.reported("the broker is away", lambda: site.line("its network is away", "no connection"))
    stage.until("there is no backlog", lambda: site.metric("backlog", "offboard") > 0)
    site.endpoint("offboard").update(name="uplink", renamed_from="offboard")
    site.write()
    _expect(stage, stage.command(site, "reload"), "uplink")
    stage.reported("the new name", lambda: site.ready()["endpoints"].get("uplink"))
    stage.reported("its backlog", lambda: site.metric("backlog", "uplink") > 0)
    broker.start()
    broker.wait_ready()
    stage.calm()
    stage.flowing()
    site.endpoint("uplink").update(name="offboard", renamed_from="uplink")
    reload_by_signal(stage, site)
    stage.reported("the former name", lambda: site.ready()["endpoints"].get("offboard"))
    del site.endpoint("offboard")["renamed_from"]
    reload_by_signal(stage, site)
