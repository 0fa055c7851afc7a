"""Chaos: real processes, real networks, faults at random moments, and judges that share no code with the product.

wire     uProtocol by hand          judges   raw paho and Zenoh clients: sender, hearer, caller, poller
ledger   messages sent and arrived           processes, proxy, machine   processes and links, and their faults
world    one gateway between its networks    faults, campaigns   the faults and their order
edge     the HTTP edge, its clients      web      a backend, publishers and readers
damage   torn files, flipped bits            __main__   runs all side by side, and writes the JSON
"""
