"""Files, threads, the clock and chance: what the core gets from outside, so that a simulation can put its own in.

runtime.py: Runtime, handed from the composition root down     disk.py: files     worker.py: a thread with batches
"""
