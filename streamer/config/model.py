"""The whole configuration: its values, mistakes that involve several keys or sections, and how its TOML file is read.

Every mistake is reported with its line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from history.service.keeper import GROUPS_MAX
from storage import logs
from streamer.config.edge import ChannelSection, GripSection, HttpSection, ProxySection, RecoverySection, one_topic
from streamer.config.sections import (
    AccessSection,
    AdminSection,
    DispatchSection,
    EgressSection,
    EndpointSection,
    EpochsSection,
    ExpressSection,
    FollowSection,
    HistorySection,
    LimitsSection,
    Location,
    RuleSection,
    Section,
    StreamerSection,
    TracingSection,
    USubscriptionSection,
    is_loopback,
)
from streamer.recovery_source import SOURCES
from streamer.walk import names
from streamer.walk.access import AccessPattern
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.ids import ENTITY
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uri_pb2 import UUri

Mistake = tuple[int, str]  # line, description
CHANNELS_MAX: Final = 10_000  # each keeps its last id in the log


CHARACTERS_MAX: Final = 16_000_000  # of a file: ten thousand endpoints have a tenth of that


class Config(Section):
    streamer: StreamerSection = StreamerSection()
    admin: AdminSection = AdminSection()
    endpoint: list[EndpointSection] = Field(min_length=1)
    rule: list[RuleSection] = Field(default=[])
    access: list[AccessSection] = Field(default=[])
    follow: list[FollowSection] = Field(default=[])
    epochs: list[EpochsSection] = Field(default=[], max_length=GROUPS_MAX)
    history: HistorySection = HistorySection()
    usubscription: USubscriptionSection = USubscriptionSection()
    egress: EgressSection = EgressSection()
    express: ExpressSection = ExpressSection()
    limits: LimitsSection = LimitsSection()
    dispatch: DispatchSection = DispatchSection()
    tracing: TracingSection = TracingSection()
    http: HttpSection = HttpSection()
    grip: GripSection = GripSection()
    channel: list[ChannelSection] = Field(default=[], max_length=CHANNELS_MAX)
    proxy: list[ProxySection] = Field(default=[])
    recovery: list[RecoverySection] = Field(default=[])

    @model_validator(mode="after")
    def check_coherence(self) -> Self:
        """Raises mistakes that involve several keys or sections, with the key of each."""
        if mistakes := [mistake for check in CONFIG_CHECKS for mistake in check(self)]:
            text = "; ".join(what for what, _ in mistakes)
            raise PydanticCustomError("incoherent", "{text}", {"text": text, "mistakes": mistakes})
        return self

    @property
    def authority(self) -> str:
        if self.streamer.authority is not None:
            return self.streamer.authority
        return next(a for endpoint in self.endpoint for a in endpoint.authorities if not uris.is_pattern(a))

    @property
    def answers_for(self) -> frozenset[str]:
        """Other authorities that the embedded uSubscription serves; by default, the families at home."""
        if self.usubscription_of(self.home) != "embedded":
            return frozenset()
        if self.usubscription.answers_for is not None:
            return frozenset(self.usubscription.answers_for)
        return frozenset(filter(uris.is_family, self.home.authorities))

    @property
    def home(self) -> EndpointSection:
        """The endpoint that has the streamer's own authority."""
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
        """The rules; without any, from each endpoint to each other."""
        if self.rule:
            return self.rule
        names = [endpoint.name for endpoint in self.endpoint]
        return [RuleSection.model_validate({"from": a, "to": b}) for a in names for b in names if a != b]


# Coherence: each check yields mistakes with the key to change


def _mistakes_of_admin(config: Config) -> Iterator[tuple[str, Location]]:
    address, guard = config.streamer.admin, config.admin
    if (guard.cert_file is None) != (guard.key_file is None):
        yield "cert_file and key_file go together", ("admin",)
    if address is None and guard.model_fields_set:
        yield "[admin] says who may ask at streamer.admin, which is not set", ("admin",)
    is_guarded = None not in (guard.cert_file, guard.token_file)
    if address is not None and not (is_guarded or guard.unprotected or is_loopback(address)):
        what = (
            f"streamer.admin {address!r} can be reached from other machines: give [admin] cert_file, key_file and "
            "token_file, or, where the network itself keeps everybody out, unprotected = true"
        )
        yield what, ("streamer", "admin")


