"""The one TOML file: read, checked, and every mistake told with its line.

[streamer]  who we are         [[endpoint]]  networks        [[rule]]  what goes where (default: everything, both ways)
[history]   what is kept       [usubscription]  interest     [express] [egress] limits
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from streamer import names
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uri_pb2 import UUri

HOURS_MIN: Final = 0.001  # some seconds; less would delete what is under way
HOURS_MAX: Final = 876_600  # 100 years; who means "for ever" lets the bytes be the limit
MIB_MAX: Final = 1 << 40  # an exbibyte: beyond any disk, and far from what an integer of SQLite holds
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


def _authority(text: str) -> str:
    try:
        uris.validate_authority(text)
    except UStatusError as error:
        raise ValueError(error.message) from None
    if not text:
        raise ValueError("an authority may not be empty")
    return text


def _authority_pattern(text: str) -> str:
    """An authority, `*`, or a family like `*.vin123`."""
    if uris.is_family(text):
        _authority(text[2:])
        if uris.is_pattern(text[2:]):
            raise ValueError(f"{text!r} has more than one *; expected a name behind the *.")
        return text
    return _authority(text)


def _suffix(text: str) -> str:
    if text:
        _authority(text)
    if uris.is_pattern(text) or text.startswith((".", "[")):
        raise ValueError(f"expected what stands behind the dot, such as vin123 for ecu1.vin123, got {text!r}")
    return text


def _pattern(text: str) -> str:
    try:
        uris.parse(text)
    except UStatusError as error:
        raise ValueError(error.message) from None
    return text


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("expected HOST:PORT with a port of 0 (any free one) to 65535")
    return text


Mistake = tuple[int, str]  # the line on which it is, and what it is
Authority = Annotated[str, AfterValidator(_authority)]
AuthorityPattern = Annotated[str, AfterValidator(_authority_pattern)]
Suffix = Annotated[str, AfterValidator(_suffix)]
Pattern = Annotated[str, AfterValidator(_pattern)]


def patterns(texts: list[str]) -> list[UUri]:
    return [uris.parse(text) for text in texts]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamerSection(_Section):
    """Who this streamer is."""

    authority: Authority | None = None  # the device it runs on; default: the first authority that an endpoint names
    data_dir: Path = Path("up-streamer-data")  # log, subscriptions, dead letters
    admin: Annotated[str, AfterValidator(_host_port)] | None = None  # HOST:PORT of /metrics, /healthz, /readyz
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class EndpointSection(_Section):
    """One network and the authorities that live on it."""

    name: str = Field(pattern=NAME)
    transport: str
    authorities: list[AuthorityPattern] = Field(min_length=1)  # "*": every authority that no other endpoint names; "*.vin123": a family
    suffix: Suffix | None = None  # off the vehicle: there our authority NAME is called NAME.suffix; "": it is told apart as it is
    usubscription: Literal["embedded", "remote", "none"] | None = None  # default: embedded at home, remote elsewhere, none for "*"
    settings: dict[str, Any] = {}


class RuleSection(_Section):
    """Messages of `from` may go to `to`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    from_: str = Field(alias="from")
    to: str
    allow: list[Pattern] = []  # source patterns; empty: all
    deny: list[Pattern] = []  # stronger than allow
    delivery: Literal["standard"] = "standard"


class HistorySection(_Section):
    """What is kept, where, and how long."""

    record: list[Pattern] = []  # kept whether or not somebody subscribed
    volatile: list[Pattern] = []  # kept in memory only: for high rates on flash that must not wear
    retention_hours: float = Field(default=168, ge=HOURS_MIN, le=HOURS_MAX, allow_inf_nan=False)
    retention_mib: int = Field(default=1024, ge=1, le=MIB_MAX)
    volatile_mib: int = Field(default=64, ge=8, le=MIB_MAX)  # less would not hold what is under way between two networks
    absent_hours: float = Field(default=168, gt=0, le=HOURS_MAX, allow_inf_nan=False)  # then an endpoint that is away holds nothing back

    @property
    def absent_ms(self) -> int:
        return int(self.absent_hours * 3_600_000)


