"""Epochs: what belongs together, and when it is whole.

assembling.py         All records of an epoch, or none of them
frontier.py           Logical times, and the frontiers of a stream
group_state.py        What an Assembler knows of each group
groups.py             The epochs of a group of topics
keeper.py             Keeps the epochs of groups of topics in the logs of one process
merging.py            Merges the frontiers that several logs report of one group
"""