def _mistakes_of_endpoints(config: Config) -> Iterator[tuple[str, Location]]:
    names: set[str] = set()
    owners: dict[str, EndpointSection] = {}
    for index, endpoint in enumerate(config.endpoint):
        if endpoint.name in names:
            yield f"two endpoints are named {endpoint.name!r}; names must differ", ("endpoint", index, "name")
        names.add(endpoint.name)
        for authority in endpoint.authorities:
            owner = owners.setdefault(authority, endpoint)
            if owner is not endpoint:
                both = f"{owner.name!r} and {endpoint.name!r}"
                what = f"authority {authority!r} belongs to both endpoint {both}; one network has it"
                yield what, ("endpoint", index, "authorities")
        if len(set(endpoint.authorities)) < len(endpoint.authorities):
            yield f"endpoint {endpoint.name!r} names an authority twice", ("endpoint", index, "authorities")
    before = [endpoint.renamed_from for endpoint in config.endpoint]
    for index, endpoint in enumerate(config.endpoint):
        old, place = endpoint.renamed_from, ("endpoint", index, "renamed_from")
        if old is not None and old in names:
            yield f"endpoint {endpoint.name!r}: renamed_from {old!r} is the name of an endpoint in this file", place
        elif old is not None and old in before[:index]:
            yield f"two endpoints are renamed from {old!r}; only one gets what waits for it", place
    yield from _mistakes_of_home(config, list(owners))


def _mistakes_of_home(config: Config, authorities: list[str]) -> Iterator[tuple[str, Location]]:
    if all(map(uris.is_pattern, authorities)):
        what = "at least one endpoint must name an authority: the streamer lives there"
        yield what, ("endpoint", 0, "authorities")
    elif config.authority not in authorities:
        what = f"streamer.authority {config.authority!r} is not an authority of any endpoint"
        yield f"{what}; known are {', '.join(authorities)}", ("streamer", "authority")
    else:
        serves = f"usubscription = 'embedded' serves authority {config.authority!r}"
        for index, endpoint in enumerate(config.endpoint):
            if endpoint.usubscription == "embedded" and endpoint is not config.home:
                what = f"{serves}, so only endpoint {config.home.name!r} can have it"
                yield what, ("endpoint", index, "usubscription")
        yield from _mistakes_of_names(config)


def _mistakes_of_names(config: Config) -> Iterator[tuple[str, Location]]:
    """Two names for one authority cause loops; one name for two authorities sends messages to the wrong one."""
    inside = {authority for endpoint in config.endpoint if not endpoint.suffix for authority in endpoint.authorities}
    for index, endpoint in enumerate(config.endpoint):
        place = ("endpoint", index, "suffix")
        if endpoint.suffix and endpoint is config.home:
            owns = f"endpoint {endpoint.name!r} has the streamer's own authority {config.authority!r}"
            yield f"{owns}: a suffix is for the networks outside", place
        elif endpoint.suffix:
            for why in islice(names.mistakes(endpoint.suffix, inside, set(endpoint.authorities)), 1):
                yield f"suffix {endpoint.suffix!r} of endpoint {endpoint.name!r}: {why}", place
    if config.usubscription.answers_for and config.usubscription_of(config.home) != "embedded":
        needs = f"usubscription.answers_for needs usubscription = 'embedded' at endpoint {config.home.name!r}"
        yield f"{needs}: nobody would answer", ("usubscription", "answers_for")


def _mistakes_of_rules(config: Config) -> Iterator[tuple[str, Location]]:
    names = sorted({endpoint.name for endpoint in config.endpoint})
    used: list[tuple[str, Location, str | None]] = []
    for index, rule in enumerate(config.rule):
        used += [("a rule", ("rule", index, "from"), rule.from_), ("a rule", ("rule", index, "to"), rule.to)]
        if rule.from_ == rule.to:
            yield f"a rule from {rule.from_!r} to itself would forward in a circle", ("rule", index, "to")
    used += [("access", ("access", index, "endpoint"), entry.endpoint) for index, entry in enumerate(config.access)]
    used += [("follow", ("follow", index, "endpoint"), one.endpoint) for index, one in enumerate(config.follow)]
    for who, place, name in used:
        if name not in (None, *names):
            yield f"{who} names unknown endpoint {name!r}; known: {', '.join(names)}", place


