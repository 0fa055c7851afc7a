"""Makes a repository for a new transport, from a template that passes the conformance suite.

python -m transports.new redis ../up-transport-redis

examples/transport-template (in a wheel: transports/template) -> copied, with `hubnet` and `Hub...` renamed
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from transports import plugin
from uprotocol.status import UStatusError, invalid

HERE: Final = Path(__file__).resolve().parent
TEMPLATES: Final = (HERE / "template", HERE.parent / "examples" / "transport-template")  # of a wheel, of a checkout
FILES: Final = ("*.toml", "*.md", "*.py", "tests/*.py")
NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def renamed(text: str, name: str) -> str:
    """`text` of the template, renamed for the transport `name`."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    text = re.sub(r"\bHub(?=Config|Transport)", camel, text.replace("TestHubnet", f"Test{camel}"))
    return text.replace("hubnet", name)


def make(name: str, directory: Path) -> list[Path]:
    """Write the repository to a new `directory`; returns its files. Raises UStatusError: INVALID_ARGUMENT."""
    if NAME.fullmatch(name) is None or len(name) > 40:
        raise invalid(
            "expected a name of lower-case letters, digits and single underscores, at most 40 characters, "
            f"got {name!r}: take the name of your network, such as redis"
        )
    if name in plugin.names():
        raise invalid(f"the transport {name} exists already: take another name")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise invalid(f"{directory} exists and is not an empty directory: name a directory that is new or empty")
    template = next(folder for folder in TEMPLATES if folder.is_dir())
    written = []
    for path in sorted(found for pattern in FILES for found in template.glob(pattern)):
        target = directory / renamed(str(path.relative_to(template)), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        written.append(target)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m transports.new", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the transport, as a configuration names it: redis")
    parser.add_argument("directory", type=Path, help="of the repository, new or empty: ../up-transport-redis")
    given = parser.parse_args(arguments)
    try:
        written = make(given.name, given.directory)
    except (UStatusError, OSError) as error:
        print(f"Nothing was written: {error.message if isinstance(error, UStatusError) else error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    print(f"Try it: cd {given.directory} && pip install -e '.[test]' && pytest; then read README.md there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
