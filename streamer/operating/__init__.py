"""For operators: states, metrics, the admin port, control.

admin.py              The admin port: its answers for monitors and people. http_port.py serves them
clocks.py             Clocks that are apart: most messages with a ttl have expired on arrival
control.py            Who may stop and start the dispatching of topics
http_port.py          The admin port on the network
losses.py             What was lost: reported to subscribers of gaps, noted in the log, and shown as a condition
metrics.py            The counters of a streamer as Prometheus metrics, read when somebody asks and never before
notify.py             What the service manager is told (systemd's Type=notify), if one started us
states.py             How each endpoint is, since when, and why
"""
