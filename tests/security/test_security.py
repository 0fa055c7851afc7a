"""The attacks in their short form, with bounds on bytes and completeness, not on latency. `make attack` runs them in
full, each on its own gateway.

Attacks with the same scene share a gateway, one after the other. After a broken bound the next one gets a new gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from campaigns.chaos import wire
from campaigns.chaos.processes import MOSQUITTO
from tests.security import raw
from tests.security.attackers import ATTACKERS
from tests.security.attacks import ATTACKS, NOT_YET, Attack
from tests.security.honest import Honest, percentile
from tests.security.hostile import ME, status_of
from tests.security.stage import Scene, Stage
from tests.security.trial import Trial
from tests.tiers import full

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

RATE = 40.0  # honest messages per second
PEACE_S = 0.7
SCENES = list(dict.fromkeys(attack.scene for attack in ATTACKS))
SHORT = sorted(
    (attack for attack in ATTACKS if attack.short is not None), key=lambda attack: SCENES.index(attack.scene)
)
QUICK = ("malformed-zenoh", "polls", "publish-50mb", "web-feeds")  # one of each kind: bytes, requests, floods
LAST = {attack.scene: attack.name for attack in SHORT}  # the gateway is restarted after it


class Stages:
    """One gateway at a time, kept while the scene is the same and no bound is broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: tuple[Scene, Stage, Honest] | None = None
        self._built = 0

    def of(self, scene: Scene) -> tuple[Stage, Honest]:
        if self._kept is None or self._kept[0] != scene:
            self.close()
            self._built += 1
            folder = self._folder / str(self._built)
            folder.mkdir()
            stage = Stage(scene, folder)
            try:
                stage.start()
                self._kept = (scene, stage, Honest(stage, RATE))
            except BaseException:
                stage.close()
                raise
        return self._kept[1], self._kept[2]

    def close(self) -> None:
        if self._kept is not None:
            _, stage, honest = self._kept
            self._kept = None
            honest.close()
            stage.close()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("security"))
    yield made
    made.close()


def _param(attack: Attack) -> object:
    marks = [] if attack.name in QUICK else [full]
    if attack.name in NOT_YET:
        marks.append(pytest.mark.xfail(reason=NOT_YET[attack.name], strict=False))
    return pytest.param(attack, id=attack.name, marks=marks)


@pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto")
@pytest.mark.parametrize("attack", [_param(attack) for attack in SHORT])
def test_a_stranger_stays_within_bounds(attack: Attack, stages: Stages) -> None:
    stage, honest = stages.of(attack.scene)
    trial = Trial(stage, honest, attack, attack.options(short=True), PEACE_S, by_latency=False)
    try:
        verdict = trial.run(restart=LAST[attack.scene] == attack.name)
    except BaseException:
        stages.close()
        raise
    if not verdict.good:
        stages.close()
    assert verdict.good, "\n".join((*verdict.broken, str(verdict.figures)))


def test_every_attack_has_its_attacker_and_every_excuse_its_attack() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert {attack.attacker for attack in ATTACKS} == set(ATTACKERS)
    assert set(NOT_YET) <= set(names)


def test_what_the_bare_socket_writes_paho_reads() -> None:
    message = wire.Message(wire.new_id(), wire.REQUEST, ME, ME._replace(entity=4), b"payload", 2_000, wire.new_id())
    written, read = raw.properties(message), Properties(PacketTypes.PUBLISH)
    read.unpack(raw.varint(len(written)) + written)
    assert wire.Message.of_mqtt(read, message.payload) == message
    assert status_of(written) == 0
    assert status_of(raw.user("7", "x") + raw.user("8", "13") + written) == 13


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
