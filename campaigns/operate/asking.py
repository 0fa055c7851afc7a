"""Steps of commands that ask or steer a running gateway: status, pause, dead letters, check --connect."""

from __future__ import annotations

import json
from typing import Any, Final

from campaigns.chaos.processes import ChaosError
from campaigns.operate.fleet import access_file
from campaigns.operate.sites import Site
from campaigns.operate.stage import Stage, has_command, step

TOPIC: Final = "//ecu1/8001/1/8001"
LETTER_BYTES: Final = 300_000
PACKET_BYTES: Final = 100_000  # that the broker takes, for a while


@step("pause and resume", is_calm=True)
def pause(stage: Stage) -> None:
    site = stage.vin1
    stage.command(site, "pause", TOPIC, "offboard")
    stage.reported("/readyz", lambda: site.line("pause"))
    stage.flowing(lambda flow: flow != "up://ecu1.vin1/8001/1/8001")
    stage.command(site, "resume", TOPIC, "offboard")
    stage.ended("the pause", lambda: site.line("paused"))


@step("dead letters", has_command("dead-letters", "resend"))
def dead_letters(stage: Stage) -> None:
    """A message that is too large for the broker: a dead letter. Once the broker takes it, it is sent again."""
    site, fleet = stage.vin1, stage.fleet
    _restart_broker(stage, f"max_packet_size {PACKET_BYTES}")
    before = site.metric("dead_letters_total")
    fleet.say_letter(LETTER_BYTES)
    stage.reported("the metric", lambda: site.metric("dead_letters_total") > before)
    stage.reported("a note", lambda: site.line("dead letter"))
    said = stage.command(site, "dead-letters", "list")
    if "8001/1/8003" not in said:
        stage.row.problems.append(f"the list does not have it: {said[:300]}")
    _restart_broker(stage)
    stage.command(site, "dead-letters", "resend", "--all", "--dry-run")
    stage.command(site, "dead-letters", "resend", "--all")
    stage.command(site, "dead-letters", "purge", "--all")
    stage.ended("the dead letter", lambda: site.line("dead letter"))


def _restart_broker(stage: Stage, *settings: str) -> None:
    broker = stage.fleet.broker
    broker.set([*stage.fleet.secrets.broker_settings, *settings])
    broker.stop()
    broker.start()
    broker.wait_ready()
    stage.calm()


@step("check --connect", has_command("check", "--connect"), is_calm=True)
def check(stage: Stage) -> None:
    """Under load; what it finds is good, and nobody notices it."""
    for site in stage.sites:
        losses = _dropped(site)
        said = stage.command(site, "check", "--connect")
        if "FAIL" in said:
            stage.row.problems.append(f"{site.name}: {said[:600]}")
        if lost := {key: count for key, count in _dropped(site).items() if count > losses.get(key, 0)}:
            stage.row.problems.append(f"{site.name} has dropped something meanwhile: {lost}")
    stage.flowing()


def _dropped(site: Site) -> dict[str, float]:
    """What an endpoint has dropped, by metric; not second copies, which Zenoh and a resumed session bring."""
    found = site.gateway.metrics().items()
    return {key: count for key, count in found if key.startswith("dropped_total") and "duplicate" not in key}


@step("status", has_command("status"))
def status(stage: Stage) -> None:
    """In each state: ready, a stream that is held, no network, stopped."""
    site, broker = stage.vin1, stage.fleet.broker
    stage.calm()
    _expect(stage, _status(stage, site), "ready")
    stage.command(site, "status")
    broker.change_access(access_file((("vin1", "ecu1.vin1/backend"),)))
    stage.reported("held", lambda: any(one["held_count"] for one in _page(site).get("endpoints", ())))
    broker.change_access(access_file())
    stage.ended("held", lambda: any(one["held_count"] for one in _page(site)["endpoints"]))
    broker.stop()
    stage.reported("not ready", lambda: _page(site).get("state") == "not ready")
    _expect(stage, _status(stage, site), "not ready")
    broker.start()
    broker.wait_ready()
    stage.calm()
    stopped_at = stage.fleet.book.now()
    site.gateway.stop()
    said = stage.command(site, "status", fails=True)
    if "run" not in said:
        stage.row.problems.append(f"of a stopped gateway it says: {said[:300]}")
    site.gateway.start()
    site.gateway.wait_ready()
    stage.linked(site, stopped_at)


def _status(stage: Stage, site: Site) -> dict[str, Any]:
    said = stage.command(site, "status", "--json")
    try:
        found: dict[str, Any] = json.loads(said.splitlines()[0])
    except (ValueError, IndexError):
        raise ChaosError(f"status --json is no JSON: {said[:300]}") from None
    stage.row.reported[-1] = f"up-streamer status --json: {found.get('state')} {found.get('reason', '')}"
    return found


def _page(site: Site) -> dict[str, Any]:
    """/status of the admin port."""
    found: dict[str, Any] = json.loads(site.gateway.get("/status") or "{}")
    return found


def _expect(stage: Stage, found: dict[str, Any], state: str) -> None:
    if found.get("state") != state:
        stage.row.problems.append(f"status says {found.get('state')!r}, expected {state!r}: {found.get('reason')}")
