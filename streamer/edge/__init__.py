"""The HTTP edge: streams of the history for HTTP clients.

connection -> Line: limits -> TLS -> aiohttp -> /stream: who asks? -> Streams -> history
                                             '-> a prefix of [[proxy]] -> streamer/grip
"""
