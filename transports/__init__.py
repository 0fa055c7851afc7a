"""Networks that carry UMessages. A transport is one module with a PLUGIN; it never knows the streamer.

plugin.py      name, config, constructor; found by entry point, imported only when named
listeners.py   filter -> listeners, shared by all plugins
outbox.py      what send_batch checks before the network, shared by all plugins
inbox.py       foreign thread -> event loop, in batches, acknowledged last; shared by all plugins
local.py  zenoh.py (and zenoh_sender.py, zenoh_mapping.py)  dds.py  mqtt5/      the plugins
conformance/   what every one of them must show; ships, so that a plugin from elsewhere can show it too
"""

import uprotocol

if getattr(uprotocol, "OF", None) != "up-streamer":
    raise ImportError(
        "'uprotocol' is not the package of up-streamer but another one, most likely of up-python "
        f"({uprotocol.__file__}): each brings one "
        "of that name, so use a virtual environment for each"
    )
