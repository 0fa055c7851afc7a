"""What is wrong with a configuration though each of its sections is right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from streamer.config.sections import EndpointSection, FollowSection, Location, is_loopback
from streamer.walk import names
from streamer.walk.access import AccessPattern
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.ids import ENTITY
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from streamer.config.model import Config


def mistakes_of(config: Config) -> Iterator[tuple[str, Location]]:
    """Each mistake, with the key that has to be changed."""
    yield from _mistakes_of_admin(config)
    yield from _mistakes_of_endpoints(config)
    yield from _mistakes_of_rules(config)
    yield from _mistakes_of_following(config)
    yield from _mistakes_of_epochs(config)


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
    """Two names for one authority, or one name for two, would be loops and mix-ups while running."""
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
    """What would be followed for nothing is a mistake, too."""
    if all(uris.is_pattern(one) for endpoint in config.endpoint for one in endpoint.authorities):
        return  # told already: nobody is us
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
        for topic in one.topics:
            parsed, place = uris.parse(topic), ("epochs", index, "topics")
            if parsed.resource_id < uris.RESOURCE_TOPIC_MIN:
                yield f"{at}: {topic} can't be a topic", place
            if not parsed.authority_name:
                yield f"{at}: {topic} names no authority, and so no topic that comes here", place
            elif parsed.authority_name != uris.WILDCARD_AUTHORITY and not _owner(config, parsed.authority_name):
                yield f"{at}: no endpoint has the authority of {topic}", place
        for other in config.epochs[:index]:
            if other.name == one.name:
                yield f"two groups of epochs are named {one.name!r}; names must differ", ("epochs", index, "name")
            elif pairs := [(a, b) for a in one.topics for b in other.topics if _meet(a, b)]:
                what = f"{at}: {pairs[0][0]} has topics of {other.name!r} ({pairs[0][1]}), too: each is in one group"
                yield what, ("epochs", index, "topics")


def _owner(config: Config, authority: str) -> EndpointSection | None:
    """As Endpoints.owner; of a family as well."""
    named = {name: endpoint for endpoint in config.endpoint for name in endpoint.authorities}
    return next((named[one] for one in uris.owners(authority) if one in named), None)


def _may_be_at(config: Config, service: AccessPattern, name: str) -> bool:
    """One that is not our own; True for an endpoint that there is not, which is told already."""
    for endpoint in config.endpoint:
        if endpoint.name == name:
            there = {one for one in endpoint.authorities if uris.is_one_of(one, {service.authority})}
            if service.address.ue_id == ENTITY:
                there.discard(config.authority)
            return bool(there) or _owner(config, service.authority) is endpoint
    return True


def _may_have(config: Config, follow: FollowSection, service: AccessPattern, topic: UUri) -> bool:
    """Whether records of `topic` may be in what is followed, and are taken from there."""
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
