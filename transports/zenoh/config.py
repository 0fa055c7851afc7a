"""What a Zenoh transport can be told, Zenoh's own configuration made of it, and the session that it makes.

ZenohConfig (checked when it is read) -> to_zenoh(): config_file, then our settings, then `settings`
-> linked(): blocks until somebody of `connect` has answered -> a session
"""

from __future__ import annotations

import contextlib
import functools
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Self

import zenoh
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from transports.base import TransportSettings
from transports.certificates import CertificateFile, TlsFiles, load_pair
from transports.zenoh.sender import words
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import ENVELOPE_BYTES_MAX, MESSAGE_BYTES_MAX
from uprotocol.v1.ucode_pb2 import UCode

# of what is put together from fragments: Zenoh drops what is beyond without a word, so leave us some to count
REASSEMBLY_FACTOR: Final = 2
SECRETS: Final = ("password", "private_key")  # of Zenoh's settings: they may be given as they are, not as a file
# how often a thread of `open` looks whether somebody has answered: a link takes some milliseconds
LINK_POLL_S: Final = 0.01
LEASE: Final = "transport/link/tx/lease"  # ms without a sign of us, after which others take us for dead
KEEP_ALIVE: Final = "transport/link/tx/keep_alive"  # signs of us in one lease, where nothing else is sent
DICTIONARY: Final = "transport/auth/usrpwd/dictionary_file"  # of users and passwords
BLOCK: Final = "transport/link/tx/queue/congestion_control/block/wait_before_close"  # microseconds


class ZenohTlsConfig(BaseModel):
    """Files in PEM form. `certificate` and `private_key` are our own, for either side of a connection."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root_ca: Path | None = None
    """whom to trust; without it the authorities that Zenoh comes with"""
    certificate: Path | None = None
    """our own, with those that lead to the CA"""
    private_key: Path | None = None
    """of our certificate"""
    mutual: bool = False
    """demand a certificate of who connects to us. A node that listens shows its own, where it connects, only with
    this"""
    verify_name: bool = True
    """hold the other side's certificate to its host name"""


