"""The subscriptions in the files of a streamer, whether it runs or not, and why no rule serves some. Reads only.

static file, usubscription.db, saved interest -> Interest -> WithoutRule -> notes of `check`
entries of usubscription.db ---------------------------------> Causes -----> a column of `subscriptions`
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streamer import building
from streamer.config import Config
from streamer.data_dir import SUBSCRIPTIONS_FILE
from streamer.walk.endpoint import Endpoints
from streamer.walk.without_rule import _TOPIC, Causes, WithoutRule
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.status import UStatusError
from usubscription.inspect import StoreView, ViewEntry
from usubscription_client.interest import Interest, InterestSource
from usubscription_client.sources import SavedInterest, read_static


def notes_of_subscriptions(config: Config, endpoints: Endpoints) -> list[str]:
    """Returns a sentence for each cause why stored subscriptions are not served. A file that can't be read counts as
    empty: the streamer reports it."""
    without = WithoutRule(endpoints, building.rules_of(config), Interest(_sources(config)))
    for _ in without.steps():
        pass
    return list(without.notes())


def add_causes(config: Config, entries: Iterable[ViewEntry]) -> None:
    """Sets "not_forwarded" of each entry: why no rule serves the subscription; None: one does."""
    causes = Causes(building.bare_endpoints_of(config), building.rules_of(config))
    for entry in entries:
        topic, subscriber = uris.parse(entry["topic"]), uris.parse(entry["subscriber"])
        cause = causes.of(topic, subscriber.authority_name, is_ours=True)
        text = None if cause is None else f"{cause.why}: {cause.remedy.replace(_TOPIC, entry['topic'])}"
        entry["not_forwarded"] = text


def _sources(config: Config) -> list[InterestSource]:
    sources = []
    if config.usubscription.static_file is not None:
        sources.append(_source("static file", _static(config.usubscription.static_file), is_ours=True))
    if config.usubscription_of(config.home) == "embedded":
        sources.append(_source(config.authority, _embedded(config), is_ours=True))
    for section in config.endpoint:
        authorities = building.remote_authorities_of(config, section)
        sources += [_source(authority, _saved(config, authority), is_ours=False) for authority in authorities]
    return sources


def _source(name: str, subscriptions: Iterable[Subscription], *, is_ours: bool) -> InterestSource:
    source = InterestSource(name)
    source.is_ours = is_ours
    source.put(*subscriptions)
    return source


def _static(path: Path) -> list[Subscription]:
    try:
        return read_static(path)
    except UStatusError:
        return []


def _embedded(config: Config) -> list[Subscription]:
    """Returns the subscriptions of the service's own file; those that were saved beside it if it can't be read."""
    try:
        with StoreView(config.streamer.data_dir / SUBSCRIPTIONS_FILE) as view:
            entries = view.subscriptions()
    except UStatusError:
        return _saved(config, config.authority)
    return [
        Subscription(uris.parse(entry["topic"]), uris.parse(entry["subscriber"]), Status.SUBSCRIBED)
        for entry in entries
    ]


def _saved(config: Config, authority: str) -> list[Subscription]:
    return SavedInterest(building.saved_interest_of(config, authority), list).load()
