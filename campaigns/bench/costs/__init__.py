"""Costs that should depend only on the size of a change: one measurement per row of the table in docs/benchmarks.md.

common.py       setting, points, metrics      topics.py       many topics on Zenoh, the first message of one
disk.py         bytes written per message     subscribing.py  one more subscription, start, notifications
describing.py   Describe                      brokers.py      MQTT: a far broker, a small window, one at a time
slow.py         a slow processor              elsewhere.py    a fleet, DDS
following.py    a gateway that follows another one      epochs.py  an append, with and without epochs
edge.py         clients of the HTTP edge
"""

from collections.abc import Callable
from typing import Final

from campaigns.bench.costs import (
    brokers,
    describing,
    disk,
    edge,
    elsewhere,
    epochs,
    following,
    slow,
    subscribing,
    topics,
)
from campaigns.bench.costs.common import Figures, Setting

COSTS: Final[dict[str, Callable[[Setting], Figures]]] = {
    "disk": disk.measure,
    "topics_subscribed": topics.subscribed,
    "topics_published": topics.published,
    "first_sight": topics.first_sight,
    "one_subscription_more": subscribing.one_more,
    "start_subscribed": subscribing.start,
    "notifications": subscribing.notifications,
    "describe": describing.measure,
    "mqtt_far": brokers.far,
    "mqtt_one_at_a_time": brokers.one_at_a_time,
    "mqtt_stock_window": brokers.stock,
    "slow_processor": slow.measure,
    "fleet": elsewhere.fleet,
    "dds_new_topics": elsewhere.dds,
    "following": following.road,
    "following_polls": following.polls,
    "epochs": epochs.measure,
    "edge": edge.measure,
}
