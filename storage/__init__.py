"""Files, threads, the clock and chance: what the core gets from outside, so that a simulation can put its own in.

runtime.py  Runtime: all of it, handed from the composition root down
disk.py     SQLite connections, locks, marks, small files that are replaced whole
file.py     SqliteFile: one file with an owner, of a FileKind: ours? whole? of which version? what an error of it means
faults.py   no room, damage, not permitted, or something that may pass; a damaged file is put aside
worker.py   a thread that takes batches; one that answers
gathering.py  for how many jobs it waits
logs.py     the log of a process
"""
