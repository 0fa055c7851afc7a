"""Chaos: real processes, real networks, faults at random moments, and judges that share no code with what they judge.

wire     uProtocol by hand          judges   raw paho and Zenoh clients: sender, hearer, caller, poller
ledger   what was promised, what came        processes, proxy, machine   what can be hurt, and with what
world    one gateway between its networks    faults, campaigns   what happens to it
damage   torn files, flipped bits            __main__   all of it side by side, and the JSON
"""
