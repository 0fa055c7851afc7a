"""An attacker as a process of its own: `python -m tests.security.attackers NAME '{"cloud": 1883, "count": 500, ...}'`.

Says {"attacking": true} when it is connected and begins, and what came of it in its last line. An attacker that is to
read nothing any more stops itself; the process that started it ends it.
"""

from __future__ import annotations

import json
import os
import sys

from tests.security import floods, intruders
from tests.security.hostile import ATTACKERS, Places

_LOADED = (floods, intruders)  # for their attackers


def main() -> None:
    name, text = sys.argv[1:]
    try:
        reported = ATTACKERS[name](Places(**json.loads(text)))
    except (OSError, RuntimeError) as error:  # perhaps disconnected: the trial judges that
        reported = {"ended": repr(error)}
    print(json.dumps(reported), flush=True)
    os._exit(0)  # threads of the libraries may still wait for somebody


if __name__ == "__main__":
    main()
