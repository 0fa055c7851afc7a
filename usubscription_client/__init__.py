"""Clients of uSubscription services, in version 3 and 4.

client.py          USubscriptionClient: subscribe, unsubscribe, fetch, register
interest.py        Interest: which authority wants which topic, from several services
static_file.py     StaticFile: the same from a file
table.py           InterestTable: topic -> who wants it
saved_interest.py  SavedInterest: a copy on disk, for a start without the service
"""

from uprotocol.core.usubscription.wire import Status, Subscription
from usubscription_client.client import HistorySource, USubscriptionClient
from usubscription_client.interest import EmbeddedInterest, Interest, ServiceInterest
from usubscription_client.static_file import StaticFile
from usubscription_client.table import InterestSource, Want

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
