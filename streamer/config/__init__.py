"""The one TOML file: read, checked, and every mistake told with its line.

[streamer]  who we are         [[endpoint]]  networks        [[rule]]  what goes where (default: everything, both ways)
[history]   what is kept       [usubscription]  interest     [express] [egress] [limits]
[admin]     who may ask at the admin port
[[access]]  who reads what of the history, where that is not what the rules say
[[follow]]  whose history is followed
[[epochs]]  which topics have epochs together
"""

from streamer.config.model import Config
from streamer.config.reading import line_of, load, loads
from streamer.config.sections import (
    AccessSection,
    AdminSection,
    DispatchSection,
    EgressSection,
    EndpointSection,
    EpochsSection,
    ExpressSection,
    FollowSection,
    HistorySection,
    LimitsSection,
    Location,
    RuleSection,
    StreamerSection,
    USubscriptionSection,
    patterns,
)

__all__ = [
    "AccessSection",
    "AdminSection",
    "Config",
    "DispatchSection",
    "EgressSection",
    "EndpointSection",
    "EpochsSection",
    "ExpressSection",
    "FollowSection",
    "HistorySection",
    "LimitsSection",
    "Location",
    "RuleSection",
    "StreamerSection",
    "USubscriptionSection",
    "line_of",
    "load",
    "loads",
    "patterns",
]
