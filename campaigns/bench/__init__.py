"""How fast, how late and at what cost: up-streamer beside a bare relay (docs/benchmarks.md).

__main__.py   legs, costs, the tables        lanes.py      publisher -> relay -> subscriber, whole or not
measure.py    a leg: lanes in turn           load.py       the two ends as processes
costs/        what should follow a change    networks.py   ... on Zenoh and DDS (dds_type.py), mqtt.py on MQTT
curves.py     along one axis, pictures.py    wire.py       what travels
targets.py    what is to be reached          bare.py, far.py, rust_peer/   other relays, a broker that is far away
soak.py       memory                         subject.py, asker.py   the streamer under test, and who calls its services
usubscription_scale.py, usubscription_links.py   the service alone       processes.py   that certainly end
"""