class ZenohConfig(TransportSettings):
    """How to join a Zenoh network. Endpoints are Zenoh's: tcp/HOST:PORT, tls/HOST:PORT, ..."""

    mode: Literal["peer", "client", "router"] = "peer"
    """whom we hear and pass on, see above"""
    listen: tuple[str, ...] = ()
    """where others may connect, as `PROTOCOL/HOST:PORT`; port 0 is any free one"""
    connect: tuple[str, ...] = ()
    """whom to connect to: a client to the first that answers, a peer or router to all of them"""
    multicast_scouting: bool = False
    """find others by UDP multicast"""
    connect_timeout_ms: int = Field(default=5_000, ge=1)
    """until somebody in `connect` has answered; a link that is lost later is looked for without end"""
    stall_ms_max: int = Field(default=5_000, ge=1)
    """a peer that reads nothing for so long is cut off; until then all that is sent waits. Less than Zenoh's lease
    (`transport/link/tx/lease`, 10 s) without one keep-alive interval (a quarter of it): a longer wait would cost
    healthy peers their links, see [below](#a-peer-that-reads-nothing)"""
    user: str | None = None
    """who we are to whom we connect; needs `password`"""
    password: SecretStr | None = None
    """for `user`"""
    credentials_file: Path | None = None
    """lines of `user:password` that may connect to us; a file without any is refused, since Zenoh would let everybody
    connect"""
    tls: ZenohTlsConfig | None = None
    """for endpoints `tls/...` and `quic/...`"""
    subscriptions_max: int = Field(default=64, ge=16)
    """filters with a Zenoh subscription of their own; a few wider ones cover all others, and what those bring that
    nobody wants is dropped and counted (`unwanted`)"""
    config_file: Path | None = None
    """a whole Zenoh configuration (JSON5); what is set here goes over it, and so do the defaults of `mode`,
    `multicast_scouting`, `connect_timeout_ms` and `stall_ms_max`"""
    settings: dict[str, Any] = Field(default_factory=dict)
    """any setting of Zenoh by its path, such as `transport/link/tx/lease`; goes over all others"""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not (self.listen or self.connect or self.multicast_scouting or self.config_file):
            raise ValueError(
                "a Zenoh endpoint needs listen, connect, multicast_scouting or config_file: it would never meet anybody"
            )
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password come together")
        control = self.settings.get("access_control")
        if isinstance(control, dict) and "enabled" not in control:
            raise ValueError(
                "settings.access_control does not say whether it is enabled, and Zenoh takes that for false: nobody "
                "would be held to its rules. Add enabled = true, or enabled = false if that is meant"
            )
        with contextlib.suppress(UStatusError):  # what else is wrong is told when it is opened
            made = self._made(0, MESSAGE_BYTES_MAX + ENVELOPE_BYTES_MAX)
            if mistake := _stall_mistake(made):
                raise ValueError(mistake)
        return self

    @property
    def certificate_files(self) -> list[CertificateFile]:
        tls, found = self.tls, []
        if tls is not None and tls.root_ca is not None:
            found.append(CertificateFile("tls.root_ca", tls.root_ca, is_ca=True))
        if tls is not None and tls.certificate is not None:
            found.append(CertificateFile("tls.certificate", tls.certificate, tls.private_key))
        return found

    def listening_files(self) -> TlsFiles | None:
        """Those that Zenoh reads only when it begins to listen; None if it does not listen with TLS."""
        tls, listens = self.tls, any(one.startswith(("tls/", "quic/")) for one in self.listen)
        if tls is None or not (listens or (self.config_file is not None and not self.listen)):
            return None
        return TlsFiles((tls.root_ca, tls.certificate, tls.private_key), functools.partial(_context, tls))

    @property
    def stall_s(self) -> float:
        """`stall_ms_max`, or what `settings` says of it. Raises as to_zenoh."""
        wait_us: int = json.loads(self.to_zenoh().get_json(BLOCK))
        return wait_us / 1_000_000

    def to_zenoh(
        self, connect_first: int = 0, wire_bytes_max: int = MESSAGE_BYTES_MAX + ENVELOPE_BYTES_MAX
    ) -> zenoh.Config:
        """Reads config_file. Raises UStatusError(INVALID_ARGUMENT).

        A client asks the endpoint `connect_first` before the others, for its part of connect_timeout_ms: see `linked`.
        """
        made = self._made(connect_first, wire_bytes_max)
        # config_file may have changed since it was checked
        if mistake := _stall_mistake(made) or _credentials_mistake(made):
            raise invalid(mistake)
        return made

    def _made(self, connect_first: int, wire_bytes_max: int) -> zenoh.Config:
        """As `to_zenoh`, whatever the settings say together."""
        try:
            config = zenoh.Config.from_file(str(self.config_file)) if self.config_file else zenoh.Config()
        except zenoh.ZError as error:
            raise invalid(f"{self.config_file} is not a Zenoh configuration: {words(error)}") from None
        for path, value in {**self._settings(connect_first, wire_bytes_max), **self.settings}.items():
            try:
                config.insert_json5(path, json.dumps(value))
            except (zenoh.ZError, TypeError, ValueError) as error:  # the last two: what JSON can't say, such as a date
                if any(word in path for word in SECRETS):  # neither the value nor Zenoh's words, which may repeat it
                    raise invalid(f"Zenoh does not take what is given for {path}") from None
                raise invalid(f"Zenoh does not take {path} = {value!r}: {words(error)}") from None
        return config

    def _settings(self, connect_first: int, wire_bytes_max: int) -> dict[str, Any]:
        is_client = self.mode == "client"
        settings: dict[str, Any] = {
            "mode": self.mode,
            "scouting/multicast/enabled": self.multicast_scouting,
            "connect/timeout_ms": self.connect_timeout_ms // max(len(self.connect), 1) if is_client else -1,
            "connect/exit_on_failure": is_client,  # a peer or router would need *all* that it connects to
            BLOCK: self.stall_ms_max * 1_000,
            "transport/link/rx/max_message_size": REASSEMBLY_FACTOR * wire_bytes_max,  # of each link; 1 GiB otherwise
            "transport/shared_memory/enabled": False,  # a process that is killed would leave its segments behind
        }
        if not self.config_file or self.listen:
            settings["listen/endpoints"] = self.listen  # also if empty: Zenoh's default is to listen on all interfaces
        if self.connect:
            settings["connect/endpoints"] = self.connect[connect_first:] + self.connect[:connect_first]
        if self.user is not None and self.password is not None:
            settings |= {
                "transport/auth/usrpwd/user": self.user,
                "transport/auth/usrpwd/password": self.password.get_secret_value(),
            }
        if self.credentials_file is not None:
            settings[DICTIONARY] = str(self.credentials_file)
        if self.tls is not None:
            files = {"root_ca_certificate": self.tls.root_ca}
            for side in ("connect", "listen"):
                files |= {f"{side}_certificate": self.tls.certificate, f"{side}_private_key": self.tls.private_key}
            settings |= {f"transport/link/tls/{name}": str(path) for name, path in files.items() if path is not None}
            # Zenoh has one switch for showing ours and demanding theirs
            shows = self.tls.certificate is not None and not self.listen
            settings["transport/link/tls/enable_mtls"] = self.tls.mutual or shows
            settings["transport/link/tls/verify_name_on_connect"] = self.tls.verify_name
        return settings


