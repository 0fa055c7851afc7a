"""The store of the service.

database.py           The state of the service in one SQLite file
reader.py             Reads the committed state of a store
store.py              Threads around the database
tables.py             The store's file: its tables, how it is opened, and what writes them
"""
