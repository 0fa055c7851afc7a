"""Files, threads, clocks and random numbers. The core gets them as arguments, so that a simulation can replace them.

runtime.py  Runtime: all of them
disk.py     SQLite connections, locks, marks, small files that are replaced atomically
file.py     SqliteFile: a file with one owner; FileKind: its checks, versions and errors
faults.py   kinds of errors: full disk, damage, missing permission, or temporary
worker.py   a thread that takes batches; one that answers
logs.py     the log of a process
log_output.py      Writes the lines of the log to a file descriptor, in a separate thread
reserve.py         Reserved disk space for the case that the disk becomes full
saved.py           Small JSON files that keep state over a restart
"""
