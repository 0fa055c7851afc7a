"""Seeded simulation: whole gateways on virtual time, with everything that can go wrong, and a checker that knows what
is owed.

python -m campaigns.simulation --seeds 1000        as many worlds, on all processors        make simulate SEEDS=10000
python -m campaigns.simulation --seed 42 -v        one of them, step by step
python -m campaigns.simulation --breaks            puts known breaks back in, one at a time; counts the seeds until
each is found

loop.py      virtual time, processes that can be killed between any two steps     world.py    one seed, one world
disk.py      SQLite on a disk that refuses, loses power and tears                 plan.py     what befalls it
network.py   transports.local with loss, refusals and shortages                   apps.py     who lives on its networks
machine.py   a gateway's computer, and its processes                              checker.py  what is owed, what wrong
breaks.py    faults that were mended, to be put back in
"""
