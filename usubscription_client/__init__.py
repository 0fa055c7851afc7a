"""Asking uSubscription, whichever version it speaks.

client.py       USubscriptionClient: subscribe, unsubscribe, fetch, register
interest.py     Interest: who wants what, kept fresh from several services
static_file.py  StaticFile: the same from a file
"""

from usubscription_client.client import HistorySource, USubscriptionClient
from usubscription_client.interest import EmbeddedInterest, Interest, InterestSource, ServiceInterest
from usubscription_client.static_file import StaticFile
from usubscription_client.table import Want
from usubscription_client.wire import Status, Subscription

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