def _mistakes_of_following(config: Config) -> Iterator[tuple[str, Location]]:
    """A section that can have no effect is a mistake, too."""
    if all(uris.is_pattern(one) for endpoint in config.endpoint for one in endpoint.authorities):
        return  # reported already: no endpoint has our authority
    seen: set[tuple[str, str]] = set()
    for index, one in enumerate(config.follow):
        place = ("follow", index, "service")
        service = AccessPattern.parse(one.service)  # a publisher of our own host may have a history
        if (one.endpoint, one.service) in seen:
            yield f"{one.service} at endpoint {one.endpoint!r} is followed twice", place
        elif (service.authority, service.address.ue_id) == (config.authority, ENTITY):
            yield f"{one.service} is this streamer itself", place
        elif not _may_be_at(config, service, one.endpoint):
            yield f"{one.service} can't be followed: nobody else of that name lives at {one.endpoint!r}", place
        for topic in one.topics:
            if not _may_have(config, one, service, uris.parse(topic)):
                what = f"the history {one.service} at endpoint {one.endpoint!r} never has {topic}"
                yield what, ("follow", index, "topics")
        seen.add((one.endpoint, one.service))
    for index, endpoint in enumerate(config.endpoint):
        authority = AccessPattern.parse(endpoint.followed_by).authority if endpoint.followed_by else ""
        if authority == config.authority:
            what = f"endpoint {endpoint.name!r}: followed_by names this streamer itself"
            yield what, ("endpoint", index, "followed_by")
        elif authority and _owner(config, authority) is not endpoint:
            what = f"endpoint {endpoint.name!r}: {authority!r}, which followed_by names, does not live there"
            yield what, ("endpoint", index, "followed_by")


def _mistakes_of_topics(config: Config, topics: Sequence[str]) -> Iterator[str]:
    """Yields why no topic that matches can come here."""
    for topic in topics:
        parsed = uris.parse(topic)
        if parsed.resource_id < uris.RESOURCE_TOPIC_MIN:
            yield f"{topic} can't be a topic"
        if not parsed.authority_name:
            yield f"{topic} names no authority, and so no topic that comes here"
        elif parsed.authority_name != uris.WILDCARD_AUTHORITY and not _owner(config, parsed.authority_name):
            yield f"no endpoint has the authority of {topic}"


def _mistakes_of_epochs(config: Config) -> Iterator[tuple[str, Location]]:
    for index, one in enumerate(config.epochs):
        at = f"epochs {one.name!r}"
        if one.by == "bucket" and one.width_ms is None:
            yield f"{at}: a bucket has a width_ms", ("epochs", index, "by")
        for key in ("width_ms", "lateness_ms", "ahead_ms") if one.by == "progress" else ():
            if key in one.model_fields_set:
                yield f"{at}: {key} is of buckets; by progress it is the publishers who say", ("epochs", index, key)
        if one.timeout_ms <= (one.width_ms or 0) + one.lateness_ms:
            what = f"{at}: timeout_ms {one.timeout_ms} ends what goes on: it is longer than width and lateness"
            yield what, ("epochs", index, "timeout_ms")
        for what in _mistakes_of_topics(config, one.topics):
            yield f"{at}: {what}", ("epochs", index, "topics")
        for other in config.epochs[:index]:
            if other.name == one.name:
                yield f"two groups of epochs are named {one.name!r}; names must differ", ("epochs", index, "name")
            elif pairs := [(a, b) for a in one.topics for b in other.topics if _meet(a, b)]:
                what = f"{at}: {pairs[0][0]} has topics of {other.name!r} ({pairs[0][1]}), too: each is in one group"
                yield what, ("epochs", index, "topics")


