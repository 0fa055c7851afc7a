"""A data_dir that is new, although others know what was in an earlier one: somebody has emptied it.

new log, new subscriptions -> a note, while it is useful
  and a broker resumes a session -------.
  and a follower has another position --+-> the log's losses, until a person acknowledges it -> /readyz, status
  and a followed history knows us ------+
  and another uSubscription misses us --'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import structlog

from history.file import damage as damages
from history.log.log import Log
from streamer.reporting import STREAMER, Condition, Reporter, Sample
from streamer.walk.endpoint import Endpoint
from uprotocol import uri as uris
from uprotocol.uuid import moment
from uprotocol.v1.uri_pb2 import UUri
from usubscription.audit import Auditor
from usubscription.service import USubscriptionService

NEW_NOTE_MS: Final = 3_600_000  # how long a store that this process has made is noted as new
RENEWAL_NOTE_MS: Final = 3_600_000  # how long subscriptions that another service had lost are noted
REPORT_S: Final = 10.0  # between two writes of the loss that grows with each service that misses some
LOST_KEY: Final = "the subscriptions"  # begins that loss
NAMED_MAX: Final = 3  # services in one note

log = structlog.get_logger()


class NewStores(Reporter):
    """`durable`: the log that may be new, and that keeps what is reported. `endpoints`: their names at the start of
    the process. `now`: loop time, seconds."""

    def __init__(
        self,
        durable: Log,
        endpoints: Iterable[str],
        usubscription: USubscriptionService | None,
        now_ms: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        # that were not connected yet. Later sessions are those of this process: also that of a new transport, and that
        # of an endpoint which a reload has renamed
        self._unconnected = set(endpoints)
        self._durable, self._usubscription, self._now_ms, self._now = durable, usubscription, now_ms, now
        self._has_news = False  # about missed subscriptions, not reported yet
        self._report_at = -math.inf  # loop time; not earlier
        self._rows: dict[str, int] = {}  # numbers of the losses that this process has reported
        if usubscription is not None:
            usubscription.remote.auditor.on_missed = self._missed

    @property
    def _log_since(self) -> str:
        since_ms = self._durable.new_since_ms
        return "" if since_ms is None else moment(since_ms)

    def session_resumed(self, endpoint: Endpoint) -> None:
        """The network of an endpoint is connected: does it know an earlier process, although the log is new?"""
        if endpoint.name not in self._unconnected:
            return
        self._unconnected.remove(endpoint.name)
        if self._log_since and endpoint.transport.resumed_session:
            what = f"the durable log is new since {self._log_since}, but the broker has resumed a session of ours"
            self._report(endpoint.name, f"endpoint {endpoint.name}: {what}: {_LOST_WITH_LOG}")

    def follower_knows(self, follower: UUri, endpoint: str, incarnations: Sequence[bytes]) -> None:
        """A follower behind an endpoint has records of these logs, which do not exist here."""
        key = uris.format(follower)
        if self._log_since and incarnations and key not in self._rows:
            what = f"the durable log is new since {self._log_since}, but {key} has followed another one"
            self._report(key, f"endpoint {endpoint}: {what}: {_LOST_WITH_LOG}")

    def followed_before(self, service: UUri, endpoint: str, seq: int) -> None:
        """A history behind an endpoint was followed up to `seq`, and our log does not know it."""
        name = uris.format(service)
        key = f"the history of {name}"  # it may be a follower, too
        if key not in self._rows:
            is_new = f"is new since {self._log_since}" if self._log_since else "has lost its positions"
            what = f"the durable log {is_new}, but an earlier one has had records of {name} up to seq {seq}"
            self._report(key, f"endpoint {endpoint}: {what}: they are read again from the oldest one that is there")

    def _missed(self) -> None:
        self._has_news = True

    def turn(self) -> None:
        """Report what other services miss. Called several times a second: a fleet misses something thousands of
        times."""
        if self._has_news and self._now() >= self._report_at:
            self._report_at = self._now() + REPORT_S
            self._report_missed()

    async def close(self) -> None:
        """Report the rest."""
        if self._has_news:
            self._report_missed()

    def _report_missed(self) -> None:
        """Another uSubscription knew another store than ours."""
        self._has_news = False
        if self._usubscription is None or self._was_reported():
            return
        auditor, database = self._usubscription.remote.auditor, self._usubscription.store.database
        ours, theirs = 0, dict[str, int]()  # theirs: by authority; each version has the same number
        for (authority, _), missed in auditor.missed.items():
            ours += missed.ours
            theirs[authority] = max(missed.theirs, theirs.get(authority, 0))
        since = moment(database.new_since_ms or self._now_ms())
        what = f"are those of an older copy since {since}" if database.is_copy else f"are new since {since}"
        self._report(
            LOST_KEY,
            f"{LOST_KEY} {what}, but the uSubscription of {_named(theirs)} knew others: those of applications "
            f"here are lost, and they have to subscribe again (lost ones that are known there: {ours}); those of other "
            f"uSubscription services are renewed ({sum(theirs.values())})",
        )

    def _was_reported(self) -> bool:
        """An earlier process has reported that subscriptions are lost, and nobody has acknowledged it."""
        return LOST_KEY not in self._rows and any(one.detail.startswith(LOST_KEY) for one in self._losses())

    def _report(self, key: str, text: str) -> None:
        if key not in self._rows:
            log.error("what was stored is lost, and others knew it", what=text)
        self._rows[key] = self._durable.losses.put(damages.EMPTIED, text, self._rows.get(key))

    @property
    def _auditor(self) -> Auditor | None:
        return None if self._usubscription is None else self._usubscription.remote.auditor

    # Reports

    def conditions(self) -> Iterator[Condition]:
        for loss in self._losses():
            endpoint, text = STREAMER, loss.detail
            if text.startswith("endpoint "):
                endpoint, _, text = text.removeprefix("endpoint ").partition(": ")
            ends = "nobody has acknowledged that: it ends with 'up-streamer history acknowledge'"
            yield Condition(f"{text}; {ends}", endpoint)

    def _losses(self) -> Iterator[damages.Damage]:
        return (one for one in self._durable.damage if one.kind == damages.EMPTIED)

    def notes(self) -> Iterator[str]:
        """Yields facts about stores that are new, and about subscriptions that other services had lost."""
        now_ms, subscriptions_ms = self._now_ms(), None
        if self._usubscription is not None and not self._usubscription.store.database.is_copy:
            subscriptions_ms = self._usubscription.store.database.new_since_ms
        new = {"the durable log": self._durable.new_since_ms, LOST_KEY: subscriptions_ms}
        made = {what: since for what, since in new.items() if since is not None and now_ms - since < NEW_NOTE_MS}
        if made:
            verb = "are" if len(made) > 1 or LOST_KEY in made else "is"
            yield f"{' and '.join(made)} {verb} new since {moment(min(made.values()))}: nothing from before is in there"
        auditor = self._auditor
        renewed = {} if auditor is None else auditor.renewed
        recent = {name: one for name, one in renewed.items() if now_ms - one.at_ms < RENEWAL_NOTE_MS}
        if recent:
            count = sum(one.subscriptions for one in recent.values())
            last_ms = max(one.at_ms for one in recent.values())
            what = f"the uSubscription of {_named(recent)} had lost {count} of our subscriptions"
            missed = "what was published there meanwhile did not come"
            yield f"{what}: they were renewed, the last at {moment(last_ms)}; {missed}"

    def samples(self) -> Iterator[Sample]:
        if (auditor := self._auditor) is not None:
            yield "usubscription_renewed", (), auditor.renewals
            yield "usubscription_missed", (), sum(missed.ours for missed in auditor.missed.values())


def _named(authorities: Collection[str]) -> str:
    names, others = ", ".join(islice(authorities, NAMED_MAX)), len(authorities) - NAMED_MAX
    return f"{names} and {others} others" if others > 0 else names


_LOST_WITH_LOG: Final = "what waited in the earlier log for other networks and readers is lost"
