"""uProtocol in Python: the types and rules of the specification. No sockets, no files, no threads.

uri  uuid  status  <-  attributes  <-  message  <-  transport (uP-L1)  <-  communication (uP-L2)
v1/ core/              generated from proto/ by `make proto`
compiled               whether the hot modules, of all packages, are imported as machine code
"""

import os
from typing import Final

# whose `uprotocol` this is; up-python has one, too, and transports/__init__.py tells them apart
OF: Final = "up-streamer"


def _refuse_a_mixture(folder: str = os.path.dirname(os.path.dirname(__file__))) -> None:
    """up-python in the same folder is mixed into this package: its folders uri, uuid and transport hide our modules of
    those names."""
    try:
        mixed = any(name.startswith("up_python-") and name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return  # from an archive, say: nothing was installed over it
    if mixed:
        raise ImportError(
            f"up-python and up-streamer are both installed in {folder}, and each brings a package 'uprotocol': use a "
            "virtual environment "
            "for each. To mend this one: pip uninstall up-python up-streamer, then install up-streamer again "
            "(README.md)"
        )


_refuse_a_mixture()

from uprotocol import compiled  # noqa: E402 - not beside a stranger's modules

# for people; decided before any module is imported that may be compiled
CORE: Final = compiled.use(os.environ.get(compiled.SWITCH, ""))
