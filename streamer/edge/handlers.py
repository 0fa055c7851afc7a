"""What answers requests at the HTTP edge: streams of the history, the proxy, and the channels of GRIP.

Its imports are those of the edge: assembly.py imports it only where an edge is configured.
"""

from __future__ import annotations

from collections.abc import Callable

from history.service.service import HistoryService
from streamer.config import Config
from streamer.edge.callers import Callers
from streamer.edge.edge import Handlers
from streamer.edge.places import Places
from streamer.edge.streams import HttpStreams
from streamer.grip.channels import Channels, OnMissing, Outlet
from streamer.grip.link import Links, Sign
from streamer.grip.proxy import Proxy
from streamer.grip.publish import PublishHandler
from streamer.grip.signatures import PublisherKey, Signer


def _signer_of(config: Config, now_ms: Callable[[], int]) -> Sign | None:
    """Returns what makes the `Grip-Sig` of requests to backends; None if they have none."""
    key = config.grip.sig_key_file
    return None if key is None else Signer(key, config.grip.sig_issuer, now_ms).sign


def _links_of(config: Config, sign: Sign | None) -> Links:
    return Links(sign, answer_bytes_max=config.limits.message_bytes_max)  # a record for each page


def handlers_of(
    config: Config,
    history: HistoryService,
    outlet: Outlet,
    on_gap: OnMissing,
    callers: Callers | None,
    places: Places,
    now_ms: Callable[[], int],
) -> Handlers:
    """`callers`: None without http.listen."""
    sign = _signer_of(config, now_ms)
    channels = Channels(config.channel, config.grip.sequence_wait_s, outlet, _links_of(config, sign), on_gap)
    made = Handlers(channels=channels, reporters=[channels], closed=[channels.close])
    if callers is not None:
        streams = HttpStreams(history, callers, config.http, places)
        made = made._replace(stream=streams.get, reporters=[*made.reporters, streams], closing=[streams.close])
    if config.proxy:
        links = _links_of(config, sign)
        proxy = Proxy(config.proxy, config.http, channels, links, places, sign)
        made = made._replace(
            proxied=proxy.handle,
            reporters=[*made.reporters, proxy],
            closed=[proxy.close, links.close, *made.closed],
        )
    if config.grip.publish is not None:
        file = config.grip.publish_key_file
        key = None if file is None else PublisherKey(file)
        publish = PublishHandler(channels.publish, key, config.limits.message_bytes_max, places.refused)
        made = made._replace(publish=publish.post)
        if key is not None:
            made = made._replace(opening=[key.get], reporters=[*made.reporters, key])
    return made
