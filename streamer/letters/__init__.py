"""Dead letters: messages that could not be delivered.

dead_letter.py        Dead letters: what could not be delivered, with its UCode and the reason. Stored
rate.py               How many dead letters of one kind are stored in a minute, and how many of them with their payload
"""
