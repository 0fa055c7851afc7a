"""What leaves for one peer.

catch_up.py           What waits toward one peer leaves once it may: held records are read back, stuck streams are tried
claims.py             Claims on the logs: how long each endpoint has been away
holding.py            Holding: records begin to wait: refused, unheard, paused, handed over
expiry.py             Expiry: records that retention deletes before the peer got them
holds.py              The positions of what waits toward one peer
plans.py              Plans: what of a log goes to one peer, as which copies
positions.py          Positions: up to where an endpoint has had the records of a log, by its rows
pump.py               Egress: one pump per peer and log. Reads after its cursor, sends in batches, settles the answers
rows.py               The names of cursors in the log, made and taken apart
skipping.py           Moves the cursors of an endpoint forward to a time
"""
