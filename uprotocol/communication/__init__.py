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

from uprotocol.communication.api import DEFAULT_OPTIONS as DEFAULT_OPTIONS
from uprotocol.communication.api import CallOptions as CallOptions
from uprotocol.communication.api import MessageOptions as MessageOptions
from uprotocol.communication.api import NotificationListener as NotificationListener
from uprotocol.communication.api import Notifier as Notifier
from uprotocol.communication.api import Publisher as Publisher
from uprotocol.communication.api import RequestCheck as RequestCheck
from uprotocol.communication.api import RequestHandler as RequestHandler
from uprotocol.communication.api import RpcClient as RpcClient
from uprotocol.communication.api import RpcServer as RpcServer
from uprotocol.communication.api import Subscriber as Subscriber
from uprotocol.communication.api import SubscriptionService as SubscriptionService
from uprotocol.communication.pubsub import InMemorySubscriber as InMemorySubscriber
from uprotocol.communication.pubsub import SimpleNotifier as SimpleNotifier
from uprotocol.communication.pubsub import SimplePublisher as SimplePublisher
from uprotocol.communication.rpc_client import InMemoryRpcClient as InMemoryRpcClient
from uprotocol.communication.rpc_server import InMemoryRpcServer as InMemoryRpcServer
from uprotocol.communication.rpc_server import Responses as Responses
