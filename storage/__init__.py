"""Files, threads, clocks and random numbers. The core gets them as arguments, so that a simulation can replace them.

runtime.py  Runtime: all of them
disk.py     Disk: connections, locks, marks, small files that are replaced atomically; SqliteFile: one with an owner
faults.py   kinds of errors of files, and the disk space that is reserved for a full disk
worker.py   a thread that takes batches; one that answers
logs.py     the log of a process, and the thread that writes it
saved.py           Small JSON files that keep state over a restart
"""
