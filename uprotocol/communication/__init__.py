"""uP-L2: publish, subscribe, notify, call and serve, over any UTransport (spec up-l2/api.adoc).

api.py         the interfaces: Publisher Notifier Subscriber RpcClient RpcServer, and CallOptions
pubsub.py      SimplePublisher   SimpleNotifier   InMemorySubscriber
rpc_client.py  InMemoryRpcClient     request -> waits by its id -> response
rpc_server.py  InMemoryRpcServer     request -> handler -> response, many at once, bounded
               Responses             the queue of responses to the network
shares.py      Shares, Quota, Turns  capacity that callers share with a limit for each; which request is next

None of them blocks; failures are UStatusError (dsn~communication-layer-impl-async~1,
dsn~communication-layer-impl-error-handling~1).
"""

from uprotocol.communication.api import (
    DEFAULT_OPTIONS,
    CallOptions,
    MessageOptions,
    NotificationListener,
    Notifier,
    Publisher,
    RequestCheck,
    RequestHandler,
    RpcClient,
    RpcServer,
    Subscriber,
    SubscriptionService,
)
from uprotocol.communication.pubsub import InMemorySubscriber, SimpleNotifier, SimplePublisher
from uprotocol.communication.rpc_client import InMemoryRpcClient
from uprotocol.communication.rpc_server import InMemoryRpcServer, Responses

__all__ = [
    "DEFAULT_OPTIONS",
    "CallOptions",
    "InMemoryRpcClient",
    "InMemoryRpcServer",
    "InMemorySubscriber",
    "MessageOptions",
    "NotificationListener",
    "Notifier",
    "Publisher",
    "RequestCheck",
    "RequestHandler",
    "Responses",
    "RpcClient",
    "RpcServer",
    "SimpleNotifier",
    "SimplePublisher",
    "Subscriber",
    "SubscriptionService",
]
