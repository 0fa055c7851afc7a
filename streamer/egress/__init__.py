"""What leaves for one peer.

blocked.py            Streams of one peer that don't get through though others do
catch_up.py           CatchUp: what was held toward one peer leaves once it may. Its records are read back from the log
claims.py             Claims on the logs: how long each endpoint has been away
deliveries.py         Deliveries: what leaves for one peer, and what becomes of it
express.py            The express way: requests, responses, and frames of histories, in memory, by priority
holds.py              What is held toward one peer
paused.py             Topics that an operator has paused toward a peer
plans.py              Plans: what of a log goes to one peer, as which copies
publishes.py          Publishes: a pump stops to send them when a follower reads them from our history
pump.py               Egress: one pump per peer and log. Reads after its cursor, sends in batches
sender.py             The send loop toward one peer
sends.py              Sends: the calls of a transport's `send_batch` that are under way
"""
