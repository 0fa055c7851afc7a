"""What leaves for one peer.

catch_up.py           CatchUp: what was held toward one peer leaves once it may. Its records are read back from the log
claims.py             Claims on the logs: how long each endpoint has been away
express.py            The express way: requests, responses, and frames of histories, in memory, by priority
holding.py            Holding: records begin to wait: refused, unheard, paused, handed over
holds.py              The positions of what waits toward one peer
paused.py             Topics that an operator has paused toward a peer
plans.py              Plans: what of a log goes to one peer, as which copies
pump.py               Egress: one pump per peer and log. Reads after its cursor, sends in batches, settles the answers
sender.py             The send loop toward one peer: queue, streams aside, batches in flight, calls of its transport
"""
