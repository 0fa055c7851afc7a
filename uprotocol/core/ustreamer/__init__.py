"""core.ustreamer: the service of a streamer.

ids.py             core.ustreamer: the addresses of a streamer's own service, `up://AUTHORITY/4/1/RESOURCE`
"""