def _credentials_mistake(made: zenoh.Config) -> str:
    """What is wrong with the file of users and passwords, in one sentence; empty if nothing, or if Zenoh tells it."""
    file = json.loads(made.get_json(DICTIONARY))
    with contextlib.suppress(OSError):
        if file is not None and not Path(file).read_bytes().strip():
            return (
                f"credentials_file {file} has no line of user:password, and Zenoh would then let everybody connect: "
                "add one, or leave the file out if that is meant"
            )
    return ""


def _stall_mistake(made: zenoh.Config) -> str:
    """What is wrong with the wait for a peer that reads nothing, in one sentence; empty if nothing.

    When the lease of a peer ends that a put waits for, Zenoh takes its link down, and the one thread that writes to all
    links waits for that put meanwhile: no peer gets a keep-alive. The last one may be a whole interval old by then.
    """
    lease_ms, keep_alives, block_us = (json.loads(made.get_json(path)) for path in (LEASE, KEEP_ALIVE, BLOCK))
    limit_ms = lease_ms - lease_ms // max(keep_alives, 1)
    if block_us < limit_ms * 1_000:
        return ""
    return (
        f"stall_ms_max is {block_us // 1_000}, and must be below {limit_ms}: the lease ({LEASE}, {lease_ms} ms) "
        f"without one keep-alive interval ({KEEP_ALIVE}, {keep_alives} in a lease), or one peer that reads nothing "
        f"costs the others their links. Lower stall_ms_max, or raise {LEASE} in settings or config_file"
    )


def _context(tls: ZenohTlsConfig) -> ssl.SSLContext:
    """Not for Zenoh, which reads the files itself: it says whether they can be loaded."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if tls.root_ca is not None:
            context.load_verify_locations(tls.root_ca)
        if tls.certificate is not None and tls.private_key is not None:
            load_pair(context, tls.certificate, tls.private_key)
    except (OSError, ValueError) as error:
        files = ", ".join(str(file) for file in (tls.root_ca, tls.certificate, tls.private_key) if file is not None)
        raise UStatusError(UCode.FAILED_PRECONDITION, f"the TLS files {files} can't be used: {error}") from None
    return context


def linked(
    config: ZenohConfig,
    wire_bytes_max: int,
    subscribe: Callable[[zenoh.Session], None] = lambda session: None,
    unsubscribe: Callable[[], None] = lambda: None,
) -> zenoh.Session:
    """A session that is linked, if there is anybody to connect to. Blocks. Raises ZError.

    `subscribe` is called as soon as there is a session, which may be long before it is linked: its port is open by
    then. `unsubscribe` is called if nothing becomes of it.

    Of several endpoints a client of Zenoh tries only the first one until the time is over (its issue 1602), hence a try
    for each. A peer or router goes on looking for all of them by itself, so it need not wait for more than one.
    """
    deadline = time.monotonic() + config.connect_timeout_ms / 1_000
    is_client = config.mode == "client"
    session = _open_client(config, wire_bytes_max) if is_client else zenoh.open(config.to_zenoh(0, wire_bytes_max))
    try:
        subscribe(session)
        if not is_client:
            _wait_for_link(session, config, deadline)
    except zenoh.ZError:
        unsubscribe()
        with contextlib.suppress(zenoh.ZError):
            session.close()  # type: ignore[no-untyped-call]
        raise
    return session


def _open_client(config: ZenohConfig, wire_bytes_max: int) -> zenoh.Session:
    for first in range(1, len(config.connect)):
        with contextlib.suppress(zenoh.ZError):
            return zenoh.open(config.to_zenoh(first - 1, wire_bytes_max))
    return zenoh.open(config.to_zenoh(max(len(config.connect) - 1, 0), wire_bytes_max))


def _wait_for_link(session: zenoh.Session, config: ZenohConfig, deadline: float) -> None:
    """`deadline`: seconds of time.monotonic."""
    while config.connect and not session.info.transports():
        if time.monotonic() > deadline:
            raise zenoh.ZError(
                f"Unable to connect to any of {', '.join(config.connect)} within {config.connect_timeout_ms} ms"
            )
        time.sleep(LINK_POLL_S)
