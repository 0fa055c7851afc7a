"""The log's file: written, read, checked, saved.

copying.py            Copies a log's file while it is written; makes another log of a copy
damage.py             What is known to be lost or damaged
load.py               What an opened file contains, verified by checksums and repaired where possible
opening.py            Opens a log's file: creates, checks, migrates or salvages it
reader.py             Reads the log's file, in executor threads
retention.py          Which records are deleted, oldest first
rows.py               The tables of a log's file, and a checksum in each row of them
store.py              The log on disk: one SQLite file in WAL mode. One connection writes; readers have their own
verify.py             Reads everything in a log's file, and reports what is damaged
writer.py             The writer thread: it commits everything that was queued in one transaction
"""
