"""The log and its two storages.

cursors.py            Positions that a log keeps
durable.py            The storage of a durable log
log.py                The log: every message once, numbered, in order. The egress queue
losses.py             What is known to be lost or damaged, while the log is open
storage.py            Where a log keeps its records
streams.py            The streams of a log: how many each authority may have, and when a stream is forgotten
volatile.py           The storage of a volatile log
"""
