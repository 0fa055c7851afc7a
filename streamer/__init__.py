"""uStreamer: forwards UMessages between endpoints. Each step of a message's way has its room, which knows those above.

http/        what all HTTP ports share               letters/    dead letters
walk/        endpoint -> ingress -> flow -> log -> view -> endpoint; requests, responses: walk/sender
egress/      what waits for one endpoint, and leaves for it
following/   copies other histories into our log; hands records over to followers of our history, without the egress
config/      the TOML file
operating/   states, metrics, the admin port, control, backups
grip/ edge/ recovery/    the HTTP edge; sources of what was lost
parts/       runs, reports and changes all of it, part by part
commands/    the command line

reporting.py       The words of reports: conditions, samples        durations.py    a histogram
operation.py       What people and programs ask of a running streamer, by name
data_dir.py        The names of the files in a data_dir
spans.py           Spans of messages whose senders want them traced
recovery_source.py The interface for authors of recovery sources
renaming.py        Carries what waits for an endpoint over to its new name
building.py        Creates what depends only on the configuration, and divides the memory among it
assembly.py        The composition root: creates and connects what every message passes, and starts none of it
part.py            One part of a streamer, as hooks: load, start, run, stop, reports, endpoints, changes
app.py             The streamer: starts its parts in order, and stops them
"""

from transports import plugin as plugin  # must be the first import: it checks that `uprotocol` is ours
