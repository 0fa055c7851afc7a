"""Reports for operators, and the control of dispatching.

admin.py              The pages of the admin port, for monitors and people. http_port.py serves them
clocks.py             Detects clocks that differ: most messages with a ttl have expired on arrival
control.py            Pauses and resumes the dispatching of topics: by RPC and from the command line
http_port.py          The HTTP server of the admin port
losses.py             Publishes losses as gaps or keeps them in the log, and shows them as conditions
metrics.py            The counters of a streamer as Prometheus metrics, read only on request
notify.py             Notifies the service manager (systemd's Type=notify), if one started us
states.py             The state of the streamer and of each endpoint, since when, and the reason
"""
