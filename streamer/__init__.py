"""uStreamer: one UMessage's walk, one room per part of it.

walk/        endpoint -> ingress -> flow -> log -> view -> egress -> endpoint; requests, responses: egress/express
egress/      sends what the view lets through to one peer: pump, holds, pauses, the express lane
following/   other histories into our log, and ours to who follows it, in place of the egress
letters/     dead letters        quotas/      how much of what each authority may have
operating/   admin port, metrics, control topics, states      commands/, demo/, config/      for people
app.py       starts the parts in order, and stops them
assembly.py        The composition root: makes every part of a streamer and connects the parts. Nothing runs yet
attaching.py       Endpoints and rules of a running streamer
embedded.py        The embedded uSubscription
lifecycle.py       The parts of a streamer: started in order
order.py           The parts of a streamer in the order in which they start; assembly.py makes them
"""

from transports import plugin as plugin  # first of all: it checks that `uprotocol` is ours
