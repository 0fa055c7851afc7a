"""The walk of a message through the streamer.

access.py             What callers of the services inside may read of the history
endpoint.py           Endpoints: a name, authorities
flow.py               Holds senders back between ingress and log
hosted.py             The transport of services inside this process
ingress.py            Ingress: checks the messages that an endpoint receives
ledger.py             Counts the messages of each source authority, and enforces its quota during overload
names.py              Names: how the authorities of this gateway are called on the network of an endpoint
networks.py           Networks: opens endpoints, keeps them open, and has each ingress listen to exactly what is needed
paused.py             Topics that an operator has paused toward a peer
sender.py             What leaves for one peer: the send loop, and the express way of requests and responses
without_rule.py       Subscriptions that no rule serves: somebody wants the topic, and no rule lets it go there
view.py               View: which messages may pass between networks, and who must get a record
"""
