"""Benchmarks: throughput, delay and cost of up-streamer beside a bare relay (docs/benchmarks.md).

__main__.py   legs, costs, the tables        lanes.py      publisher -> relay -> subscriber
measure.py    a leg: lanes in turn           load.py       publisher and subscriber as processes
costs/        costs of single operations     networks.py   ... on Zenoh and DDS (dds_type.py), mqtt.py on MQTT
curves.py     along one axis, pictures.py    wire.py       message formats of the bench
targets.py    the targets                    bare.py, far.py, rust_peer/   other relays, a broker that is far away
spark_fleet.py   the planner of a Spark query over a fleet, without Spark
soak.py       memory                         subject.py, asker.py   the streamer under test, a client of its services
usubscription_scale.py, usubscription_links.py   the service alone       processes.py   child processes
"""
