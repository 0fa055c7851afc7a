"""Every operation of a running fleet, under load: `make operate`, and the soak (docs/chaos.md).

__main__.py  the command line and the table
sites.py     a gateway with its configuration as data: written, reloaded, asked
fleet.py     the world: two vehicles and a cloud behind one broker with TLS, passwords and access rules; raw clients
book.py      the ledger of chaos, judged once for each step while the load goes on
stage.py     one step: what it waits for, what it was reported, how it is judged
restarts.py keys.py reloads.py data.py asking.py   the steps
soak.py      steady load for hours: is everything flat?
backlogs.py  vehicles that come back with a backlog, over the files of examples/vehicle-cloud
"""
