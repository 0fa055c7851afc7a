"""What a streamer does, and why: one object for `up-streamer status`, GET /status, and the page of the admin port.

parts of a running streamer -> status_of -> Status -> JSON; docs/status.schema.json is its schema
a streamer that can't start -> status_without_start --'
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from history.log.log import Log
from storage.runtime import REAL
from streamer.assembly import Assembly, Attached
from streamer.config import Config
from streamer.operating.backup import Backups
from streamer.operating.states import EndpointState, StateName, States, cut, cut_line
from streamer.operation import Arguments, Operation, Operations
from streamer.part import Part
from streamer.parts.certificates import CertificatePart
from streamer.parts.readiness import Readiness
from streamer.reporting import STREAMER, build
from uprotocol.uuid import moment

HELD_SHOWN_MAX: Final = 20  # addresses of one endpoint: those held for the longest time
LISTED_EACH_MAX: Final = 300  # of pauses, histories that are followed, and so on


class _Reported(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True, json_schema_serialization_defaults_required=True)


class HeldAddress(_Reported):
    """An address whose messages wait while everything else goes on."""

    address: str
    reason: Literal["refused", "unheard", "left"] = Field(
        description="refused: the network refuses it; unheard: nobody has listened there yet; left: nobody listens now"
    )
    since: str = Field(description="RFC 3339")
    records: int = Field(description="that wait there, as far as is known since the start")
    text: str = Field(description="the answer of the network")


class EndpointStatus(_Reported):
    name: str
    transport: str
    authorities: list[str]
    state: StateName
    since: str = Field(description="when it entered the state, RFC 3339")
    reason: str = Field(description="why it is not ready or degraded; empty if it is ready")
    connected: bool = False
    received: int = Field(default=0, description="messages since the start")
    forwarded: int = Field(default=0, description="messages since the start that its network has accepted")
    in_per_s: float = Field(default=0.0, description="mean of the last 10 s")
    out_per_s: float = Field(default=0.0, description="mean of the last 10 s")
    waiting: int = Field(default=0, description="records in both logs, and requests and responses, that it has not had")
    waiting_topics: int = Field(
        default=0, description="topics that are paused, or whose subscribers are not known yet: their records wait, too"
    )
    lag_records: int = Field(default=0, description="records in both logs behind its positions, without held ones")
    lag_s: float = Field(
        default=0.0, description="age of the oldest of these, by when the log took it; 0: there is none"
    )
    retries: int = Field(default=0, description="batches that had to be sent again, since the start")
    held: list[HeldAddress] = Field(default=[], description="the 20 that are held for the longest time")
    held_count: int = Field(default=0, description="of all held addresses")
    last_in: str | None = Field(
        default=None, description="when the last message came, RFC 3339; null: none since the start"
    )
    last_out: str | None = Field(default=None, description="when its network accepted the last message")
    paused: bool = Field(default=False, description="topics are paused for it, or for an authority behind it")
    dropped: dict[str, int] = Field(default={}, description="messages since the start, by reason")
    lost: int = Field(
        default=0,
        description="messages that were dropped although its network was told that they were taken, until a person "
        "acknowledges it",
    )


class FlowStatus(_Reported):
    """What one endpoint sends to another."""

    from_: str = Field(alias="from", description="the endpoint that has the source; empty: unknown by now")
    to: str
    allowed: bool = Field(description="a rule is there")
    per_s: float = Field(description="mean of the last 10 s")
    forwarded: int = Field(description="messages since the start")


class LogStatus(_Reported):
    name: str
    oldest_seq: int = Field(description="0: it has no record")
    newest_seq: int
    bytes: int = Field(description="of its records")
    limit_bytes: int
    oldest: str | None = Field(description="when its oldest record came, RFC 3339; null: it has none, or not known yet")


class DiskStatus(_Reported):
    free_bytes: int = 0
    reserve_bytes: int = Field(default=0, description="space that is kept for a full disk")
    log_limit_bytes: int = Field(default=0, description="of all files of the durable log")


class LettersStatus(_Reported):
    stored: int = 0
    total: int = Field(default=0, description="since the start, also those that were not stored")
    by_code: dict[str, int] = Field(default={}, description="the same, by code")


class PauseStatus(_Reported):
    topic: str
    peer: str
    from_: str = Field(default="", alias="from", description="only what this endpoint sends; empty: what any does")


class FollowStatus(_Reported):
    endpoint: str
    service: str
    state: Literal["handed_over", "beside_copies", "away"]
    trouble: str


class EpochsStatus(_Reported):
    group: str
    open: int
    ended: int = Field(description="since the start")
    incomplete: int = Field(description="of these")


class CertificateStatus(_Reported):
    endpoint: str = Field(description="empty: the admin port; [http]: the HTTP edge")
    setting: str
    expires: str = Field(description="RFC 3339")


class StreamerStatus(_Reported):
    """The status of a streamer. Times are RFC 3339 in UTC; counts begin with its start."""

    version: str
    core: Literal["compiled", "interpreted"]
    authority: str
    config: str | None = Field(description="the configuration file; null: it was given otherwise")
    data_dir: str
    pid: int
    started: str
    now: str
    state: StateName = Field(description="the worst state of the streamer itself and of its endpoints")
    since: str = Field(description="when the first of those in that state entered it")
    reason: str = Field(description="of the streamer itself, else of these endpoints")
    endpoints: list[EndpointStatus]
    flows: list[FlowStatus] = Field(default=[], description="between endpoints that have a rule, or have had messages")
    logs: list[LogStatus] = []
    disk: DiskStatus = DiskStatus()
    dead_letters: LettersStatus = LettersStatus()
    paused: list[PauseStatus] = []
    follows: list[FollowStatus] = Field(default=[], description="histories that are followed")
    epochs: list[EpochsStatus] = []
    problems: list[str] = Field(description="everything that is wrong")
    notes: list[str] = Field(default=[], description="other facts for the operator")
    certificates: list[CertificateStatus] = []


# Of a running streamer


class StatusPart(Part):
    name = "status"

    def status(self) -> StreamerStatus:
        """Returns the status of now. It reads no file."""
        assembly, readiness = self.assembly, self.parts.of(Readiness)
        problems = [condition.problem for condition in readiness.states.look()]
        readiness.meters.count()
        state, reason = _worst(readiness.states, [*assembly.attached])
        durable, reserve = assembly.logs.durable, assembly.runtime.disk.reserve
        return StreamerStatus(
            **_begun(assembly.config, assembly.config_file, assembly.started_ms, assembly.runtime.now_ms()),
            state=state.name,
            since=moment(state.since_ms),
            reason=cut_line(reason),
            endpoints=[_endpoint(assembly, readiness, attached) for attached in assembly.attached.values()],
            flows=list(_flows(assembly, readiness)),
            logs=[_log(source, readiness.meters.oldest_ms(source)) for source in assembly.logs],
            disk=DiskStatus(
                free_bytes=durable.extent.disk_free_bytes,
                reserve_bytes=reserve.bytes,
                log_limit_bytes=durable.disk_limit_bytes,
            ),
            dead_letters=LettersStatus(
                stored=assembly.dead_letters.stock.letters,
                total=assembly.dead_letters.total,
                by_code=dict(assembly.dead_letters.by_code),
            ),
            paused=[PauseStatus.model_validate(pause.as_dict()) for pause in sorted(assembly.paused)[:LISTED_EACH_MAX]],
            follows=[
                FollowStatus(
                    endpoint=followed.endpoint.name,
                    service=followed.key.partition(":")[2],
                    state=followed.state,
                    trouble=followed.trouble,
                )
                for followed in islice(assembly.follows, LISTED_EACH_MAX)
            ],
            epochs=[
                EpochsStatus(
                    group=kept.group.name,
                    open=len(kept.frontier.seen),
                    ended=kept.counts["epochs"],
                    incomplete=kept.counts["incomplete"],
                )
                for kept in assembly.keeper
            ],
            problems=cut(problems),
            notes=cut(self.parts.notes()),
            certificates=[
                CertificateStatus(endpoint=endpoint, setting=setting, expires=moment(round(expires_s * 1000)))
                for endpoint, setting, expires_s in islice(self.parts.of(CertificatePart), LISTED_EACH_MAX)
            ],
        )

    def operations(self) -> Mapping[str, Operation]:
        assembly, config = self.assembly, self.assembly.config
        data_dir, durable = config.streamer.data_dir, assembly.logs.durable
        backups = Backups(data_dir, config.authority, durable, lambda: assembly.stopping.is_set())
        return {"status": Operation(self._status), "backup": backups.operation()}

    async def _status(self, _: Arguments) -> dict[str, Any]:
        return self.status().model_dump(mode="json")


def _begun(config: Config, file: Path | None, started_ms: int, now_ms: int) -> dict[str, Any]:
    version, core, _ = build()
    return {
        "version": version,
        "core": core,
        "authority": config.authority,
        "config": None if file is None else str(file.absolute()),
        "data_dir": str(config.streamer.data_dir.absolute()),
        "pid": os.getpid(),
        "started": moment(started_ms),
        "now": moment(now_ms),
    }


def _worst(states: States, endpoints: list[str]) -> tuple[EndpointState, str]:
    """Returns the first of the states that are the worst, and the reason."""
    worst = [name for name in (STREAMER, *endpoints) if states[name].name == states.worst]
    first = min((states[name] for name in worst), key=attrgetter("since_ms"))
    if STREAMER in worst:
        return first, states[STREAMER].reason
    return first, "; ".join(f"endpoint {name}: {states[name].reason}" for name in worst if states[name].reason)


def _endpoint(assembly: Assembly, readiness: Readiness, attached: Attached) -> EndpointStatus:
    endpoint, pumps, meters = attached.endpoint, attached.pumps, readiness.meters
    state = readiness.states[endpoint.name]
    (in_per_s, in_ms), (out_per_s, out_ms) = meters.received(endpoint), meters.forwarded(endpoint)
    behind = sum(pump.backlog for pump in pumps)
    held = [hold for pump in pumps for hold in pump.waits.addresses.values()]
    loop_s, now_ms = meters.now_s(), assembly.runtime.now_ms()
    return EndpointStatus(
        name=endpoint.name,
        transport=next(section.transport for section in assembly.config.endpoint if section.name == endpoint.name),
        authorities=sorted(endpoint.authorities),
        state=state.name,
        since=moment(state.since_ms),
        reason=cut_line(state.reason),
        connected=assembly.networks.is_connected(endpoint),
        received=endpoint.received,
        forwarded=endpoint.forwarded,
        in_per_s=round(in_per_s, 1),
        out_per_s=round(out_per_s, 1),
        waiting=behind + sum(hold.records for hold in held) + len(assembly.express.queues[endpoint.name]),
        waiting_topics=sum(len(pump.waits.topics) for pump in pumps),
        lag_records=behind,
        lag_s=round(max((meters.lag_s(pump) for pump in pumps), default=0.0), 3),
        retries=sum(pump.retries for pump in pumps),
        held=[
            HeldAddress(
                address=cut_line(hold.name.strip("'")),
                reason=hold.label,
                since=moment(now_ms - round((loop_s - hold.began) * 1000)),
                records=hold.records,
                text=cut_line(hold.why),
            )
            for hold in heapq.nsmallest(HELD_SHOWN_MAX, held, key=attrgetter("began"))
        ],
        held_count=len(held),
        last_in=moment(in_ms) if in_ms else None,
        last_out=moment(out_ms) if out_ms else None,
        paused=bool(assembly.paused.toward(endpoint)),
        dropped=dict(endpoint.all_dropped),
        lost=assembly.drops.lost(endpoint.name),
    )


def _flows(assembly: Assembly, readiness: Readiness) -> Iterator[FlowStatus]:
    allowed = {(rule.ingress, rule.egress) for rule in assembly.rules}
    sent = {(origin, peer.name): count for peer in assembly.endpoints for origin, count in peer.forwarded_from.items()}
    for origin, to in sorted(allowed | sent.keys()):
        yield FlowStatus(
            **{"from": origin},
            to=to,
            allowed=(origin, to) in allowed,
            per_s=round(readiness.meters.flow_per_s(origin, assembly.endpoints[to]), 1),
            forwarded=sent.get((origin, to), 0),
        )


def _log(source: Log, oldest_ms: int) -> LogStatus:
    return LogStatus(
        name=source.name,
        oldest_seq=source.oldest_seq,
        newest_seq=source.newest_seq,
        bytes=source.extent.stored_bytes,
        limit_bytes=source.disk_limit_bytes,
        oldest=moment(oldest_ms) if oldest_ms else None,
    )


# Of one that can't start


def status_without_start(config: Config, file: Path | None, why: str, since_ms: int, now_ms: int) -> StreamerStatus:
    """Returns the status while the streamer can't be created; `why` it can't, since when."""
    since, why = moment(since_ms), cut_line(why)
    return StreamerStatus(
        **_begun(config, file, since_ms, now_ms),
        state="not ready",
        since=since,
        reason=why,
        endpoints=[
            EndpointStatus(
                name=section.name,
                transport=section.transport,
                authorities=sorted(section.authorities),
                state="not ready",
                since=since,
                reason=why,
            )
            for section in config.endpoint
        ],
        problems=[why],
    )


def operations_without_start(status: StreamerStatus) -> Operations:
    """Returns the one operation of a streamer that can't start."""

    async def tell(_: Arguments) -> dict[str, Any]:
        return {**status.model_dump(mode="json"), "now": moment(REAL.now_ms())}

    return Operations({"status": Operation(tell)})
