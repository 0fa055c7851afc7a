"""The walk of a message through the streamer.

endpoint.py           Endpoints: a name, authorities
flow.py               Holds senders back between ingress and log
hosted.py             The transport of services inside this process, and what their callers may read
ingress.py            Ingress: checks the messages that an endpoint receives
ledger.py             Counts the messages of each source authority, and enforces its quota during overload
names.py              Names: how the authorities of this gateway are called on the network of an endpoint
networks.py           Networks: opens endpoints, keeps them open, and has each ingress listen to exactly what is needed
spans.py              Spans of messages whose senders want them traced
without_rule.py       Subscriptions that no rule serves: somebody wants the topic, and no rule lets it go there
view.py               View: which messages may pass between networks, and who must get a record
"""
