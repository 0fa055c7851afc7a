"""Networks that carry UMessages. A transport is one module with a PLUGIN; it never knows the streamer.

plugin.py      name, config, constructor; found by entry point, imported only when a configuration names it
listeners.py   filter -> listeners, and which filters match a message; shared by all plugins
base.py        common parts of all transports: checks before sending, connection callbacks, listeners
arrivals.py    queue of arrived messages -> listeners: bounded, in batches, acknowledged last, redelivered if not taken
local.py  zenoh/  dds/  mqtt5/      the plugins
conformance/   test suite for every transport; part of the wheel, so that plugins from elsewhere can run it
new.py         makes a repository for a new plugin: python -m transports.new NAME DIRECTORY
certificates.py    Certificates in files: loaded again after a renewal, checked, and reported before they expire
ports.py           TCP ports for servers that tests, the demo and benchmarks start on 127.0.0.1
"""

import uprotocol

if getattr(uprotocol, "OF", None) != "up-streamer":
    raise ImportError(
        f"expected the package 'uprotocol' of up-streamer, got another one ({uprotocol.__file__}), probably that of "
        "up-python: both have this name, so use a virtual environment for each"
    )
