"""Recovery sources: what a topic's stream has lost is fetched from elsewhere, and appended in order.

appending.py          Appends the messages of one topic in order, each batch with the position behind it
asking.py             A source in use: whatever it does is bounded, counted, and reported
gates.py              Gate: messages of one topic pass in order, and wait where one may be missing
http_source.py        The source `http`: a REST history in the shape of a Grip-Link
source.py             The interface for authors of sources, under its public name
waiting.py            The messages that wait at a gate, and the order of recovered ones
"""
