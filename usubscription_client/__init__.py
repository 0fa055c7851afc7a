"""Clients of uSubscription services, in version 3 and 4.

client.py    USubscriptionClient: subscribe, unsubscribe, fetch, register
interest.py  Interest: which authority wants which topic, from several sources
sources.py   ServiceInterest, EmbeddedInterest, StaticFile; a copy on disk for a start without the service
"""

from uprotocol.core.usubscription.wire import Status as Status
from uprotocol.core.usubscription.wire import Subscription as Subscription
from usubscription_client.client import HistorySource as HistorySource
from usubscription_client.client import USubscriptionClient as USubscriptionClient
from usubscription_client.interest import Interest as Interest
from usubscription_client.interest import InterestSource as InterestSource
from usubscription_client.interest import Want as Want
from usubscription_client.sources import EmbeddedInterest as EmbeddedInterest
from usubscription_client.sources import ServiceInterest as ServiceInterest
from usubscription_client.sources import StaticFile as StaticFile
