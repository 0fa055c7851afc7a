"""Records: what a log keeps and its readers get. Both sides of a history know these.

chunk.py              A chunk: the records of one commit, as columns; a stream: one topic, and its progress
epoch.py              The epoch of a record: a group of topics, and a logical time
limits.py             Limits of what readers ask, which both sides of a history keep to
record.py             A record as readers get it, and the records of a batch from the wire
visible.py            What a caller may read of a history, as rules
witness.py            Witnesses: digests of records that a reader was given. A log that was restored from a copy gives
"""
