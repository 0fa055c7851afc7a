"""Epochs: what belongs together, and when it is whole.

assembling.py         All records of an epoch, or none of them
frontier.py           Logical times, and the frontiers of a stream
groups.py             The epochs of a group of topics
keeper.py             Keeps the epochs of groups of topics in the logs of one process
merging.py            What one reader knows of the groups: their frontiers, merged over all logs, and what waits
"""
