"""How much of what each authority may use.

ledger.py             What each source authority sends
limits.py             How much of each thing fits into the memory that the operator gives
"""
