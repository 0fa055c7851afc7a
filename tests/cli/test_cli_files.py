"""`up-streamer check` reports missing and unusable files, with the line that names them."""

from __future__ import annotations

import codecs
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from streamer.commands import cli
from tests.certificates import DAY, TestAuthority
from usubscription_client.sources import read_static

CONFIG = """[streamer]
data_dir = "{folder}/data"
admin = "127.0.0.1:0"

[[endpoint]]
name = "home"
transport = "local"
authorities = ["vehicle1"]

[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
[endpoint.settings]
host = "127.0.0.1"
client_id = "vehicle1"
username = "vehicle1"
password_file = "{folder}/password"
[endpoint.settings.tls]
ca_file = "{folder}/ca.crt"
cert_file = "{folder}/vehicle1.crt"
key_file = "{folder}/vehicle1.key"
[endpoint.settings.websocket.secret_headers]
Authorization = "{folder}/bearer"

[[endpoint]]
name = "far"
transport = "zenoh"
authorities = ["far"]
settings = {{ connect = ["tls/127.0.0.1:1"], tls = {{ root_ca = "{folder}/zenoh.crt" }} }}

[usubscription]
static_file = "{folder}/static.json"

[admin]
cert_file = "{folder}/admin.crt"
key_file = "{folder}/admin.key"
token_file = "{folder}/secret"
"""
LINES = {
    "password": 18,
    "ca.crt": 20,
    "vehicle1.crt": 21,
    "vehicle1.key": 22,
    "bearer": 24,
    "zenoh.crt": 30,
    "static.json": 33,
    "admin.crt": 36,
    "admin.key": 37,
    "secret": 38,
}
SECRETS = ("password", "vehicle1.key", "bearer", "admin.key", "secret")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration all of whose files are there."""
    for name in LINES:
        (tmp_path / name).write_text("{}")
    authority = TestAuthority(tmp_path)
    for name in ("ca.crt", "zenoh.crt"):
        (tmp_path / name).write_bytes(authority.ca.read_bytes())
    for name in ("vehicle1", "admin"):
        renew(authority, name)
    for name in SECRETS:
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "gateway.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def renew(authority: TestAuthority, name: str, ends_in: timedelta = DAY) -> None:
    authority.issue(name, ends_in)[0].rename(authority.folder / f"{name}.crt")


def check(config: Path, *options: str) -> Result:
    return CliRunner(env={"COLUMNS": "2000", "TERM": "dumb"}).invoke(cli.app, ["check", "-c", str(config), *options])


def reported(result: Result, config: Path) -> list[int]:
    """The lines of the file that were reported of."""
    words = result.stderr.replace("error FAILED_PRECONDITION: ", "").splitlines()
    assert all(line.startswith(f"{config}:") for line in words), words
    return [int(line.removeprefix(f"{config}:").split(":")[0]) for line in words]


def test_what_is_there_is_no_news(config: Path) -> None:
    done = check(config, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["notes"] == []
    assert not (config.parent / "data").exists()


def test_success_says_what_was_understood(config: Path) -> None:
    shown = check(config).stdout
    for words in (
        f"data_dir: {config.parent}/data",
        "recorded: nothing but what somebody has subscribed to",
        "kept: 168 h, and at most 1024 MiB on disk",
        f"subscriptions also from {config.parent}/static.json",
        "admin port: 127.0.0.1:0, with TLS and a token",
        f"certificate: endpoint.1.settings.tls.cert_file {config.parent}/vehicle1.crt until 20",
        "home -> cloud",
        f"{config} has no mistakes",
    ):
        assert words in shown


def test_a_byte_order_mark_is_no_part_of_a_file(config: Path) -> None:
    """Editors on Windows write one."""
    for path in (config, config.parent / "static.json"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    done = check(config, "--json")
    assert done.exit_code == 0, done.output
    assert read_static(config.parent / "static.json") == []


def test_each_missing_file_is_reported_with_its_line(config: Path) -> None:
    for name in LINES:
        (config.parent / name).unlink()
    done = check(config)
    assert done.exit_code == 1
    assert reported(done, config) == sorted(LINES.values())
    assert (
        f"endpoint.1.settings.tls.key_file: {config.parent}/vehicle1.key can't be read: No such file or directory"
        in done.stderr
    )


@pytest.mark.parametrize("name", LINES)
def test_a_folder_is_no_file(config: Path, name: str) -> None:
    (config.parent / name).unlink()
    (config.parent / name).mkdir()
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [LINES[name]])
    assert "is no file" in done.stderr


def test_an_unreadable_file_is_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, and tests run as root in places, so the system's answer is taken from it here."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "vehicle1.key" and real(path, mode))
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [LINES["vehicle1.key"]])
    assert f"can't be read by the user with the id {os.geteuid()}" in done.stderr


@pytest.mark.parametrize("name", LINES)
def test_a_secret_that_everybody_can_read_is_a_note(config: Path, name: str) -> None:
    (config.parent / name).chmod(0o644)
    done = check(config, "--json")
    assert done.exit_code == 0, done.output
    expected = [f"{config}:{LINES[name]}: "] if name in SECRETS else []
    notes = json.loads(done.stdout)["notes"]
    assert [note for note in notes if "everybody" in note and note.startswith(tuple(expected))] == notes
    assert len(notes) == len(expected)


@pytest.mark.parametrize(("mode", "is_note"), [(0o755, True), (0o750, False), (0o700, False)])
def test_a_data_dir_that_everybody_can_list_is_a_note(config: Path, mode: int, is_note: bool) -> None:
    (config.parent / "data").mkdir()
    (config.parent / "data").chmod(mode)
    notes = json.loads(check(config, "--json").stdout)["notes"]
    assert ["chmod o-rwx" in note for note in notes] == [True] * is_note


def test_a_data_dir_below_a_file_is_reported(config: Path) -> None:
    (config.parent / "data").write_text("")
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [2])
    assert "can't be a folder" in done.stderr


def test_a_data_dir_that_can_not_be_written_to_is_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [2])
    assert "can't be written to" in done.stderr


@pytest.mark.parametrize(
    ("name", "setting"),
    [("vehicle1", "endpoint.1.settings.tls.cert_file"), ("admin", "admin.cert_file")],
)
@pytest.mark.parametrize("wrong", ["expired", "of another key", "none"])
def test_a_certificate_that_can_not_be_used_is_an_error(config: Path, name: str, setting: str, wrong: str) -> None:
    authority, file = TestAuthority(config.parent, "again"), config.parent / f"{name}.crt"
    words = {"expired": "has expired at", "of another key": "belongs to another key", "none": "holds no certificate"}
    match wrong:
        case "expired":
            renew(authority, name, -DAY)
        case "of another key":
            authority.issue("other")[0].rename(file)
        case "none":
            file.write_text("{}")
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [LINES[f"{name}.crt"]])
    assert f"{setting}: {file} {words[wrong]}" in done.stderr


@pytest.mark.parametrize("name", ["ca.crt", "zenoh.crt"])
@pytest.mark.parametrize("wrong", ["expired", "a leaf", "none"])
def test_a_ca_file_that_is_none_is_an_error(config: Path, name: str, wrong: str) -> None:
    authority, file = TestAuthority(config.parent, "again", ends_in=-DAY), config.parent / name
    source = {"expired": authority.ca, "a leaf": authority.issue("leaf")[0], "none": config}[wrong]
    file.write_bytes(source.read_bytes())
    done = check(config)
    assert (done.exit_code, reported(done, config)) == (1, [LINES[name]])
    words = {"expired": "has expired at", "a leaf": "no certificate of a CA", "none": "holds no certificate in PEM"}
    assert words[wrong] in done.stderr
