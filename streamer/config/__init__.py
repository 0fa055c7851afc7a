"""The configuration: one TOML file. It is read and checked; every mistake is reported with its line.

[streamer]  who we are         [[endpoint]]  networks        [[rule]]  what goes where (default: everything, both ways)
[history]   what is kept       [usubscription]  interest     [express] [egress] [limits]
[admin]     who may ask at the admin port                    [tracing]  where spans go
[[access]]  who reads what of the history, where that is not what the rules say
[[follow]]  whose history is followed
[[epochs]]  which topics have epochs together
[http] [grip] [[channel]] [[proxy]]  the HTTP edge    [[recovery]]  where lost messages can be had
changes.py         What differs between two configurations, in the words of the file, and what needs a restart
edge.py            The sections of the HTTP edge
model.py           The whole configuration, what follows from it, and how the TOML file is read
sections.py        The sections of the configuration, each with the checks of its own keys
"""

from streamer.config.model import Config as Config
from streamer.config.model import line_of as line_of
from streamer.config.model import load as load
from streamer.config.model import loads as loads
from streamer.config.sections import AccessSection as AccessSection
from streamer.config.sections import AdminSection as AdminSection
from streamer.config.sections import EndpointSection as EndpointSection
from streamer.config.sections import FollowSection as FollowSection
from streamer.config.sections import Location as Location
from streamer.config.sections import RuleSection as RuleSection
from streamer.config.sections import StreamerSection as StreamerSection
from streamer.config.sections import TracingSection as TracingSection
from streamer.config.sections import patterns as patterns
