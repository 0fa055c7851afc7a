"""GRIP, the protocol of Pushpin: publishers and backends that are not ours.

POST /publish/ -> items -> Channels: in order of their ids -> log -> held streams
client's request -> backend -> its answer holds the request open: items are written into it
                               a gap, or silence: its link is asked, and the answer is written into it, too

channels.py           Channels: items become publishes, in the order of their ids
asking.py             SharedLinks: asks links for many held streams at once
headers.py            The Grip headers: what backends say in their answers, and Grip-Last
held.py               HeldStream, HeldRequest: requests that a backend holds open
items.py              The items of a POST to /publish/
link.py               Links: asks backends for what was missed
publish.py            POST /publish/: a request of a publisher
sequence.py           The order of a channel's items by their ids
signatures.py         The JWT of publishers and of the edge
proxy.py              Proxy: forwards requests to backends, and holds those open whose answer says so
succession.py         Succession: what a held stream writes next, and when its link must be asked
"""
