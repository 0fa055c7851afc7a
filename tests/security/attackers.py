"""An attacker in its own process: `python -m tests.security.attackers NAME '{"cloud": 1883, "count": 500, ...}'`.

Prints {"attacking": true} when it is connected and begins, and the result in its last line. An attacker that must stop
reading stops itself; the process that started it ends it.
"""

from __future__ import annotations

import json
import os
import sys

from tests.security import floods, intruders, web_attackers
from tests.security.hostile import ATTACKERS, Places

_LOADED = (floods, intruders, web_attackers)  # registers their attackers


def main() -> None:
    name, text = sys.argv[1:]
    try:
        reported = ATTACKERS[name](Places(**json.loads(text)))
    except (OSError, RuntimeError) as error:  # the gateway may have disconnected it, which the trial judges
        reported = {"ended": repr(error)}
    print(json.dumps(reported), flush=True)
    os._exit(0)  # threads of the libraries may still be waiting


if __name__ == "__main__":
    main()
