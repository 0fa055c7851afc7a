"""The store of the service.

database.py           The state of the service in one SQLite file
reader.py             Reads the committed state of a store
schema.py             The store's file: its tables, its version, and the authority that it belongs to
store.py              Threads around the database
tables.py             Writes the tables of the store
"""
