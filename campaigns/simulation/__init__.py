"""Seeded simulation: whole gateways in virtual time, with random faults, and a checker that knows which messages are
owed.

python -m campaigns.simulation --seeds 1000        that many worlds, on all processors       make simulate SEEDS=10000
python -m campaigns.simulation --seed 42 -v        one of them, step by step
python -m campaigns.simulation --breaks            applies known breaks, one at a time; counts the seeds until
each is found
python -m campaigns.simulation --seeds 1000 --record A.jsonl       what was heard in each; compare.py compares files

loop.py      virtual time, processes that can be killed between any two steps     world.py    one seed, one world
disk.py      SQLite on a disk that refuses, loses power and tears                 plan.py     the faults of a world
network.py   transports.local with loss, refusals and shortages                   apps.py     applications
machine.py   a gateway's computer, and its processes                              checker.py  what is owed, what wrong
breaks.py    patches that bring back faults that were fixed                       recording.py  what was heard
compare.py   two versions side by side, by what was heard                         one_pump.py   a pump alone, recorded
"""
