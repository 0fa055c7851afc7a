"""The uSubscription service, versions 3 and 4 on one store.

request -> codec (v3, v4) -> store: one transaction per batch -> hook -> answer -> change messages -> remote commands
                             state.py decides, database.py keeps, in the rows of tables.py
"""
