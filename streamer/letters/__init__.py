"""Dead letters: messages that could not be delivered.

dead_letter.py        Stores and publishes each undeliverable message with its UCode and the reason
rate.py               Limits the dead letters of one kind per minute, and the bytes of their payloads
"""
