"""Clients of uSubscription services, in version 3 and 4.

client.py    USubscriptionClient: subscribe, unsubscribe, fetch, register
interest.py  Interest: which authority wants which topic, from several sources
sources.py   ServiceInterest, EmbeddedInterest, StaticFile; a copy on disk for a start without the service
"""

from uprotocol.core.usubscription.wire import Status, Subscription
from usubscription_client.client import HistorySource, USubscriptionClient
from usubscription_client.interest import Interest, InterestSource, Want
from usubscription_client.sources import EmbeddedInterest, ServiceInterest, StaticFile

__all__ = [
    "EmbeddedInterest",
    "HistorySource",
    "Interest",
    "InterestSource",
    "ServiceInterest",
    "StaticFile",
    "Status",
    "Subscription",
    "USubscriptionClient",
    "Want",
]
