"""GRIP, the protocol of Pushpin: publishers and backends that are not ours.

POST /publish/ -> items -> Channels: in order of their ids -> log -> held streams
client's request -> backend -> its answer holds the request open: items are written into it
                               a gap, or silence: its link is asked, and the answer is written into it, too

channels.py           Channels: items become publishes, in the order of their ids
headers.py            The Grip headers: what backends say in their answers, and Grip-Last
items.py              The items of a POST to /publish/
link.py               Links: asks backends for what was missed
publish.py            POST /publish/: a request of a publisher
sequence.py           The order of a channel's items by their ids
signatures.py         The JWT of publishers and of the edge
"""
