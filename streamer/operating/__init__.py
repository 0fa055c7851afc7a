"""Reports for operators, and the control of dispatching.

admin.py              The pages of the admin port, for monitors and people. http_port.py serves them
backup.py             Backs up a data_dir, also while its streamer runs, and restores a backup
control.py            The control of a running streamer from the command line
drops.py              Messages that were dropped although their network was told that they were taken
http_port.py          The HTTP server of the admin port
known.py              Payloads that people can read and write as JSON
meters.py             Rates, times of the last message, and lags, from counters that the parts keep anyway
metrics.py            The counters of a streamer as Prometheus metrics, with those of its process, read only on request
new_stores.py         A data_dir that is new, although others know what was in an earlier one
readable.py           Messages as plain data for people and programs
resending.py          Sends stored dead letters again, to the endpoint where each has failed
reading.py            What people look up in a running streamer: subscriptions, last messages
states.py             The state of the streamer and of each endpoint, since when, and why: losses, clocks, ...
tracing.py            Sends the spans of messages to an OpenTelemetry collector
status.py             What a streamer does, and why: one object for the command line, GET /status, and the page
"""
