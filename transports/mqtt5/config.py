"""Settings of an MQTT 5 transport."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from transports.base import TransportSettings
from transports.certificates import CertificateFile
from transports.mqtt5.mapping import Mode, TtlReading
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

ALPN_NAMES_MAX: Final = 16
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
OWN_HEADERS: Final = frozenset({"connection", "content-length", "host", "transfer-encoding", "upgrade"})


def is_header_value(value: str) -> bool:
    """RFC 9110, section 5.5: no control character, in particular no line break."""
    return not re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value)


def first_line(setting: str, file: Path) -> str:
    """The secret in `file`, which `setting` names. Blocks. Raises UStatusError(FAILED_PRECONDITION)."""
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{setting} {file} can't be read: {error}") from None


class TlsConfig(BaseModel):
    """TLS; with `cert_file` and `key_file` the broker can authenticate us (mTLS)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca_file: Path | None = None
    """trusted certificates; default: the system's"""
    cert_file: Path | None = None
    """our own certificate, and its chain up to the CA; all three files are read at each connect, so a certificate can
    be renewed while running"""
    key_file: Path | None = None
    """its private key"""
    insecure: bool = False
    """don't check the broker's certificate: for tests only"""
    alpn: list[str] = Field(default=[], max_length=ALPN_NAMES_MAX)
    """protocol names to offer (ALPN), if a port serves several protocols: AWS IoT Core on port 443 needs
    `x-amzn-mqtt-ca`, with a custom authorizer `mqtt`"""

    @field_validator("alpn")
    @classmethod
    def _are_alpn_names(cls, names: list[str]) -> list[str]:
        """RFC 7301, section 3.1: 1 to 255 bytes each."""
        for name in names:
            if not (name.isascii() and name.isprintable() and 1 <= len(name) <= 255):
                raise ValueError(f"expected names of 1 to 255 ASCII characters, got {name!r}")
        return names

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file come together")
        return self


class WebSocketConfig(BaseModel):
    """MQTT over WebSocket (MQTT 5, section 6): `ws`, and with `tls` `wss`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = "/mqtt"
    """of the URL"""
    headers: dict[str, SecretStr] = {}
    """further headers of the HTTP request that opens the WebSocket: name = value"""
    secret_headers: dict[str, Path] = {}
    """the same, with the value in the first line of a file (name = path); read at each connect, so a token can be
    changed while running"""

    @field_validator("path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if not re.fullmatch(r"/[!-~]*", path) or "#" in path or "?" in path:
            raise ValueError(
                f"expected a path that begins with / and is percent-encoded, without query, such as /mqtt, got {path!r}"
            )
        return path

    @model_validator(mode="after")
    def _are_headers(self) -> Self:
        names = [name.lower() for name in (*self.headers, *self.secret_headers)]
        for name in names:
            if not HEADER_NAME.fullmatch(name):
                raise ValueError(f"expected the name of an HTTP header, got {name!r}")
            if name in OWN_HEADERS or name.startswith("sec-websocket-"):
                raise ValueError(f"the header {name!r} is set by the WebSocket itself: remove it")
            if names.count(name) > 1:
                raise ValueError(f"the header {name!r} is set twice: keep it in headers or in secret_headers")
        for name, value in self.headers.items():
            if not is_header_value(value.get_secret_value()):  # not shown in the error: it may be a secret
                raise ValueError(f"the value of the header {name!r} has a line break or another control character")
        return self


class Mqtt5Config(TransportSettings):
    """The settings of an MQTT 5 transport (docs/mqtt5.md)."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """of the broker"""
    port: int = Field(default=1883, ge=1, le=65_535)
    """usually 1883, with TLS 8883"""
    mode: Mode = Mode.IN_VEHICLE
    """which topics: of a vehicle's own network, or between authorities; see below"""
    client_id: str | None = Field(default=None, min_length=1, max_length=200)
    """names the session; default: a new one at each start. Two clients with one name end each other's connections"""
    clean_start: bool = False
    """forget the session that an earlier start with this `client_id` left at the broker; reconnections resume the new
    one"""
    session_expiry_s: int = Field(default=300, ge=0, le=0xFFFF_FFFF)
    """how long the broker keeps subscriptions and messages while there is no connection; 0: not at all, 4294967295: for
    ever"""
    keep_alive_s: int = Field(default=30, ge=1, le=65_535)
    """after twice that without a sign of the broker, we reconnect"""
    username: str | None = None
    """our login, unless the broker uses our certificate"""
    password: SecretStr | None = None
    """of `username`; or `password_file`"""
    password_file: Path | None = None
    """its first line is the password; read at each connect, so a password can be changed while running"""
    tls: TlsConfig | None = None
    """encrypt; an empty table suffices if the system trusts the broker's certificate"""
    websocket: WebSocketConfig | None = None
    """MQTT over WebSocket, `wss` with `tls`; an empty table suffices for the path /mqtt. Proxies from the environment
    (HTTPS_PROXY) are not used"""
    receive_maximum: int = Field(default=2_048, ge=1, le=65_535)
    """messages that the broker may send ahead of our acknowledgement"""
    in_flight_max: int = Field(default=8_192, ge=1, le=65_000)
    """messages that we send ahead of the broker's acknowledgement, if the round trip is long; it may ask for fewer
    (mosquitto: `max_inflight_messages`, 20 unless set)"""
    messages_per_s: int | None = Field(default=None, ge=10)
    """messages that we send in any one second, for a broker that throws more away (AWS IoT Core: 100). Further messages
    wait here"""
    connect_timeout_ms: int = Field(default=5_000, ge=1)
    """for each step: name look-up, an address, TLS, the upgrade to a WebSocket, the answer to CONNECT"""
    sys_topics: bool = True
    """subscribe to the broker's count of dropped messages (`$SYS/broker/publish/messages/dropped`), which mosquitto
    has. A broker that hangs up over it (rumqttd) is asked once a day: false avoids that"""
    ttl_reading: TtlReading = TtlReading.RESTORED
    """the ttl of a message that has waited: as its sender set it, or what the broker has left of it, as in the
    specification; see "Time to live" """

    @property
    def certificate_files(self) -> list[CertificateFile]:
        tls, found = self.tls, []
        if tls is not None and tls.ca_file is not None:
            found.append(CertificateFile("tls.ca_file", tls.ca_file, is_ca=True))
        if tls is not None and tls.cert_file is not None:
            found.append(CertificateFile("tls.cert_file", tls.cert_file, tls.key_file))
        return found

    @property
    def alpn(self) -> list[str]:
        """The protocol names that TLS offers; empty: no ALPN."""
        if self.websocket is not None:
            return ["http/1.1"]
        return self.tls.alpn if self.tls is not None else []

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        """Removes the brackets that an IPv6 address has in a URL."""
        if re.search(r"[/@\s]", host):
            raise ValueError(f"expected a host name or an address, without scheme, user, port and path, got {host!r}")
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @model_validator(mode="after")
    def _one_protocol(self) -> Self:
        if self.websocket is not None and self.tls is not None and self.tls.alpn:
            raise ValueError(
                f"tls.alpn {self.tls.alpn} and websocket exclude each other: a WebSocket begins as HTTP, and offers "
                "http/1.1. Remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other")
        if self.username is None and (self.password is not None or self.password_file is not None):
            raise ValueError("a password needs a username")
        return self
