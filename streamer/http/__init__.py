"""What the HTTP ports share.

hosts.py              Names of hosts: which names a client may use to reach a port
statuses.py           The status that answers an error
lines.py              The limits of connections, and files that are read again
"""
