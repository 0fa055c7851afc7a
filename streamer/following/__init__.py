"""Other histories into our log, and ours handed over to who follows it.

covered.py            Sets of topics of a followed history
doorbell.py           Plain messages that a followed history has, too
followed.py           One history that is followed into ours
follows.py            Which histories are followed into ours, and for which topics
handover.py           Handing over: whether publishes are pushed to the gateway behind an endpoint
sorting.py            What is wanted of followed histories, and where each of their records goes
"""
