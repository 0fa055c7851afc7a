"""GRIP, the protocol of Pushpin: publishers and backends that are not ours.

POST /publish/ -> items -> Channels: in order of their ids -> log -> held streams
client's request -> backend -> its answer holds the request open: items are written into it
                               a gap, or silence: its link is asked, and the answer is written into it, too

headers.py            The Grip headers: what backends say in their answers, and Grip-Last
items.py              The items of a POST to /publish/
link.py               Links: asks backends for what was missed
"""
