"""Records: what a log keeps.

chunk.py              A chunk: the records of one commit, as columns. The unit of storage, of reading and of retention
stream.py             A stream: one topic, or the notifications from one topic to one sink; and its progress
witness.py            Witnesses: digests of records that a reader was given. A log that was restored from a copy gives
"""
