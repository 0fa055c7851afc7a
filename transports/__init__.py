"""Networks that carry UMessages. A transport is one module with a PLUGIN; it never knows the streamer.

plugin.py      name, config, constructor; found by entry point, imported only when named
listeners.py   filter -> listeners, shared by all plugins
base.py        what every transport does alike: checks before sending, connection callbacks, its listeners
arrivals.py    what has arrived -> listeners: bounded, in batches, acknowledged last, again if not taken
local.py  zenoh/  dds/  mqtt5/      the plugins
conformance/   what every one of them must show; ships, so that a plugin from elsewhere can show it too
new.py         a repository for one from elsewhere: python -m transports.new NAME DIRECTORY
"""

import uprotocol

if getattr(uprotocol, "OF", None) != "up-streamer":
    raise ImportError(
        "'uprotocol' is not the package of up-streamer but another one, most likely of up-python "
        f"({uprotocol.__file__}): each brings one "
        "of that name, so use a virtual environment for each"
    )
