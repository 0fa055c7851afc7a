"""Quotas and memory limits.

ledger.py             Counts the messages of each source authority, and enforces its quota during overload
limits.py             Divides the configured memory among topics, queues and caches
"""
