"""The settings of a NATS endpoint: what a user writes below `[endpoint.settings]`."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from transports.base import TransportSettings

LISTENERS_MAX = 2_000  # each filter is a consumer at the server, some 10 KB there, and a task here


class TlsConfig(BaseModel):
    """Files in PEM form; without `root_ca`, the certificates that the system trusts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root_ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("expected both certificate and private_key, got one of them")
        return self

    def context(self) -> ssl.SSLContext:
        """Reads the files: off the loop. Raises OSError."""
        context = ssl.create_default_context(cafile=str(self.root_ca) if self.root_ca else None)
        if self.certificate and self.private_key:
            context.load_cert_chain(self.certificate, self.private_key)
        return context


class NatsConfig(TransportSettings):
    servers: tuple[str, ...] = Field(min_length=1, description="nats://HOST:PORT or tls://HOST:PORT, of one cluster")
    network: str = Field(
        default="up",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="the JetStream stream, and the first token of subjects",
    )
    session: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="name of a session, for one process only: the server keeps its messages while no process is "
        "there; without it, a session lasts from `open` to `close`",
    )
    session_expiry_s: float = Field(default=300, ge=1, description="how long the server keeps an absent session")
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    tls: TlsConfig | None = None
    connect_timeout_s: float = Field(
        default=5, gt=0, description="of `open`; a connection that is lost later is tried again without limit"
    )
    ping_s: float = Field(
        default=5, gt=0, description="interval of pings; the link is dead after two without an answer"
    )
    ack_wait_s: float = Field(
        default=5, ge=0.5, description="a message that was delivered and not acknowledged comes again after so long"
    )
    full_wait_s: float = Field(
        default=10, ge=0, description="how long a send waits while the stream is full, before it is UNAVAILABLE"
    )
    stream_mib_max: int = Field(
        default=256, ge=1, description="of a stream that we make: limit of the messages that wait for slow ends"
    )
    stream_age_s_max: float = Field(
        default=3_600, ge=1, description="of a stream that we make: no message waits for longer"
    )
    stream_in_memory: bool = Field(default=False, description="of a stream that we make: not on the server's disk")
    listeners_max: int = Field(
        default=LISTENERS_MAX, ge=1, description="listeners overall; beyond it RESOURCE_EXHAUSTED"
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("expected both user and password, got one of them")
        return self

    def login(self) -> dict[str, Any]:
        """The credentials, as arguments of nats.connect."""
        given = {"user": self.user, "password": self.password and self.password.get_secret_value()}
        given["token"] = self.token and self.token.get_secret_value()
        return {name: value for name, value in given.items() if value is not None}