def _mistakes_of_http(config: Config) -> Iterator[tuple[str, Location]]:
    http, grip = config.http, config.grip
    if (http.cert_file is None) != (http.key_file is None):
        yield "cert_file and key_file go together", ("http",)
    ports = {"streamer.admin": config.streamer.admin, "http.listen": http.listen, "grip.publish": grip.publish}
    taken = dict[str, str]()
    for name, address in ports.items():
        if address is not None and not address.endswith(":0") and (other := taken.setdefault(address, name)) != name:
            yield f"{name}: {other} has the address {address}, too: each has its own", tuple(name.split("."))
    if http.listen is None and http.model_fields_set:
        yield "[http] says how clients are served at http.listen, which is not set", ("http",)
    is_guarded = None not in (http.cert_file, http.tokens_file)
    if http.listen is not None and not (is_guarded or http.unprotected or is_loopback(http.listen)):
        what = (
            f"http.listen {http.listen!r} can be reached from other machines: give cert_file, key_file and "
            "tokens_file, or, behind a proxy that checks who asks, unprotected = true"
        )
        yield what, ("http", "listen")
    if grip.publish is not None and grip.publish_key_file is None and not is_loopback(grip.publish):
        what = f"grip.publish {grip.publish!r} can be reached from other machines: give publish_key_file"
        yield what, ("grip", "publish")
    for index, one in enumerate(config.channel):
        yield from ((what, ("channel", index, key)) for what, key in _mistakes_of_channel(config, index, one))
    for index, proxy in enumerate(config.proxy):
        if http.listen is None:
            yield f"requests to {proxy.prefix!r} come in at http.listen, which is not set", ("proxy", index)
        if any(other.prefix == proxy.prefix for other in config.proxy[:index]):
            yield f"two backends have the prefix {proxy.prefix!r}", ("proxy", index, "prefix")


def _mistakes_of_tracing(config: Config) -> Iterator[tuple[str, Location]]:
    if config.tracing.otlp is None and config.tracing.model_fields_set:
        yield "[tracing] says how spans are sent to tracing.otlp, which is not set", ("tracing",)


def _mistakes_of_channel(config: Config, index: int, one: ChannelSection) -> Iterator[tuple[str, str]]:
    if config.grip.publish is None:
        yield f"items of channel {one.name!r} come in at grip.publish, which is not set", "name"
    if any(other.name == one.name for other in config.channel[:index]):
        yield f"two channels are named {one.name!r}; names must differ", "name"
    if any(other.topic == one.topic for other in config.channel[:index]):
        yield f"channel {one.name!r}: another channel has the topic {one.topic}; each has its own", "topic"
    if _owner(config, one_topic(one.topic).authority_name) is None:
        yield f"channel {one.name!r}: no endpoint has the authority of {one.topic}", "topic"


def _mistakes_of_recovery(config: Config) -> Iterator[tuple[str, Location]]:
    for index, one in enumerate(config.recovery):
        place = ("recovery", index, "topics")
        for what in _mistakes_of_topics(config, one.topics):
            yield f"recovery: {what}", place
        for topic in one.topics:
            if any(_meet(topic, theirs) for other in config.recovery[:index] for theirs in other.topics):
                yield f"recovery: {topic} has another source already: each topic has one", place


CONFIG_CHECKS: Final = (
    _mistakes_of_admin,
    _mistakes_of_endpoints,
    _mistakes_of_rules,
    _mistakes_of_following,
    _mistakes_of_epochs,
    _mistakes_of_http,
    _mistakes_of_recovery,
    _mistakes_of_tracing,
)


def _owner(config: Config, authority: str) -> EndpointSection | None:
    """Returns the endpoint of an authority or family, like Endpoints.owner."""
    named = {name: endpoint for endpoint in config.endpoint for name in endpoint.authorities}
    return next((named[one] for one in uris.owners(authority) if one in named), None)


def _may_be_at(config: Config, service: AccessPattern, name: str) -> bool:
    """True if this endpoint can have another service of that name. Also true for an unknown endpoint, which is
    reported elsewhere."""
    for endpoint in config.endpoint:
        if endpoint.name == name:
            there = {one for one in endpoint.authorities if uris.is_one_of(one, {service.authority})}
            if service.address.ue_id == ENTITY:
                there.discard(config.authority)
            return bool(there) or _owner(config, service.authority) is endpoint
    return True


