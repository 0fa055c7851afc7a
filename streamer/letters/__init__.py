"""Dead letters: messages that could not be delivered.

dead_letter.py        Stores and publishes each undeliverable message with its UCode and the reason
selection.py          Which of the stored letters an operator means
"""
