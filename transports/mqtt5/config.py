"""What can be set for an MQTT 5 transport."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from transports.base import TransportSettings
from transports.certificates import CertificateFile
from transports.mqtt5.mapping import Mode, TtlReading


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

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file come together")
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
    connect_timeout_ms: int = Field(
        default=5_000, ge=1, description="each: for the name, an address, TLS, and the broker's answer"
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

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        """Without the brackets that an IPv6 address has in a URL."""
        if re.search(r"[/@\s]", host):
            raise ValueError(f"expected a host name or an address, without scheme, user, port and path, got {host!r}")
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @model_validator(mode="after")
    def _one_password(self) -> Self:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other")
        if self.username is None and (self.password is not None or self.password_file is not None):
            raise ValueError("a password needs a username")
        return self
