"""Dead letters: messages that could not be delivered.

dead_letter.py        Stores and publishes each undeliverable message with its UCode and the reason
selection.py          Which of the stored letters an operator means
resending.py          Sends stored letters again, to the endpoint where each has failed
operations.py         List, resend, purge: for the control socket and the admin port
"""
