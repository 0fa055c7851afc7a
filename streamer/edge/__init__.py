"""The HTTP edge: streams of the history for HTTP clients.

connection -> Line: limits -> TLS -> aiohttp -> /stream: who asks? -> HttpStreams -> history
                                             '-> a prefix of [[proxy]] -> streamer/grip

edge.py               What the HTTP edge is made of, and what it needs (the edge itself: streamer/parts/edge.py)
handlers.py           What answers requests: streams, the proxy, the channels of GRIP
server.py             The HTTP servers: for clients at http.listen, and for publishers at grip.publish
callers.py            Who asks: the uEntity of a token, and which pages of a browser may ask
tokens.py             The file of tokens: a line for each client, its uEntity and its token
streams.py            GET /stream: server-sent events, or a page of them
query.py              The parameters of a request
clients.py            One client of a stream, and the output to it
feeds.py              Feeds: one reader of the history for all clients that read the same
epoch_reader.py       Whole epochs for one client
positions.py          How far a client has read: the id of an event
events.py             What a client gets of a record
"""
