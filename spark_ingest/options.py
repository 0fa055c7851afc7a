"""The options of the Spark source `uprotocol`: names, checks and defaults.

Spark's strings --Kafka's names, camel case--> Options | UStatusError(INVALID_ARGUMENT) with the name of the option
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from spark_ingest import offsets
from transports import plugin
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider

# of options that Kafka's source has, too; `subscribe` takes names, `subscribePattern` patterns
KAFKA_NAMES: Final = {
    "subscribe": "topics",
    "subscribePattern": "topics",
    "maxOffsetsPerTrigger": "maxRecordsPerBatch",
    "minOffsetsPerTrigger": "minRecordsPerBatch",
}
TIME_MS_MAX: Final = 253_402_300_799_999  # end of the year 9999
_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|)\s*")


def _list(given: object) -> object:
    return tuple(text.strip() for text in given.split(",") if text.strip()) if isinstance(given, str) else given


def _settings(given: object) -> object:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:  # its text does not repeat the settings, which may have a password
        raise ValueError(f"expected a JSON object: {error}") from None


def _seconds(given: object) -> object:
    """A number of seconds, or a text like `500 ms`, `30s`, `15m`."""
    if not isinstance(given, str):
        return given
    matched = _DURATION.fullmatch(given)
    if matched is None:
        raise ValueError(f"expected seconds, or a number with ms, s, m, h or d, got {given!r}")
    return float(matched[1]) * _UNITS[matched[2]]


def _time_ms(given: object) -> object:
    """Unix milliseconds, or a date and time of ISO 8601; without a time zone it is UTC."""
    if isinstance(given, datetime):
        return _milliseconds(given)
    if not isinstance(given, str) or given.strip().isdigit():
        return given
    try:
        return _milliseconds(datetime.fromisoformat(given.strip()))
    except ValueError:
        raise ValueError(f"expected Unix milliseconds or a time like 2026-03-01T12:00:00Z, got {given!r}") from None


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns `one` with the values of `other`; tables within are merged, too."""
    made = dict(one)
    for key, value in other.items():
        known = made.get(key)
        made[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return made


def as_utc(time: datetime) -> datetime:
    """Returns the time; one without a time zone is UTC."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _milliseconds(time: datetime) -> int:
    return round(as_utc(time).timestamp() * 1_000)


def _times(given: object) -> object:
    made = _settings(given)
    return {name: _time_ms(time) for name, time in made.items()} if isinstance(made, dict) else made


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
TimeMs = Annotated[int, BeforeValidator(_time_ms), Field(ge=0, le=TIME_MS_MAX)]
TextList = Annotated[tuple[str, ...], BeforeValidator(_list)]


class Options(BaseModel):
    """The options of the source; in Spark in camel case (localAuthority for local_authority), case-insensitive."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    transport: str
    """name of a transport plugin"""
    transport_config: Annotated[dict[str, Any], BeforeValidator(_settings)] = Field(default={}, repr=False)
    """its settings; as an option, JSON"""
    transport_secrets: Annotated[dict[str, Any], BeforeValidator(_settings)] = Field(default={}, repr=False)
    """more of its settings, such as a password: Spark shows this option in no plan, page or log, for its name has the
    word secret"""
    authority: str = ""
    """authority of the one streamer that is read; its history service is `up://AUTHORITY/4/1/...`"""
    authorities: TextList = ()
    """instead of `authority`: a fleet. Names, families (`*.depot7`) and `*`, separated by commas. The members of a
    family are found when they announce themselves to `localAuthority`, or by `hub`; new ones join at any time"""
    hub: str = ""
    """with `authorities`: a streamer that follows the vehicles; it names those that it follows"""
    local_authority: str
    """our own authority, one of our network; each task uses a uEntity instance of its own, so that it gets only its
    replies"""
    topics: TextList = ()
    """UUri patterns, in a Spark option separated by commas; empty: all recorded topics. A topic that is added later is
    read from `addedTopics` on. Also `subscribe` (without wildcards) and `subscribePattern`"""
    added_topics: Literal["earliest", "latest"] = "earliest"
    """where topics begin that were added to a query since its checkpoint, or that it may read only now; `latest`:
    behind the last row that the query has read, of any topic"""
    push_filters: bool = False
    """of `spark.read`, where the session has `spark.sql.python.filterPushdown.enabled`: ask only for records that the
    conditions select. Spark 4.3 keeps the conditions of the first query of a DataFrame for all later ones, which miss
    rows then: make a new `load()` for each query"""
    path_topics: Annotated[dict[str, str], BeforeValidator(_settings)] = {}
    """JSON of a pattern by path, `{"Vehicle.Speed": "//*/8001/1/8001"}`: with `pushFilters` a condition on `path`
    asks for these topics alone. All records of a path must have such a topic"""
    starting_offsets: str = offsets.EARLIEST
    """of a new query: `earliest`, `latest`, or JSON `{"AUTHORITY": {"INCARNATION": SEQ}}` to read everything after SEQ
    (without the authority for one streamer); also an offset from a checkpoint"""
    starting_timestamp: TimeMs | None = None
    """of a new query, instead of `startingOffsets`: the first record that was appended at this time (Unix ms, or ISO
    8601) or later"""
    starting_offsets_by_timestamp: Annotated[dict[str, TimeMs], BeforeValidator(_times)] = {}
    """the same by streamer, as JSON `{"AUTHORITY": TIME}`; it goes before `startingTimestamp`"""
    ending_offsets: str = offsets.LATEST
    """of `spark.read`: `latest`, or JSON like `startingOffsets` to read everything up to and including SEQ"""
    ending_timestamp: TimeMs | None = None
    """of `spark.read`, instead of `endingOffsets`: only records that were appended before this time"""
    max_records_per_batch: int = Field(default=100_000, ge=1)
    """matching records of one micro-batch, shared by all histories; each may have one in any case. Also
    `maxOffsetsPerTrigger`"""
    min_records_per_batch: int = Field(default=0, ge=0)
    """a micro-batch waits for so many matching records, at most `maxTriggerDelay`. Also `minOffsetsPerTrigger`"""
    max_trigger_delay: Seconds = 900.0
    """with `minRecordsPerBatch`: longest time between two micro-batches, in seconds or as `15m`"""
    max_records_per_partition: int = Field(default=20_000, ge=1)
    """matching records of one task"""
    min_partitions: int = Field(default=1, ge=1, le=10_000)
    """a batch is divided into at least so many tasks, if it has so many records"""
    fail_on_data_loss: bool = True
    """true: a gap ends the query with an error that has its bounds; false: the gap is logged"""
    max_clock_ahead: Seconds | None = None
    """`ts` is at most so many seconds after `append_time`, so that a clock that is ahead moves no watermark ahead"""
    consumer: str = ""
    """name of the cursor that keeps records from retention. Default: a random name, which is in the checkpoint"""
    epochs: Literal["all", "complete"] = "all"
    """`complete`: a micro-batch contains only whole epochs, of topics that have epochs; those open at its end wait.
    If one cannot be whole, the column `epoch_incomplete` has the reason"""
    epoch_timeout: Annotated[float, BeforeValidator(_seconds)] = Field(default=600.0, gt=0, allow_inf_nan=False)
    """seconds without a frontier from the keeper of a waiting epoch, after which its records are delivered as
    incomplete; must be longer than an epoch"""
    start_timeout: Seconds = 60.0
    """seconds that a new query waits for a streamer that is away. Of a fleet one must answer; the others may come
    later"""
    poll_timeout_ms: int = Field(default=10_000, ge=100, le=600_000)
    """time-out of one call to the history"""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if bool(self.authority) == bool(self.authorities):
            raise invalid("expected either `authority`, of one streamer, or `authorities`, of a fleet")
        if self.hub and not self.authorities:
            raise invalid("`hub` names the members of a fleet: set `authorities`, too, for example to *")
        for authority in (self.authority, self.local_authority, self.hub, *self.named):
            if authority:
                LocalUriProvider(authority, ids.ENTITY, ids.VERSION)
        for authority in self.authorities:
            if uris.is_family(authority):
                uris.validate_authority(authority[2:])
            elif uris.is_pattern(authority) and authority != uris.WILDCARD_AUTHORITY:
                raise invalid(f"authorities: expected names, families like *.depot7, or *, got {authority!r}")
        for topic in (*self.topics, *self.path_topics.values()):
            uris.parse(topic)
        for name, given in (("startingOffsets", self.starting_offsets), ("endingOffsets", self.ending_offsets)):
            parsed = offsets.parse(given, self.authority)
            if name == "endingOffsets" and parsed == offsets.EARLIEST:
                raise invalid("endingOffsets: expected latest or a JSON object, got earliest")
        return self

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """From Spark's options. Raises UStatusError(INVALID_ARGUMENT) with the reason."""
        names = {to_camel(name).lower(): to_camel(name) for name in cls.model_fields}
        kafka = {name.lower(): name for name in KAFKA_NAMES}
        unknown = sorted(key for key in given if key.lower() not in names.keys() | kafka.keys())
        if unknown:
            known = ", ".join((*names.values(), *KAFKA_NAMES))
            raise invalid(f"format uprotocol: unknown option {', '.join(map(repr, unknown))}; known: {known}")
        values: dict[str, str] = {}
        for key, value in given.items():
            name = kafka.get(key.lower())
            ours = names[key.lower()] if name is None else KAFKA_NAMES[name]
            if ours in values:
                raise invalid(f"format uprotocol: {ours} is given twice, also as {key}")
            if name == "subscribe" and any(uris.has_wildcard(uris.parse(topic)) for topic in value.split(",")):
                raise invalid(f"format uprotocol: subscribe takes no wildcards, got {value!r}: use subscribePattern")
            values[ours] = value
        try:
            return cls.model_validate(values)
        except (ValidationError, UStatusError) as error:
            why = error.message if isinstance(error, UStatusError) else plugin.explain(error)
            raise invalid(f"format uprotocol: {why}") from None

    @property
    def transport_settings(self) -> dict[str, Any]:
        """The settings of the transport, with the secret ones."""
        return _merged(self.transport_config, self.transport_secrets)

    @property
    def named(self) -> tuple[str, ...]:
        """The authorities that are given by name, which a query reads even if it has not found them yet."""
        return (self.authority,) if self.authority else tuple(x for x in self.authorities if not uris.is_pattern(x))

    def has_member(self, authority: str) -> bool:
        return authority == self.authority or uris.is_one_of(authority, self.authorities)

    @property
    def coverage_topics(self) -> tuple[str, ...]:
        """The topics as they are compared with those of a checkpoint: with an authority, sorted."""
        parsed = (uris.with_authority(uris.parse(topic), self.local_authority) for topic in self.topics)
        return tuple(sorted({uris.format(topic) for topic in parsed}))
