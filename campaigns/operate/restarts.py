"""Steps that end processes: an upgrade, rolling restarts, kill -9, the broker away, two clients of one name."""

from __future__ import annotations

import ssl
import time
from functools import partial
from typing import Final

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from campaigns.chaos.processes import Gateway
from campaigns.operate.fleet import Fleet
from campaigns.operate.sites import Site
from campaigns.operate.stage import Stage, step

AWAY_S: Final = 20.0  # the broker
SUSPECTED_S_MAX: Final = 10.0
HELD_S: Final = 0.3  # a session, by somebody else


@step("upgrade", lambda fleet: fleet.why_not_old)
def upgrade(stage: Stage) -> None:
    """The fleet was built with the version before in one vehicle; the present one takes over its data, under load. A
    way back is refused and reported, or works."""
    site, began = stage.vin2, stage.fleet.book.now()
    old = site.gateway
    _replace(site, site.made())
    stage.reported("the present version is up", site.status)
    stage.linked(site, began)
    stage.calm()
    stage.flowing()
    present = site.gateway
    present.stop()
    old.start()
    stage.until("the version before neither starts nor ends", lambda: old.is_ready() or not old.running)
    if old.running:
        stage.note("the version before reads the data, too", 0.0)
        stage.linked(site, began)
        stage.calm()
        stage.flowing()
        old.stop()
    else:
        stage.reported("the way back is refused", lambda: [*filter(None, old.said().splitlines())][-1:])
        old.forget()
    present.start()
    present.wait_ready()
    stage.linked(site, began)


def _replace(site: Site, fresh: Gateway) -> None:
    site.gateway.stop()
    site.gateway = fresh
    site.gateway.start()
    site.gateway.wait_ready()


@step("rolling restart")
def rolling_restart(stage: Stage) -> None:
    for site in stage.sites:
        began = stage.fleet.book.now()
        site.restart()
        stage.reported(f"{site.name} is up", site.status)
        stage.linked(site, began)
        stage.calm()
        stage.flowing()


@step("kill -9", may_double=True)
def kill(stage: Stage) -> None:
    for site in stage.sites:
        began = stage.fleet.book.now()
        site.gateway.kill()
        site.gateway.start()
        site.gateway.wait_ready()
        stage.reported(f"{site.name} is up", site.status)
        stage.linked(site, began)
        stage.calm()
        stage.flowing()


@step("client_id twice")
def client_id_twice(stage: Stage) -> None:
    """Somebody connects again and again as the vehicle's gateway. A broker that hangs up on us may not get through to
    say why: then it is certain after three short connections."""
    site = stage.vin1
    intruder = Intruder(stage.fleet, site, "vin1")
    began = time.monotonic()
    try:
        stage.reported("it hung up", lambda: _takes_over(intruder, site, "hung up", "client_id"), began)
        stage.reported("another client", lambda: _takes_over(intruder, site, "client_id"), began, SUSPECTED_S_MAX)
    finally:
        intruder.close()
    stage.ended("another client", lambda: site.line("client_id"))


def _takes_over(intruder: Intruder, site: Site, *says: str) -> str:
    intruder.connect()
    return site.line(*says)


@step("broker away")
def broker_away(stage: Stage) -> None:
    broker = stage.fleet.broker
    broker.stop()
    began = time.monotonic()
    for site in stage.sites:
        stage.reported(site.name, partial(site.line, "its network is away"), began)
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - began)))
    broker.start()
    broker.wait_ready()


class Intruder:
    """A client with the vehicle's own certificate, password and client_id; it keeps the session, and takes nothing."""

    def __init__(self, fleet: Fleet, site: Site, user: str) -> None:
        settings = site.endpoint("offboard")["settings"]
        made = paho.Client(CallbackAPIVersion.VERSION2, client_id=settings["client_id"], protocol=paho.MQTTv5)
        tls = settings["tls"]
        context = ssl.create_default_context(cafile=str(tls["ca_file"]))
        context.load_cert_chain(str(tls["cert_file"]), str(tls["key_file"]))
        made.tls_set_context(context)
        made.username_pw_set(user, fleet.secrets.passwords[user])
        made.manual_ack_set(True)
        self._client, self._port = made, fleet.broker.port

    def connect(self) -> None:
        session = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        session.SessionExpiryInterval = 4294967295
        self._client.connect("127.0.0.1", self._port, clean_start=False, properties=session)
        self._client.loop_start()
        time.sleep(HELD_S)
        self.close()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