class USubscriptionSection(_Section):
    """Who is asked what somebody wants."""

    static_file: Path | None = None  # topics and subscribers as JSON, in addition to the services
    answers_for: list[AuthorityPattern] | None = None  # authorities beside its own that the embedded service is the uSubscription of
    refresh_s: float = Field(default=60, ge=1)  # how often a service is asked again, though its notifications are followed


class EgressSection(_Section):
    """How hard a peer is tried."""

    retry_min_ms: int = Field(default=50, ge=1)
    retry_max_ms: int = Field(default=10_000, ge=1)


class ExpressSection(_Section):
    """Requests and responses, in memory until they are sent or their ttl has run out."""

    messages_max: int = Field(default=4_096, ge=1)  # of one peer; a full queue answers RESOURCE_EXHAUSTED


class Config(_Section):
    streamer: StreamerSection = StreamerSection()
    endpoint: list[EndpointSection] = Field(min_length=1)
    rule: list[RuleSection] = []
    history: HistorySection = HistorySection()
    usubscription: USubscriptionSection = USubscriptionSection()
    egress: EgressSection = EgressSection()
    express: ExpressSection = ExpressSection()

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        owners: dict[str, str] = {}
        for endpoint in self.endpoint:
            if any(other is not endpoint and other.name == endpoint.name for other in self.endpoint):
                raise ValueError(f"two endpoints are named {endpoint.name!r}; names must differ")
            for authority in endpoint.authorities:
                if authority in owners:
                    raise ValueError(
                        f"authority {authority!r} belongs to both endpoint {owners[authority]!r} and {endpoint.name!r}; one network has it"
                    )
                owners[authority] = endpoint.name
        if all(map(uris.is_pattern, owners)):
            raise ValueError("at least one endpoint must name an authority: the streamer lives there")
        if self.streamer.authority is not None and self.streamer.authority not in owners:
            raise ValueError(
                f"streamer.authority {self.streamer.authority!r} is not an authority of any endpoint; known are {', '.join(owners)}"
            )
        names = {endpoint.name for endpoint in self.endpoint}
        for rule in self.rule:
            for name in (rule.from_, rule.to):
                if name not in names:
                    raise ValueError(f"a rule names endpoint {name!r}, which there is not; known are {', '.join(sorted(names))}")
            if rule.from_ == rule.to:
                raise ValueError(f"a rule from {rule.from_!r} to itself would forward in a circle")
        self._names_hang_together()
        embedded = [endpoint.name for endpoint in self.endpoint if endpoint.usubscription == "embedded"]
        if any(name != self.home.name for name in embedded):
            raise ValueError(
                f"usubscription = 'embedded' serves authority {self.authority!r}, so only endpoint {self.home.name!r} can have it"
            )
        return self

    def _names_hang_together(self) -> None:
        """Two names for one authority, or one name for two, would be loops and mix-ups while running."""
        if self.home.suffix:
            raise ValueError(
                f"endpoint {self.home.name!r} has the streamer's own authority {self.authority!r}: a suffix is for the networks outside"
            )
        inside = {authority for endpoint in self.endpoint if not endpoint.suffix for authority in endpoint.authorities}
        for endpoint in self.endpoint:
            if endpoint.suffix and (found := names.mistakes(endpoint.suffix, inside, set(endpoint.authorities))):
                raise ValueError(f"suffix {endpoint.suffix!r} of endpoint {endpoint.name!r}: {found[0]}")
        if self.usubscription.answers_for and self.usubscription_of(self.home) != "embedded":
            raise ValueError(
                f"usubscription.answers_for needs usubscription = 'embedded' at endpoint {self.home.name!r}: nobody would answer"
            )

    @property
    def authority(self) -> str:
        """The streamer's own authority."""
        if self.streamer.authority is not None:
            return self.streamer.authority
        return next(a for endpoint in self.endpoint for a in endpoint.authorities if not uris.is_pattern(a))

    @property
    def answers_for(self) -> frozenset[str]:
        """For which authorities beside its own the embedded uSubscription answers: those of a family at home have no other one."""
        if self.usubscription_of(self.home) != "embedded":
            return frozenset()
        if self.usubscription.answers_for is not None:
            return frozenset(self.usubscription.answers_for)
        return frozenset(filter(uris.is_family, self.home.authorities))

    @property
    def home(self) -> EndpointSection:
        """The endpoint on whose network the streamer's own authority lives."""
        return next(endpoint for endpoint in self.endpoint if self.authority in endpoint.authorities)

    def usubscription_of(self, endpoint: EndpointSection) -> Literal["embedded", "remote", "none"]:
        if endpoint.usubscription is not None:
            return endpoint.usubscription
        if endpoint is self.home:
            return "embedded"
        nobody = uris.WILDCARD_AUTHORITY in endpoint.authorities or all(map(uris.is_pattern, endpoint.authorities))
        return "none" if nobody else "remote"

    @property
    def rules(self) -> list[RuleSection]:
        """As written; where none is written, every endpoint to every other."""
        if self.rule:
            return self.rule
        names = [endpoint.name for endpoint in self.endpoint]
        return [RuleSection.model_validate({"from": a, "to": b}) for a in names for b in names if a != b]


