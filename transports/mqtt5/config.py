"""What can be set for an MQTT 5 transport."""

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
    """A secret that `setting` names the file of. Blocks. Raises UStatusError(FAILED_PRECONDITION)."""
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{setting} {file} can't be read: {error}") from None


class TlsConfig(BaseModel):
    """TLS; with `cert_file` and `key_file` the broker can tell who we are (mTLS)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca_file: Path | None = Field(default=None, description="certificates to trust; the system's without it")
    cert_file: Path | None = Field(
        default=None,
        description="our own certificate, and those that lead to the CA; all three files are read at each connect, "
        "so a certificate can be renewed while running",
    )
    key_file: Path | None = Field(default=None, description="its private key")
    insecure: bool = Field(default=False, description="don't check who the broker is: for tests only")
    alpn: list[str] = Field(
        default=[],
        max_length=ALPN_NAMES_MAX,
        description="protocol names to offer (ALPN), where a port serves several protocols: AWS IoT Core on port 443 "
        "wants `x-amzn-mqtt-ca`, with a custom authorizer `mqtt`",
    )

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

    path: str = Field(default="/mqtt", description="of the URL")
    headers: dict[str, SecretStr] = Field(
        default={}, description="further headers of the HTTP request that opens the WebSocket: name = value"
    )
    secret_headers: dict[str, Path] = Field(
        default={},
        description="the same, with values that are the first lines of files (name = path); read at each connect, so a "
        "token can be changed while running",
    )

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
                raise ValueError(f"the header {name!r} is set by the WebSocket itself: take it out")
            if names.count(name) > 1:
                raise ValueError(f"the header {name!r} is there twice: keep it in headers or in secret_headers")
        for name, value in self.headers.items():
            if not is_header_value(value.get_secret_value()):  # which may be a secret: the error does not show it
                raise ValueError(f"the value of the header {name!r} has a line break or another control character")
        return self


class Mqtt5Config(TransportSettings):
    host: str = Field(default="127.0.0.1", min_length=1, description="of the broker")
    port: int = Field(default=1883, ge=1, le=65_535, description="usually 1883, with TLS 8883")
    mode: Mode = Field(
        default=Mode.IN_VEHICLE,
        description="which topics: of a vehicle's own network, or between authorities; see below",
    )
    client_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="names the session; without it, each start has a new one. Two clients with one name throw each "
        "other out",
    )
    clean_start: bool = Field(
        default=False,
        description="forget what an earlier start with this `client_id` left at the broker: once, reconnections resume",
    )
    session_expiry_s: int = Field(
        default=300,
        ge=0,
        le=0xFFFF_FFFF,
        description="how long the broker keeps subscriptions and messages while we are away; 0: not at all, "
        "4294967295: for ever",
    )
    keep_alive_s: int = Field(default=30, ge=1, le=65_535, description="a silent broker is given up after twice that")
    username: str | None = Field(default=None, description="who we are to the broker, unless our certificate says so")
    password: SecretStr | None = Field(default=None, description="for `username`; or `password_file`")
    password_file: Path | None = Field(
        default=None,
        description="its first line is the password; read at each connect, so a password can be changed while running",
    )
    tls: TlsConfig | None = Field(
        default=None, description="encrypt; an empty table will do where the system trusts the broker's certificate"
    )
    websocket: WebSocketConfig | None = Field(
        default=None,
        description="MQTT over WebSocket, `wss` with `tls`; an empty table will do where the path is /mqtt. "
        "Proxies that the environment names (HTTPS_PROXY) are not used",
    )
    receive_maximum: int = Field(
        default=2_048, ge=1, le=65_535, description="messages that the broker may send ahead of our acknowledgement"
    )
    in_flight_max: int = Field(
        default=8_192,
        ge=1,
        le=65_000,
        description="messages that we send ahead of the broker's acknowledgement, where the way to it is long; it may "
        "ask for fewer (mosquitto: `max_inflight_messages`, 20 unless set)",
    )
    messages_per_s: int | None = Field(
        default=None,
        ge=10,
        description="messages that we send in any one second, whatever they are, for a broker that throws away what is "
        "more (AWS IoT Core: 100). What is more waits here",
    )
    connect_timeout_ms: int = Field(
        default=5_000,
        ge=1,
        description="each: for the name, an address, TLS, the answer to a WebSocket's upgrade, and that to CONNECT",
    )
    sys_topics: bool = Field(
        default=True,
        description="ask the broker for its count of dropped messages (`$SYS/broker/publish/messages/dropped`), which "
        "mosquitto tells. A broker that hangs up over the question (rumqttd) is asked once a day: false saves that "
        "connection",
    )
    ttl_reading: TtlReading = Field(
        default=TtlReading.RESTORED,
        description="what the ttl of a message is that has waited: as long as its sender meant, or what the broker has "
        'left of it, as the specification has it; see "Time to live"',
    )

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
        """The protocol names that TLS offers; none: it does not say any."""
        if self.websocket is not None:
            return ["http/1.1"]
        return self.tls.alpn if self.tls is not None else []

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        """Without the brackets that an IPv6 address has in a URL."""
        if re.search(r"[/@\s]", host):
            raise ValueError(f"expected a host name or an address, without scheme, user, port and path, got {host!r}")
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @model_validator(mode="after")
    def _one_protocol(self) -> Self:
        if self.websocket is not None and self.tls is not None and self.tls.alpn:
            raise ValueError(
                f"tls.alpn {self.tls.alpn} and websocket exclude each other: a WebSocket begins as HTTP, and offers "
                "http/1.1. Take one of them out"
            )
        return self

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other")
        if self.username is None and (self.password is not None or self.password_file is not None):
            raise ValueError("a password needs a username")
        return self
