"""The settings of a Zenoh transport, the Zenoh configuration that is made of them, and the session.

ZenohConfig (checked when it is read) -> to_zenoh(): config_file, then our settings, then `settings`
-> linked(): blocks until a peer of `connect` has answered -> a session
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Self

import zenoh
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from transports.base import TransportSettings
from transports.certificates import CertificateFile, TlsFiles, client_context
from transports.zenoh.sender import words
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import ENVELOPE_BYTES_MAX, MESSAGE_BYTES_MAX

# Zenoh drops larger messages without a report; we drop and count smaller ones that exceed our own limit
REASSEMBLY_FACTOR: Final = 2
SECRETS: Final = ("password", "private_key")  # words in the paths of secret Zenoh settings
# between two checks for a link while a session opens: a link takes some milliseconds
LINK_POLL_S: Final = 0.01
LEASE: Final = "transport/link/tx/lease"  # ms without a sign of us until others end the link
KEEP_ALIVE: Final = "transport/link/tx/keep_alive"  # signs in one lease if nothing else is sent
DICTIONARY: Final = "transport/auth/usrpwd/dictionary_file"  # of users and passwords
BLOCK: Final = "transport/link/tx/queue/congestion_control/block/wait_before_close"  # microseconds


class ZenohTlsConfig(BaseModel):
    """Files in PEM form. `certificate` and `private_key` are our own, for both directions of connecting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root_ca: Path | None = None
    """certificates of trusted authorities; without it those that come with Zenoh"""
    certificate: Path | None = None
    """our own, with the intermediate ones"""
    private_key: Path | None = None
    """of our certificate"""
    mutual: bool = False
    """demand a certificate from peers that connect to us. Only with this does a node that listens show its own when it
    connects"""
    verify_name: bool = True
    """check that the other side's certificate is for its host name"""


class ZenohConfig(TransportSettings):
    """How to join a Zenoh network. Endpoints are Zenoh's: tcp/HOST:PORT, tls/HOST:PORT, ..."""

    mode: Literal["peer", "client", "router"] = "peer"
    """which peers we exchange messages with, see above"""
    listen: tuple[str, ...] = ()
    """endpoints where others may connect, as `PROTOCOL/HOST:PORT`; port 0 is any free one"""
    connect: tuple[str, ...] = ()
    """endpoints to connect to: a client to the first that answers, a peer or router to all of them"""
    multicast_scouting: bool = False
    """find others by UDP multicast"""
    connect_timeout_ms: int = Field(default=5_000, ge=1)
    """limit until one of `connect` has answered; a link that is lost later is tried again without limit"""
    stall_ms_max: int = Field(default=5_000, ge=1)
    """a peer that reads nothing for so long is cut off; until then all sending waits. Must be less than Zenoh's lease
    (`transport/link/tx/lease`, 10 s) minus one keep-alive interval (a quarter of it): a longer wait would end the links
    of healthy peers, see [below](#a-peer-that-reads-nothing)"""
    user: str | None = None
    """our user name when we connect; needs `password`"""
    password: SecretStr | None = None
    """for `user`"""
    credentials_file: Path | None = None
    """lines `user:password` of those that may connect to us; an empty file is refused, since Zenoh would let everybody
    connect"""
    tls: ZenohTlsConfig | None = None
    """for endpoints `tls/...` and `quic/...`"""
    subscriptions_max: int = Field(default=64, ge=16)
    """filters with a Zenoh subscription of their own; a few wider subscriptions cover all others, and messages of those
    that match no filter are dropped and counted (`unwanted`)"""
    config_file: Path | None = None
    """a whole Zenoh configuration (JSON5); the other settings override it, and so do the defaults of `mode`,
    `multicast_scouting`, `connect_timeout_ms` and `stall_ms_max`"""
    settings: dict[str, Any] = Field(default_factory=dict)
    """any setting of Zenoh by its path, such as `transport/link/tx/lease`; overrides all others"""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not (self.listen or self.connect or self.multicast_scouting or self.config_file):
            raise ValueError(
                "a Zenoh endpoint needs listen, connect, multicast_scouting or config_file: it would never meet anybody"
            )
        if (self.user is None) != (self.password is None):
            raise ValueError("expected both user and password, got one of them")
        control = self.settings.get("access_control")
        if isinstance(control, dict) and "enabled" not in control:
            raise ValueError(
                "settings.access_control has no `enabled`, which Zenoh takes for false: its rules would not apply. Add "
                "enabled = true, or enabled = false if that is meant"
            )
        with contextlib.suppress(UStatusError):  # `open` reports other mistakes
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
        """The files that Zenoh reads only when it begins to listen; None if it does not listen with TLS."""
        tls, listens = self.tls, any(one.startswith(("tls/", "quic/")) for one in self.listen)
        if tls is None or not (listens or (self.config_file is not None and not self.listen)):
            return None
        files = (tls.root_ca, tls.certificate, tls.private_key)
        # the context shows that the files can be loaded; Zenoh itself reads them again
        return TlsFiles(files, functools.partial(client_context, *files))

    @property
    def stall_s(self) -> float:
        """`stall_ms_max`, or its value in `settings`. Raises like `to_zenoh`."""
        wait_us: int = json.loads(self.to_zenoh().get_json(BLOCK))
        return wait_us / 1_000_000

    def to_zenoh(
        self, connect_first: int = 0, wire_bytes_max: int = MESSAGE_BYTES_MAX + ENVELOPE_BYTES_MAX
    ) -> zenoh.Config:
        """Reads config_file. Raises UStatusError(INVALID_ARGUMENT).

        A client tries the endpoint `connect_first` first, for its share of connect_timeout_ms: see `linked`.
        """
        made = self._made(connect_first, wire_bytes_max)
        # config_file may have changed since it was checked
        if mistake := _stall_mistake(made) or _credentials_mistake(made):
            raise invalid(mistake)
        return made

    def _made(self, connect_first: int, wire_bytes_max: int) -> zenoh.Config:
        """Like `to_zenoh`, without checking that the settings are consistent."""
        try:
            config = zenoh.Config.from_file(str(self.config_file)) if self.config_file else zenoh.Config()
        except zenoh.ZError as error:
            raise invalid(f"{self.config_file} is not a Zenoh configuration: {words(error)}") from None
        for path, value in {**self._settings(connect_first, wire_bytes_max), **self.settings}.items():
            try:
                config.insert_json5(path, json.dumps(value))
            except (zenoh.ZError, TypeError, ValueError) as error:  # the last two: not JSON, such as a date
                if any(word in path for word in SECRETS):  # Zenoh's text may repeat the value, too
                    raise invalid(f"Zenoh does not take what is given for {path}") from None
                raise invalid(f"Zenoh does not take {path} = {value!r}: {words(error)}") from None
        return config

    def _settings(self, connect_first: int, wire_bytes_max: int) -> dict[str, Any]:
        is_client = self.mode == "client"
        settings: dict[str, Any] = {
            "mode": self.mode,
            "scouting/multicast/enabled": self.multicast_scouting,
            "connect/timeout_ms": self.connect_timeout_ms // max(len(self.connect), 1) if is_client else -1,
            "connect/exit_on_failure": is_client,  # a peer or router would need *all* its endpoints
            BLOCK: self.stall_ms_max * 1_000,
            "transport/link/rx/max_message_size": REASSEMBLY_FACTOR * wire_bytes_max,  # of each link; 1 GiB by default
            "transport/shared_memory/enabled": False,  # a killed process would leave its segments behind
        }
        if self.mode == "router":
            # a router of Zenoh sleeps for so long (500 ms by default) between opening its port and letting us
            # subscribe; what linked peers send meanwhile is lost. It goes on scouting afterwards
            settings["scouting/delay"] = 0
        if not self.config_file or self.listen:
            settings["listen/endpoints"] = self.listen  # even if empty: by default Zenoh listens on all interfaces
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
            # Zenoh has one switch for showing our certificate and demanding theirs
            shows = self.tls.certificate is not None and not self.listen
            settings["transport/link/tls/enable_mtls"] = self.tls.mutual or shows
            settings["transport/link/tls/verify_name_on_connect"] = self.tls.verify_name
        return settings


