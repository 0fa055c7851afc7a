"""The parts of a streamer, as data: the order in which they start, and why each is where it is.

They load in this order, then start in it; services stop in the reverse order (part.py).
"""

from __future__ import annotations

from typing import Final

from streamer.config import Config
from streamer.part import Part
from streamer.parts.admin import AdminPort
from streamer.parts.certificates import CertificatePart
from streamer.parts.control import ControlPart
from streamer.parts.edge import EdgePart
from streamer.parts.endpoints import EndpointPart, ListeningPart
from streamer.parts.following import FollowPart, HandOverPart
from streamer.parts.history import EpochPart, HistoryPart
from streamer.parts.interest import InterestPart, WithoutRulePart
from streamer.parts.letters import LetterPart
from streamer.parts.log_level import LogLevelPart
from streamer.parts.losses import LossPart
from streamer.parts.pumps import ClaimPart, PausePart, PumpPart
from streamer.parts.readiness import Readiness
from streamer.parts.recovery import RecoveryPart
from streamer.parts.reloading import Reloader
from streamer.parts.senders import SenderPart
from streamer.parts.status import StatusPart
from streamer.parts.storage import StoragePart
from streamer.parts.tracing import TracingPart
from streamer.parts.unmatched import UnmatchedPart
from streamer.parts.usubscription import SubscriptionFile, UnservedPart, USubscriptionPart

ORDER: Final[tuple[tuple[type[Part], str], ...]] = (
    (StoragePart, "the logs are open already; whatever uses them ends before they are closed"),
    (LogLevelPart, "what follows writes log lines"),
    (TracingPart, "traces from the first message on"),
    (LetterPart, "what follows may have messages that can't be delivered"),
    (Readiness, "reports what follows while it starts"),
    (PausePart, "loads before the pumps: their endpoints may have been paused under another name"),
    (PumpPart, "loads before anything can append: records from now on are for the pumps"),
    (SubscriptionFile, "for whom messages are, as far as is known: before a network is listened to"),
    (WithoutRulePart, "looks at the interest"),
    (SenderPart, "counts from the first message on"),
    (EndpointPart, "networks open once all that receives is loaded, and close once services have stopped"),
    (EpochPart, "keeps epochs of what comes from networks"),
    (LossPart, "reports once more what was dropped and found while networks closed"),
    (UnservedPart, "answers calls until the services have stopped"),
    (ControlPart, "the first service: people may pause something before the rest has started"),
    (HistoryPart, "before the interest is learned, for which other services may be asked"),
    (USubscriptionPart, "the last service with methods"),
    (InterestPart, "asks services, inside and on networks"),
    (HandOverPart, "loads after the pumps, which may have to push again; announces once services run"),
    (FollowPart, "asks for the topics that are wanted, once the interest is known"),
    (EdgePart, "serves the history"),
    (RecoveryPart, "asks sources once everything that may need them runs"),
    (ClaimPart, "loads after all who own cursors: the others are of endpoints that are not configured"),
    (ListeningPart, "`ready` waits for the networks, with everything else at work"),
    (CertificatePart, "looks at the files that the parts before have read"),
    (UnmatchedPart, "looks at what the parts before have matched"),
    (StatusPart, "reports all parts"),
    (Reloader, "changes all parts"),
    (AdminPort, "offers what all parts can be asked for; its port opens first and closes first"),
)


def require(config: Config) -> None:
    """Raises UStatusError if a part can't do what the configuration says on this machine."""
    for kind, _ in ORDER:
        kind.require(config)
