"""core.usubscription: on the wire, and how clients call it.

asking.py          What every client of a uSubscription needs
wire.py            The messages of core.usubscription
"""
