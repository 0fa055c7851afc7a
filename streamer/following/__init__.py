"""Other histories into our log, and ours handed over to who follows it.

covered.py            The topics of a followed history that are followed without a hole
followed.py           One history that is followed into ours
follows.py            Which histories are followed into ours, and for which topics
handover.py           Handing over: whether publishes are pushed to the gateway behind an endpoint
kept.py               Which topics are kept here, for those that follow us
not_kept.py           What is followed of a history that does not keep it
sorting.py            What is wanted of followed histories, where their records go, and which plain messages are copies
"""
