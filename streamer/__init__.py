"""uStreamer: one UMessage's walk, one file per hop.

endpoint -> ingress -> log -> view -> egress -> endpoint        publishes and notifications
               |
               +----> express ----------------> endpoint        requests and responses
               +----> hosted                                    what is for a service inside this process
"""

from transports import plugin as plugin  # first of all: the package tells whether `uprotocol` is ours
