"""The client side of a history.

acceptor.py           Takes the records of a history's answers
client.py             The client side of the history
commands.py           Tells a history service what is followed
feed.py               Feeds listeners from a history
following.py          Following a history: one conversation, whatever is followed and however records come
poller.py             Polls a history over a network that loses calls
pushed.py             The frames of a push: in order, without a gap, and none of an older push
subscriber.py         A subscriber that misses no record without a report
"""
