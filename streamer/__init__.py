"""uStreamer: forwards UMessages between endpoints. Each part of a message's path has its package.

walk/        endpoint -> ingress -> flow -> log -> view -> egress -> endpoint; requests, responses: walk/sender
egress/      sends the messages that the view allows to one peer: pump, holds, claims
following/   copies other histories into our log; hands records over to followers of our history, without the egress
letters/     dead letters
operating/   admin port, metrics, control topics, states      commands/, config/      command line, settings
http/        what all HTTP ports share    edge/, grip/, recovery/   the HTTP edge
reporting.py       The words of reports: conditions, samples        durations.py    a histogram
operation.py       What people and programs ask of a running streamer, by name
spans.py           Spans of messages whose senders want them traced
recovery_source.py The interface for authors of recovery sources
app.py             Runs a streamer: lists its parts in the order in which they start, and runs them
assembly.py        The composition root: creates and connects all parts of a streamer, and starts none
attaching.py       Adds and removes endpoints and rules of a running streamer
lifecycle.py       How parts start and stop; the embedded uSubscription, which starts as soon as the disk allows it
operations.py      All operations of a running streamer: which part of it does what an operator asks for
reloading.py       Takes over a changed configuration while the streamer runs
reports.py         What a streamer reports of itself: conditions, states, notes, metrics
unmatched.py       Patterns of the configuration that match nothing
renaming.py        Carries what waits for an endpoint over to its new name
parts.py           Creates the parts that depend only on the configuration, and divides the memory among them
"""

from transports import plugin as plugin  # must be the first import: it checks that `uprotocol` is ours
