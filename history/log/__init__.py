"""The log and its two storages.

cursors.py            Positions that a log keeps
log.py                The log: every message once, numbered, in order. The egress queue
storage.py            Where a log keeps its records
streams.py            The streams of a log: how many each authority may have, and when a stream is forgotten
"""
