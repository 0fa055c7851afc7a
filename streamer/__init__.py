"""uStreamer: one UMessage's walk, one room per part of it.

walk/        endpoint -> ingress -> flow -> log -> view -> egress -> endpoint; requests, responses: egress/express
egress/      sends what the view lets through to one peer: pump, holds, pauses, the express lane
following/   other histories into our log, and ours to who follows it, in place of the egress
letters/     dead letters        quotas/      how much of what each authority may have
operating/   admin port, metrics, control topics, states      commands/, demo/, config.py     for people
app.py       makes the parts, starts and stops them            parts.py
"""

from transports import plugin as plugin  # first of all: it checks that `uprotocol` is ours
