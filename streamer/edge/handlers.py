"""What answers requests at the HTTP edge: streams of the history, the proxy, and the channels of GRIP.

Its imports are those of the edge: assembly.py imports it only where an edge is configured.
"""

from __future__ import annotations

from collections.abc import Callable

from history.service.service import HistoryService
from streamer.config import Config
from streamer.edge.callers import Callers
from streamer.edge.edge import Handlers
from streamer.edge.streams import HttpStreams
from streamer.grip.channels import Channels, OnMissing, Outlet
from streamer.grip.link import Links
from streamer.grip.proxy import Proxy
from streamer.grip.publish import PublishHandler
from streamer.grip.signatures import PublisherKey, Signer
from streamer.http.places import Places


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
    grip, bytes_max = config.grip, config.limits.message_bytes_max
    sign = None if grip.sig_key_file is None else Signer(grip.sig_key_file, grip.sig_issuer, now_ms).sign

    def links() -> Links:
        return Links(sign, answer_bytes_max=bytes_max)  # a record for each page

    channels = Channels(config.channel, grip.sequence_wait_s, outlet, links(), on_gap)
    made = Handlers(channels=channels, reporters=[channels], closed=[channels.close])
    if callers is not None:
        streams = HttpStreams(history, callers, config.http, places)
        made = made._replace(stream=streams.get, reporters=[*made.reporters, streams], closing=[streams.close])
    if config.proxy:
        proxy = Proxy(config.proxy, config.http, channels, links(), places, sign)
        made = made._replace(
            proxied=proxy.handle, reporters=[*made.reporters, proxy], closed=[proxy.close, *made.closed]
        )
    if grip.publish is not None:
        key = None if grip.publish_key_file is None else PublisherKey(grip.publish_key_file)
        made = made._replace(publish=PublishHandler(channels.publish, key, bytes_max, places.refused).post)
        if key is not None:
            made = made._replace(opening=[key.get], reporters=[*made.reporters, key])
    return made
