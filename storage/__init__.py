"""Files, threads, clocks and random numbers. The core gets them as arguments, so that a simulation can replace them.

runtime.py  Runtime: all of them; Worker: a thread that takes batches; Answerer: one that answers
disk.py     Disk: connections, locks, marks, small files that are replaced atomically; SqliteFile: one with an owner
looking.py  opens files of other processes, and writes nothing
faults.py   kinds of errors of files, and the disk space that is reserved for a full disk
copies.py   copies files that are in use, in short steps with pauses
logs.py     the log of a process, and the thread that writes it
saved.py    small JSON files that keep state over a restart
"""
