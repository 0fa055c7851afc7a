"""Which topics this gateway keeps, for those that follow it: of others none of their messages ever comes.

Command(asks_kept) -> TopicsKept.keeps: recorded? wanted by somebody, as a rule allows? -> not_kept -> not_kept.py

A pattern counts as kept if anything is kept that it matches, and one of everything always: it is for whatever there is,
as that of a follower which does not know yet what somebody wants. In doubt (a uSubscription has not answered yet, too
many subscriptions to look through) a topic counts as kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice
from typing import Final

from streamer.following.follows import Follows
from streamer.walk.ingress import Logs
from streamer.walk.view import View
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.v1.uri_pb2 import UUri

EVERY_TOPIC: Final = uris.key(uris.ANY)[1:]  # of an authority
SCANNED_MAX: Final = 1_024  # subscriptions that are compared with one pattern, some 4 ms


class TopicsKept:
    """See history.service.followers.Keeping."""

    def __init__(self, view: View, logs: Logs, follows: Follows) -> None:
        self._view, self._logs, self._follows = view, logs, follows

    @property
    def version(self) -> Hashable:
        return self._view.version, tuple(map(uris.key, self._logs.record))

    def keeps(self, topic: UUri, sees: Callable[[UUri], bool]) -> bool:
        """Returns whether messages of a topic, or of anything that a pattern matches, enter the logs. `sees(topic)`:
        whether the caller may know of a topic."""
        if topic.ue_id & 0xFFFF == ids.ENTITY or uris.key(topic)[1:] == EVERY_TOPIC:
            return True  # frontiers and beginnings, of histories themselves; or whatever there is
        if any(uris.meets(one, topic) for one in (*self._logs.record, *self._follows.named_topics())):
            return True
        if not uris.has_wildcard(topic):
            return bool(self._view.wanted(topic, None, self._logs.of(topic)))
        if self._follows.wants_all:
            return True
        near = list(islice(self._follows.topics_near(topic.authority_name), SCANNED_MAX + 1))
        return len(near) > SCANNED_MAX or any(
            uris.meets(one, topic) and self._leaves(one) and (uris.has_wildcard(one) or sees(one)) for one in near
        )

    def _leaves(self, topic: UUri) -> bool:
        origin = self._view.endpoints.owner(topic.authority_name)
        return uris.is_pattern(topic.authority_name) or (origin is not None and self._view.leaves(origin, topic))
