"""The history: every message once, in one log, which is the egress queue, what subscribers ask, and Spark's offsets.

records/      a record and its chunk, batches of them on the wire; what both sides of a history know
file/         the log's file: writer, readers, retention, damage and salvage
epochs/       which records belong together, and when all of them have come: frontiers, without I/O
log/          Log: append, read, wait, cursors; its storages, durable and volatile
service/      core.ustreamer: Describe, Poll, Command, pushes; keeps the epochs of what is appended
reading/      the client's side: HistoryClient, GaplessSubscriber, HistoryFeed
publisher.py  HistoryPublisher: keeps what it publishes, and serves it

None imports one that stands below it here; file and epochs, and service and reading, do not know each other.
"""

import uprotocol as uprotocol  # first of all: it decides whether what follows is imported as machine code
