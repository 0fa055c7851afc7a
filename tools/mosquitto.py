"""Installs mosquitto for tests, the demo and benchmarks of a checkout, if needed. Not part of the wheel, which installs
nothing.

found, or a container can run it -> done   root and apt -> install it -> done   else print what to install, exit 1
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from streamer.commands.demo import mosquitto
from uprotocol.status import UStatusError


def install() -> str | None:
    """Install mosquitto with apt, if this process is root and apt exists. Returns the binary, or None."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return None
    # runlevel 1: the package must not start the service
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = [apt, "install", "-y", "-qq", "--no-install-recommends", "mosquitto"]
    for update_first in (False, True):
        if update_first:
            subprocess.run([apt, "update", "-qq"], env=environment, stdout=subprocess.DEVNULL, check=False)
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if (binary := mosquitto.find()) is not None:
            return binary
    return None


def main() -> int:
    if (binary := mosquitto.find() or install()) is None:
        try:
            mosquitto.runner()
        except UStatusError as error:
            print(
                f"{error.message} (apt-get install mosquitto, dnf install mosquitto, brew install mosquitto)",
                file=sys.stderr,
            )
            return 1
    print(binary or f"container {mosquitto.IMAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
