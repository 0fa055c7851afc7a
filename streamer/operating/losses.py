"""Publishes losses as gaps or keeps them in the log, and shows them as conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import structlog

from history.file import damage as damages
from history.file.damage import Damage
from history.log.log import Log
from history.service.gaps import Gaps
from streamer.operating.states import Condition
from streamer.walk.endpoint import Endpoint
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.v1.uri_pb2 import UUri

log = structlog.get_logger()


class LossReports:
    """Publishes losses by `gaps`, or keeps them in the `durable` log until they are acknowledged."""

    def __init__(self, gaps: Gaps, durable: Log) -> None:
        self._gaps, self._durable = gaps, durable

    def records_lost(self, peer: Endpoint, source: Log, after: int, before: int, reason: Gap.Reason.ValueType) -> None:
        """Reports that some or all records between these seqs never reach an endpoint."""
        gap = Gap(reason=reason, incarnation=source.incarnation, after_seq=after, before_seq=before)
        self._gaps.add(gap, peer.name, f"endpoint {peer.name} will not get these records of the {source.name} log")

    def followed_gap(self, service: UUri, gap: Gap) -> None:
        """Reports that records of a followed history are lost."""
        what = f"of the history of {uris.format(service)}, which is followed"
        log.error("records that were followed are lost", service=uris.format(service), gap=str(gap).replace("\n", " "))
        self._gaps.add(gap, "", what)

    def subscriptions_lost(self, changes: int) -> None:
        what = f"{changes} changes of subscriptions are lost: who subscribed or unsubscribed lately has to do so again"
        self._durable.losses.report(damages.SUBSCRIPTIONS, what)

    def network_lost(self, endpoint: Endpoint, what: str, messages: int | None) -> None:
        """Reports that a network lost messages before they arrived; which ones is unknown."""
        endpoint.dropped["lost_by_network"] += messages or 1
        log.error("a network has lost messages for us", endpoint=endpoint.name, what=what, messages_at_most=messages)
        self._durable.losses.report(damages.NETWORK, loss_detail(endpoint.name, what))


def conditions_of_log(kept: Log, hours: float) -> Iterator[Condition]:
    """Yields what is wrong with a log. `hours`: time until a network's loss counts as acknowledged; 0: never."""
    if not kept.healthy:
        yield Condition(f"the {kept.name} log refuses messages: {kept.trouble}", is_fatal=True)
    losses: dict[str, list[Damage]] = {}  # by endpoint
    damage: list[Damage] = []
    for found in kept.damage:
        (losses.setdefault(_endpoint_of(found), []) if found.kind == damages.NETWORK else damage).append(found)
    if damage:
        yield Condition(_damage_problem(kept.name, damage))
    for endpoint, lost in losses.items():
        yield Condition(_loss_problem(lost, hours), endpoint)


def loss_detail(endpoint: str, what: str) -> str:
    """Returns the text that a log stores for a loss of a network."""
    return f"endpoint {endpoint}: {what}"


def _endpoint_of(loss: Damage) -> str:
    """Returns the name in a text of `loss_detail`."""
    return loss.detail.removeprefix("endpoint ").partition(": ")[0]


def _damage_problem(name: str, damage: Sequence[Damage]) -> str:
    newest = damage[-1]
    return (
        f"the {name} log has {len(damage)} damages that nobody has acknowledged, at the last {newest.kind}"
        f"{f' ({newest.detail})' if newest.detail else ''}; see 'up-streamer history verify', then 'up-streamer "
        "history acknowledge'"
    )


def _loss_problem(losses: Sequence[Damage], hours: float) -> str:
    newest = losses[-1]
    times = f" (and {len(losses) - 1} other losses)" if len(losses) > 1 else ""
    ends = f"it ends {hours:g} h after it was found, or" if hours else "it ends"
    what = newest.detail.partition(": ")[2] or newest.detail
    return f"{what}{times}; nobody has acknowledged that: {ends} with 'up-streamer history acknowledge'"
