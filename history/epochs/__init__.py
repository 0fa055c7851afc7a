"""Epochs: what belongs together, and when it is whole.

assembling.py         All records of an epoch, or none of them
frontier.py           The frontiers of a stream: which logical times are over, open, or have not begun
groups.py             The epochs of a group of topics
merging.py            What one reader knows of the groups: their frontiers, merged over all logs, and what waits
"""
