"""The service of core.ustreamer: what is asked of a history.

consumers.py          The owners of consumers' names
followers.py          The followers: the topics that each of them follows, and pushes to them
gaps.py               Publishes gaps, which are records that are lost, on a topic of core.ustreamer
keeper.py             Keeps the epochs of groups of topics in the logs of one process
matches.py            Finds the streams of a log that a request's patterns match and that its caller may see
planning.py           A plan: where to divide the matching records of a log, without sending them
poll.py               A poll: the checks of its request, where it begins, and the answer that it fills
service.py            The service of core.ustreamer
"""
