"""The history: every message once, in one log, which is the egress queue, what subscribers ask, and Spark's offsets.

records/      a record and its chunk, batches of them on the wire
log/          Log: append, read, wait, cursors; its storages, durable and volatile
file/         the log's file: writer, readers, retention, damage and salvage
service/      core.ustreamer: Describe, Poll, Command, pushes
reading/      the client's side: HistoryClient, GaplessSubscriber, HistoryFeed
epochs/       frontiers and epochs
publisher.py  HistoryPublisher: keeps what it publishes, and serves it
"""

import uprotocol as uprotocol  # first of all: it decides whether what follows is imported as machine code
