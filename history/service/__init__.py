"""The service of core.ustreamer: what is asked of a history.

consumers.py          The owners of consumers' names
describe.py           Describe: the logs, each with its newest matching record; topics all at once, or in pages
followers.py          The followers: the topics that each of them follows, so that its polls need not name them
gaps.py               Publishes gaps, which are records that are lost, on a topic of core.ustreamer
matches.py            Finds the streams of a log that a request's patterns match and that its caller may see
poll.py               A poll that runs, and the answer that it fills
pushing.py            Pushes to a follower: frames with the answers that it would have if it polled again and again
request.py            The checks of a request: each field once, so that nothing behind them has to check it again
service.py            The service of core.ustreamer
"""