def load(path: Path) -> Config:
    """Read and check `path`, settings of the transports included. Raises UStatusError(INVALID_ARGUMENT) with one line per mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise invalid(f"can't read {path}: {why}") from None
    return loads(text, str(path))


def loads(text: str, name: str = "config") -> Config:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{name} is not valid TOML: {error}") from None
    mistakes: list[Mistake] = []
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        mistakes += [_explain(text, one["loc"], one) for one in error.errors(include_url=False)]
    mistakes += _settings_mistakes(text, raw)
    if mistakes:
        raise invalid("\n".join(f"{name}:{line}: {what}" for line, what in sorted(set(mistakes))))
    return config


def _settings_mistakes(text: str, raw: dict[str, Any]) -> list[Mistake]:
    """What the transports say of their settings; sections of another shape are told of elsewhere."""
    mistakes: list[Mistake] = []
    endpoints = raw.get("endpoint")
    for index, endpoint in enumerate(endpoints if isinstance(endpoints, list) else []):
        transport = endpoint.get("transport") if isinstance(endpoint, dict) else None
        settings = endpoint.get("settings", {}) if isinstance(endpoint, dict) else None
        if not isinstance(transport, str) or not isinstance(settings, dict):
            continue
        where = ("endpoint", index, "settings")
        try:
            plugins.configure(transport, settings)
        except UStatusError as error:
            mistakes.append((_line(text, ("endpoint", index, "transport")), f"endpoint {endpoint.get('name')!r}: {error.message}"))
        except ValidationError as error:
            mistakes += [_explain(text, (*where, *one["loc"]), one) for one in error.errors(include_url=False)]
    return mistakes


def _explain(text: str, location: tuple[int | str, ...], error: Any) -> Mistake:
    """Line, and `where: what`, of one mistake."""
    where = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        what = f"unknown key {location[-1]!r}"
    else:
        what = error["msg"].removeprefix("Value error, ")
        if isinstance(error.get("input"), str | int | float | bool):
            what += f" (got {error['input']!r})"
    return _line(text, location), f"{where + ': ' if where else ''}{what}"


def _line(text: str, location: tuple[int | str, ...]) -> int:
    """The line on which `location` is written, or the nearest line above it that is; tomllib itself keeps no lines."""
    best, best_depth = 1, 0
    table: tuple[int | str, ...] = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line):
            parts = [part.strip().strip("\"'") for part in header[2].split(".")]
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
                table = (*parts, counts[header[2]])
            else:
                table = tuple(p for part in parts for p in ((part, counts[part]) if part in counts else (part,)))
            here = table
        elif entry := re.match(r"\s*([A-Za-z0-9_\-\"'.]+)\s*=", line):
            here = (*table, *(part.strip("\"'") for part in entry[1].split(".")))
        else:
            continue
        depth = 0
        while depth < min(len(here), len(location)) and here[depth] == location[depth]:
            depth += 1
        if depth == len(here) and depth > best_depth:
            best, best_depth = number, depth
    return best
