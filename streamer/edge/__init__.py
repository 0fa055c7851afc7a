"""The HTTP edge: streams of the history for HTTP clients.

connection -> Line: limits -> TLS -> aiohttp -> /stream: who asks? -> HttpStreams -> history
                                             '-> a prefix of [[proxy]] -> streamer/grip

streams.py            GET /stream: server-sent events, or a page of them
query.py              The parameters of a request
clients.py            One client of a stream, and the output to it
feeds.py              Feeds: one reader of the history for all clients that read the same
epoch_reader.py       Whole epochs for one client
positions.py          How far a client has read: the id of an event
events.py             What a client gets of a record
lines.py              What the HTTP ports share: the limits of their connections, and files that are read again
"""