def _credentials_mistake(made: zenoh.Config) -> str:
    """The error in the file of users and passwords; "" if there is no error, or if Zenoh itself reports it."""
    file = json.loads(made.get_json(DICTIONARY))
    with contextlib.suppress(OSError):
        if file is not None and not Path(file).read_bytes().strip():
            return (
                f"credentials_file {file} has no line of user:password, and Zenoh would then let everybody connect: "
                "add one, or leave the file out if that is meant"
            )
    return ""


def _stall_mistake(made: zenoh.Config) -> str:
    """The error in the wait for a peer that reads nothing; "" if there is no error.

    When a put waits for a peer whose lease ends, Zenoh closes its link. Meanwhile the one thread that writes to all
    links waits for that put, so no peer gets a keep-alive. The last one may be a whole interval old at that time.
    """
    lease_ms, keep_alives, block_us = (json.loads(made.get_json(path)) for path in (LEASE, KEEP_ALIVE, BLOCK))
    limit_ms = lease_ms - lease_ms // max(keep_alives, 1)
    if block_us < limit_ms * 1_000:
        return ""
    return (
        f"stall_ms_max is {block_us // 1_000}, and must be below {limit_ms}: the lease ({LEASE}, {lease_ms} ms) "
        f"without one keep-alive interval ({KEEP_ALIVE}, {keep_alives} in a lease), or one peer that reads nothing "
        f"ends the links of the others. Lower stall_ms_max, or raise {LEASE} in settings or config_file"
    )


def linked(
    config: ZenohConfig,
    wire_bytes_max: int,
    subscribe: Callable[[zenoh.Session], None] = lambda session: None,
    unsubscribe: Callable[[], None] = lambda: None,
) -> zenoh.Session:
    """Open a session; with `connect`, wait until it is linked. Blocks. Raises ZError.

    `subscribe` is called when the session exists and its port is open, perhaps long before it is linked. `unsubscribe`
    is called if opening fails after that.

    Of several endpoints a client of Zenoh tries only the first one until the time is over (its issue 1602), so there is
    an attempt for each. A peer or router keeps connecting to all of them by itself, so one link is enough.
    """
    deadline = time.monotonic() + config.connect_timeout_ms / 1_000
    is_client = config.mode == "client"
    session: zenoh.Session | None = None
    for first in range(1, len(config.connect) if is_client else 0):
        with contextlib.suppress(zenoh.ZError):
            session = zenoh.open(config.to_zenoh(first - 1, wire_bytes_max))
            break
    if session is None:
        last = max(len(config.connect) - 1, 0) if is_client else 0
        session = zenoh.open(config.to_zenoh(last, wire_bytes_max))
    try:
        subscribe(session)
        while config.connect and not is_client and not session.info.transports():
            if time.monotonic() > deadline:
                raise zenoh.ZError(
                    f"Unable to connect to any of {', '.join(config.connect)} within {config.connect_timeout_ms} ms"
                )
            time.sleep(LINK_POLL_S)
    except zenoh.ZError:
        unsubscribe()
        with contextlib.suppress(zenoh.ZError):
            session.close()  # type: ignore[no-untyped-call]
        raise
    return session
