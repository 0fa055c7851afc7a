"""What leaves for one peer.

address_holds.py      AddressHolds: the addresses of a peer that are refused or unheard
backlog.py            Backlog: everything that waits toward one peer in one log; it alone changes the positions
claims.py             Claims on the logs: how long each endpoint has been away
held_records.py       Which records wait in one held address
hold_state.py         The states of a held address, as a table
in_hand.py            InHand: what was read and has not left: queued, in flight, or aside
losses.py             PeerLosses: what a peer does not get: dead letters and gaps
plans.py              Plans: what of a log goes to one peer, as which copies
pump.py               Egress: one pump per peer and log. Reads after its cursor, sends in batches, settles the answers
reading_back.py       ReadingBack: what was held leaves once it may: it is read back from the log
reasons.py            Why messages to an address wait, and how operators and logs call it
refusals.py           Refusals: addresses begin to wait, since the network refuses them or nobody listens
rows.py               The names of cursors in the log, made and taken apart, and EndpointPositions: what they say
skipping.py           Moves the cursors of an endpoint forward to a time
topic_holds.py        TopicHolds, OwedTopics: topics that are undecided, paused, or owed to a follower
"""
