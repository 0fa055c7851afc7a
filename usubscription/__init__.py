"""The uSubscription service, versions 3 and 4 on one store.

service.py    joins the parts: a request's way from its arrival to what follows its commit
requests.py   where requests come in and responses leave
state.py      decides: what becomes of a subscription (pure)
store/        the database, and the threads around it: one transaction per batch
notifier.py   sends changes, in order; telling.py: their messages, and destinations that are away
remote.py     the services of other authorities; audit.py: what do you have of ours?
inspect.py    a look into a store from outside
"""
