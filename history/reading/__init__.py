"""The client side of a history.

acceptor.py           Takes the records of a history's answers
client.py             Its methods as calls, also over a network that loses calls; the frames of pushes
feed.py               Feeds listeners from a history
following.py          Following a history: one conversation, whatever is followed and however records come
subscriber.py         A subscriber that misses no record without a report
"""
