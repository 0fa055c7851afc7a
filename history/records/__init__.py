"""Records: what a log keeps.

chunk.py              A chunk: the records of one commit, as columns; a stream: one topic, and its progress
visible.py            What a caller may read of a history, as rules
witness.py            Witnesses: digests of records that a reader was given. A log that was restored from a copy gives
"""
