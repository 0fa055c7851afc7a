"""The uSubscription service, versions 3 and 4 on one store.

service.py    receives requests, and connects the parts, from a request to what follows its commit
state.py      decides the result of each event (pure)
store/        the database and its threads: one transaction per batch
notifier.py   sends changes, in order, also to destinations that are away
remote.py     commands to the services of other authorities; audit.py: which of our subscriptions they have
inspect.py    reads a store from another process
"""
