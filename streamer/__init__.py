"""uStreamer: one UMessage's walk, one file per hop.

endpoint -> ingress -> flow -> log -> view -> egress -> endpoint      publishes and notifications
               |
               +----> express ------------------------> endpoint      requests and responses
               +----> hosted                                          what is for a service inside this process

following, followed     other histories into our log; handover: ours to who follows it, in place of the egress
app, parts, networks    makes the parts, starts and stops them; opens the endpoints, and listens to what is needed
rules, paused, view     who gets what; ledger, limits: how much of it
names, priority_queue   what the endpoints are called outside; what waits to be sent
holds, blocked          what an egress holds back; dead_letter, claims: what nobody has had
config, control, admin, metrics, notify, commands/, demo/           for people
"""

from transports import plugin as plugin  # first of all: the package tells whether `uprotocol` is ours
