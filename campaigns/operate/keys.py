"""Steps that change passwords, certificates and access rules."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from campaigns.operate.fleet import access_file
from campaigns.operate.stage import Stage, step
from tests.certificates import DAY

AWAY: Final = ("its network is away", "no connection", "not open yet", "can't be opened")
STEADY_S: Final = 2.5  # a gateway suspects another one of its name behind several shorter connections
# behind a shorter connection a gateway waits longer before each attempt, and only an attempt shows what is wrong
SOUND_S: Final = 16.0


def _reconnect(stage: Stage, steady_s: float = STEADY_S) -> float:
    """The broker starts anew, so that everybody logs in again; its sessions are on its disk. Returns when that was."""
    time.sleep(steady_s)
    stage.fleet.broker.stop()
    began = time.monotonic()
    stage.fleet.broker.start()
    stage.fleet.broker.wait_ready()
    return began


@step("password")
def password(stage: Stage) -> None:
    """A new one at the broker first: the gateway reports that its own is wrong. Then there, without a restart."""
    fleet, site = stage.fleet, stage.vin1
    fleet.secrets.passwords["vin1"] = "second-vin1"
    fleet.secrets.write_passwords()
    began = _reconnect(stage, SOUND_S)
    stage.reported("the wrong password", lambda: site.line("Not authorized", "Bad user name"), began)
    fleet.secrets.write_password("vin1")
    stage.ended("the wrong password", lambda: site.line(*AWAY))


@step("the broker's certificate")
def broker_certificate(stage: Stage) -> None:
    stage.fleet.secrets.issue("broker")
    _reconnect(stage)
    stage.reported("the broker is away", lambda: any(site.line(*AWAY) for site in stage.sites) or "already back")


@step("the authority of all certificates")
def authority(stage: Stage) -> None:
    """In the order that works: both are trusted, all certificates are new, only the new authority is trusted. Before
    that, a broker whose certificate nobody trusts yet: reported."""
    secrets = stage.fleet.secrets
    old = secrets.authority
    new = secrets.authority = secrets.new_authority()
    secrets.issue("broker")
    began = _reconnect(stage, SOUND_S)
    for site in stage.sites:
        stage.reported(f"{site.name} does not trust the broker", partial(site.line, "certificate"), began)
    secrets.trust(old, new)
    _reconnect(stage)
    stage.calm()
    for user in secrets.passwords:
        secrets.issue(user)
    secrets.trust(new)
    _reconnect(stage)


@step("a gateway's own certificate")
def own_certificate(stage: Stage) -> None:
    """Renewed while it runs: no restart, no reload; it is used at the next connection."""
    stage.fleet.secrets.issue("vin1")
    _reconnect(stage)
    stage.reported("the broker is away", lambda: stage.vin1.line(*AWAY) or "already back")


@step("an expired certificate")
def expired(stage: Stage) -> None:
    site = stage.vin1
    stage.fleet.secrets.issue("vin1", -DAY)
    began = _reconnect(stage, SOUND_S)
    stage.reported("expired", lambda: site.line("expired", "EXPIRED"), began)
    stage.fleet.secrets.issue("vin1")
    stage.ended("the network is away", lambda: site.line(*AWAY))


@step("a wrong access rule")
def wrong_rule(stage: Stage) -> None:
    """The broker does not let the vehicle publish for ecu1: reported by the hold, and sent in order once the rule is
    right."""
    site, broker = stage.vin1, stage.fleet.broker
    broker.change_access(access_file((("vin1", "ecu1.vin1/backend"),)))
    stage.reported("held", lambda: site.gateway.held() > 0)
    stage.flowing(lambda flow: not flow.startswith("up://ecu1.vin1/"))
    broker.change_access(access_file())
    stage.ended("held", lambda: site.gateway.held() > 0)


@step("a wrong access rule, and a restart")
def wrong_rule_and_restart(stage: Stage) -> None:
    """The rule is right again just before the broker restarts: what was under way then failed for two reasons."""
    site, broker = stage.vin1, stage.fleet.broker
    for _ in range(3):
        broker.change_access(access_file((("vin1", "ecu1.vin1/backend"),)))
        stage.reported("held", lambda: site.gateway.held() > 0)
        broker.change_access(access_file())
        _reconnect(stage, steady_s=0.0)
        stage.calm()
        stage.ended("held", lambda: site.gateway.held() > 0)