def _may_have(config: Config, follow: FollowSection, service: AccessPattern, topic: UUri) -> bool:
    """True if the followed history may have records of `topic` that we read."""
    authority = topic.authority_name
    if authority != uris.WILDCARD_AUTHORITY:
        owner = _owner(config, authority)
        if owner is None or owner.name != follow.endpoint:
            return False
    if topic.resource_id < uris.RESOURCE_TOPIC_MIN or not service.address.ue_id >> 16:
        return topic.resource_id >= uris.RESOURCE_TOPIC_MIN
    is_there = authority == uris.WILDCARD_AUTHORITY or uris.is_one_of(authority, {service.authority})
    return is_there and ids.narrowed(uris.of_authority(service.address, authority), topic) is not None


def _meet(one: str, other: str) -> bool:
    return uris.meets(uris.parse(one), uris.parse(other))


# The TOML file


def load(path: Path) -> Config:
    """Read and check `path` and transports' settings. Raises UStatusError(INVALID_ARGUMENT), a line per mistake."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(CHARACTERS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise invalid(f"can't read {path}: {why}") from None
    if len(text) > CHARACTERS_MAX:
        raise invalid(f"can't read {path}: it has more than {CHARACTERS_MAX} characters: is it a configuration?")
    return loads(text, str(path))


def loads(text: str, name: str = "config") -> Config:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(_not_toml(text, name, str(error))) from None
    except RecursionError:
        raise invalid(f"{name}:1: this is not a configuration: its values are nested too deeply to be read") from None
    mistakes = list(_settings_mistakes(text, raw))
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        mistakes += _explain(text, error, Config)
    if mistakes:
        raise invalid("\n".join(f"{name}:{line}: {what}" for line, what in sorted(set(mistakes))))
    return config


def _not_toml(text: str, name: str, said: str) -> str:
    """Returns the error; tomllib appends "(at line 3, column 7)" or "(at end of document)"."""
    at = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)$", said)
    line = int(at[1]) if at and at[1] else text.count("\n") + 1
    return f"{name}:{line}: this is not valid TOML: {said}"


def _settings_mistakes(text: str, raw: dict[str, Any]) -> Iterator[Mistake]:
    """Yields mistakes in the settings of plugins; malformed sections are reported elsewhere."""
    for section, key, kind in (("endpoint", "transport", plugins.TRANSPORTS), ("recovery", "source", SOURCES)):
        found = raw.get(section)
        for index, one in enumerate(found if isinstance(found, list) else []):
            if not isinstance(one, dict) or not isinstance(settings := one.get("settings", {}), dict):
                continue
            if isinstance(name := one.get(key, "http" if section == "recovery" else None), str):
                try:
                    plugins.configure_of(kind, name, settings)
                except UStatusError as error:
                    what = f"endpoint {one.get('name')!r}" if section == "endpoint" else section
                    yield line_of(text, (section, index, key)), f"{what}: {error.message}"
                except ValidationError as error:
                    model = plugins.load_of(kind, name).config
                    yield from _explain(text, error, model, (section, index, "settings"))


def _explain(text: str, mistakes: ValidationError, model: type[BaseModel], within: Location = ()) -> Iterator[Mistake]:
    """Yields line and `key: mistake` for each mistake that `model` found in the table `within`."""
    for error in mistakes.errors(include_url=False):
        location = (*within, *error["loc"])
        where = ".".join(str(part) for part in location)
        if error["type"] == "incoherent":
            yield from ((line_of(text, at), what) for what, at in error["ctx"]["mistakes"])
            continue
        if error["type"] == "extra_forbidden":
            what = f"unknown key {location[-1]!r}{plugins.did_you_mean(model, error['loc'])}"
        else:
            what = error["msg"].removeprefix("Value error, ")
            if isinstance(error["input"], str | int | float | bool) and not logs.is_secret(where):
                what += f" (got {error['input']!r})"
        yield line_of(text, location), f"{where + ': ' if where else ''}{what}"


def line_of(text: str, location: Location) -> int:
    """Returns the line of `location`, or of the nearest table around it. tomllib provides no lines."""
    best, best_depth = 1, 0
    table: Location = ()
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
        depth = min(len(here), len(location))  # the first [[rule]] matches ("rule",)
        if here[:depth] == location[:depth] and depth > best_depth:
            best, best_depth = number, depth
    return best
