"""The walk of a message through the streamer.

endpoint.py           Endpoints: a name, authorities
filters.py            Filters: the listener of one endpoint is registered for exactly what is needed
flow.py               Holds senders back between ingress and log
hosted.py             The networks as a service inside this process sees them
ingress.py            Ingress: checks the messages that an endpoint receives
names.py              Names: how the authorities of this gateway are called on the network of an endpoint
networks.py           Networks: every endpoint is opened, kept open, and its ingress listens to what is needed now
view.py               View: what may pass between networks. The rules, who must get a record
"""
