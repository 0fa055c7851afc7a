"""uProtocol in Python: the types and rules of the specification. No sockets, no files, no threads.

uri  uuid  status  <-  attributes  <-  message  <-  transport (uP-L1)  <-  communication (uP-L2)
v1/ core/              generated from proto/ by `make proto`
compiled               whether the hot modules, of all packages, are imported as machine code
cache.py           A bounded dict for values that can be computed again
callbacks.py       Lists of callbacks: who adds one gets what removes it again
encoded.py         A message that is routed, counted, stored and forwarded without being parsed
pacing.py          Backoff: pauses after failures. Pace: a rate limit. Every package uses these two
tasks.py           Tasks and events of the loop: waits for an event that end in time, and the end of tasks
"""

import os
from typing import Final

# identifies this package: up-python also installs a package `uprotocol`, and transports/__init__.py checks which it is
OF: Final = "up-streamer"


def _refuse_a_mixture(folder: str = os.path.dirname(os.path.dirname(__file__))) -> None:
    """Raises ImportError if up-python is installed in the same folder: its packages uri, uuid and transport hide our
    modules of the same names."""
    try:
        mixed = any(name.startswith("up_python-") and name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return  # imported from an archive, for example: nothing can be installed over it
    if mixed:
        raise ImportError(
            f"up-python and up-streamer are both installed in {folder}, and each has a package 'uprotocol': use a "
            "virtual environment for each. To repair this one: pip uninstall up-python up-streamer, then install "
            "up-streamer again (README.md)"
        )


_refuse_a_mixture()

from uprotocol import compiled  # noqa: E402 - only after the check above

# a description for people; decided before the first import of a module that may be compiled
CORE: Final = compiled.use(os.environ.get(compiled.SWITCH, ""))
