"""A gateway and its configuration as data, so that a step can change one key of it.

Site.config -> TOML -> file -> run, reload (SIGHUP or the command)        readyz, metrics, commands -> what it says
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from campaigns.chaos.processes import ChaosError, Gateway

CLI: Final = (sys.executable, "-m", "streamer.commands.cli")
COMMAND_S_MAX: Final = 120.0  # on a busy machine

Table = dict[str, Any]


def toml(config: Table) -> str:
    """`config` as TOML: tables, arrays of tables, and values in them; deeper tables are inline."""
    parts: list[str] = []
    for name, value in config.items():
        many = isinstance(value, list)
        for table in value if many else [value]:
            parts.append(f"[[{name}]]" if many else f"[{name}]")
            parts += [f"{key} = {_value(one)}" for key, one in table.items()]
            parts.append("")
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


class Site:
    """One gateway of the fleet."""

    def __init__(self, name: str, folder: Path, config: Table, environment: dict[str, str]) -> None:
        """`config`: by sections; `data_dir` and `admin` are in it."""
        self.name, self.folder, self.config = name, folder, config
        self.file = folder / f"{name}.toml"
        self.tally: Counter[str] = Counter()
        self._environment = environment
        self.write()
        self.gateway = self.made()

    def made(self, environment: dict[str, str] | None = None) -> Gateway:
        """A process of it, not started. `environment`: in place of its own; each start is then a whole one."""
        port = int(str(self.config["streamer"]["admin"]).rpartition(":")[2])
        at = (self.name, self.folder, self.file, self.data_dir, port, self.tally)
        gateway = Gateway(*at, self._environment if environment is None else environment)
        gateway.is_loaded_once = environment is None
        return gateway

    @property
    def data_dir(self) -> Path:
        return Path(self.config["streamer"]["data_dir"])

    def endpoint(self, name: str) -> Table:
        found: Table = next(one for one in self.config["endpoint"] if one["name"] == name)
        return found

    def write(self, text: str | None = None) -> None:
        """Write its file: the configuration, or `text`."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(toml(self.config) if text is None else text)
        fresh.replace(self.file)

    def hang_up(self) -> None:
        """Write its file, and let it reload by SIGHUP."""
        self.write()
        self.gateway.signal(signal.SIGHUP)

    def restart(self) -> None:
        """SIGTERM, and a start once it has ended."""
        self.gateway.stop()
        self.gateway.start()
        self.gateway.wait_ready()

    def command(self, *arguments: str, timeout_s: float = COMMAND_S_MAX) -> subprocess.CompletedProcess[str]:
        """`up-streamer ARGUMENTS --config FILE`, as an operator types it."""
        argv = [*CLI, *arguments, "--config", str(self.file)]
        environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
        try:
            return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"up-streamer {' '.join(arguments)} has not ended after {timeout_s:.0f} s") from None

    # What it says

    def ready(self) -> Table:
        """/readyz; {} while it does not answer."""
        text = self.gateway.get("/readyz")
        found: Table = {} if text is None else json.loads(text)
        return found

    def status(self) -> str:
        """ready, degraded or not ready; an empty text while it does not answer."""
        return str(self.ready().get("status", ""))

    def lines(self) -> list[str]:
        """Problems and notes of /readyz."""
        found = self.ready()
        return [*found.get("problems", ()), *found.get("notes", ())]

    def line(self, *parts: str) -> str:
        """The first line of /readyz with one of `parts` in it; else an empty text."""
        return next((line for line in self.lines() if any(part in line for part in parts)), "")

    def metric(self, *parts: str) -> float:
        """The sum of the metrics whose name begins with the first of `parts`, and has the others in its labels."""
        name, *labels = parts
        found = self.gateway.metrics().items()
        return sum(v for key, v in found if key.startswith(name) and all(label in key for label in labels))
