"""The interface for authors of recovery sources, under its public name (docs/public-api.md).

It stands in `streamer/recovery_source.py`, below the configuration, which has to know what a source is.
"""

from streamer.recovery_source import Fetched as Fetched
from streamer.recovery_source import RecoveryPlugin as RecoveryPlugin
from streamer.recovery_source import RecoverySource as RecoverySource
