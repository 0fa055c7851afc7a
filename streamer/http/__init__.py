"""What the HTTP ports share.

hosts.py              Names of hosts: which names a client may use to reach a port
places.py             Places: the clients that hold a connection, and what the HTTP edge refused
statuses.py           The status that answers an error
lines.py              The limits of connections, and files that are read again
"""
