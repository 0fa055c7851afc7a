"""The sections of the HTTP edge: streams for HTTP clients, GRIP, and recovery sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from streamer.config.sections import NAME_PATTERN, HostPort, Section, TopicPattern, valid
from transports.certificates import CertificateFile
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.uri_pb2 import UUri

CLIENTS_MAX: Final = 10_000  # streams; each takes some 60 KiB and a file descriptor
SEQUENCE_WAIT_S: Final = 5.0  # as long as Pushpin waits for an item's predecessor (message_wait)
RECOVERY_TIMEOUT_S: Final = 10.0


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or text != f"{parts.scheme}://{parts.netloc}":
        raise ValueError(f"expected an origin such as https://app.example.com, got {text!r}")
    return text.lower()


def _host(text: str) -> str:
    if not re.fullmatch(r"[\w.:\[\]-]+", text):
        raise ValueError(f"expected a host such as app.example.com, or with its port, got {text!r}")
    return text


def _channel(text: str) -> str:
    if re.search(r"[,;\x00-\x1f\x7f]", text) or text != text.strip():
        raise ValueError(f"expected a name that the header Grip-Channel can give: without , and ;, got {text!r}")
    return text


def _link(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise ValueError(f"expected an address such as http://127.0.0.1:8000/fruit/?recover=true, got {text!r}")
    return text


def _backend(text: str) -> str:
    if urlsplit(_link(text)).query:
        raise ValueError(f"expected the address of a backend such as http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/")


def _prefix(text: str) -> str:
    if not text.startswith("/") or "?" in text or "#" in text:
        raise ValueError(f"expected the beginning of a path such as /app, got {text!r}")
    return text


def one_topic(text: str) -> UUri:
    """Raises INVALID_ARGUMENT if it is not the address of one topic."""
    topic = uris.parse(text)
    if not topic.authority_name or uris.has_wildcard(topic) or topic.resource_id < uris.RESOURCE_TOPIC_MIN:
        raise invalid(f"expected one topic such as //cloud/8001/1/8001, got {text!r}")
    return topic


def client_entity(text: str) -> UUri:
    """Raises INVALID_ARGUMENT if it is not the address of one uEntity."""
    entity = uris.parse(text)
    if not entity.authority_name or uris.has_wildcard(entity) or entity.resource_id:
        raise invalid(f"expected a uEntity such as //cloud/8001/1/0, got {text!r}")
    return entity


HostName = Annotated[str, AfterValidator(_host)]
ChannelName = Annotated[str, AfterValidator(_channel)]
WebOrigin = Annotated[str, AfterValidator(_origin)]
Backend = Annotated[str, AfterValidator(_backend)]
LinkUrl = Annotated[str, AfterValidator(_link)]
Prefix = Annotated[str, AfterValidator(_prefix)]
OneTopic = Annotated[str, AfterValidator(valid(one_topic))]
ClientEntity = Annotated[str, AfterValidator(valid(client_entity))]


class HttpSection(Section):
    """Streams of the history for HTTP clients (`GET /stream`), and the address at which backends are proxied. Needs
    the extra `http` of this package. See [edge.md](edge.md)."""

    listen: HostPort | None = None
    """`HOST:PORT`; port 0 is any free one. Without it there is no HTTP edge"""
    cert_file: Path | None = None
    """certificate, PEM; with it, TLS only. It, its key and the tokens are read again after they have changed"""
    key_file: Path | None = None
    """its key, PEM, without a passphrase"""
    tokens_file: Path | None = None
    """who may read: a line for each client, its uEntity and its token (`//cloud/8001/1/0 TOKEN`). A client shows its
    token as `Authorization: Bearer TOKEN`, or in the cookie `up_token`, and reads what `[[access]]` lets that uEntity
    read. Without the file, `listen` is an address of loopback"""
    client: ClientEntity | None = None
    """the uEntity as which clients read where there is no `tokens_file`. Without it, uEntity 8000 of the streamer's
    authority: it reads what is published at home, and what the rules let go there"""
    unprotected: bool = False
    """lets `listen` be reached from other machines without certificate or tokens: behind a proxy that checks who
    asks"""
    hosts: list[HostName] = Field(default=[])
    """names under which clients may reach the edge without `tokens_file`, in addition to `listen` and loopback; a
    request for any other host is refused (DNS rebinding)"""
    origins: list[WebOrigin] = Field(default=[])
    """web origins whose pages may read (CORS), such as `https://app.example.com`. A page of another origin is
    refused"""
    clients_max: int = Field(default=CLIENTS_MAX, ge=1)
    """streams and held requests at once; one more gets the answer to come back later"""
    client_streams_max: int | None = Field(default=None, ge=1)
    """of them, streams of one uEntity of `tokens_file`, so that no client locks others out. Without it a quarter"""
    keep_alive_s: float = Field(default=15, gt=0, le=3_600, allow_inf_nan=False)
    """an idle stream has a comment so often, so that proxies keep it open"""
    send_s: float = Field(default=30, gt=0, le=3_600, allow_inf_nan=False)
    """a client that takes nothing for so long is cut off; it resumes where it was"""

    @property
    def each_client_max(self) -> int | None:
        """Streams of one uEntity; None without tokens, where all clients are one."""
        if self.tokens_file is None:
            return None
        return self.client_streams_max or max(1, self.clients_max // 4)

    @property
    def certificate_files(self) -> list[CertificateFile]:
        return [] if self.cert_file is None else [CertificateFile("cert_file", self.cert_file, self.key_file)]


class GripSection(Section):
    """GRIP, the protocol of Pushpin: publishers send items by `POST /publish/`, and backends hold their clients'
    requests open. See [edge.md](edge.md)."""

    publish: HostPort | None = None
    """`HOST:PORT` for publishers (Pushpin: 127.0.0.1:5561); port 0 is any free one. Never the address of clients"""
    publish_key_file: Path | None = None
    """the key with which publishers sign their JWT (HS256, `Authorization: Bearer`). Without it, `publish` is an
    address of loopback, and no JWT is asked for"""
    sig_key_file: Path | None = None
    """the key with which the edge signs `Grip-Sig` for backends (a JWT, HS256). Without it there is no `Grip-Sig`"""
    sig_issuer: str = "up-streamer"
    """`iss` of `Grip-Sig`"""
    sequence_wait_s: float = Field(default=SEQUENCE_WAIT_S, ge=0, le=60, allow_inf_nan=False)
    """for so long an item waits whose `prev-id` is not the last id of its channel; then it goes on without the items
    before it, and held streams recover them"""


class ChannelSection(Section):
    """A GRIP channel and its topic: its items are published there, and recorded."""

    name: ChannelName = Field(min_length=1, max_length=256)
    """of the channel; without `,` and `;`, which end a name in `Grip-Channel`"""
    topic: OneTopic
    """one topic of an authority of ours, such as `//cloud/8001/1/8001`"""
    link: LinkUrl | None = None
    """where the items that never came can be had, as from a `Grip-Link`: the edge asks it after a gap in the ids, and
    records the answer. Without it, held streams recover by their own links, and the record has the gap"""


class ProxySection(Section):
    """A backend behind the HTTP edge. Its answers may hold requests open (`Grip-Hold`)."""

    prefix: Prefix
    """requests whose path begins so go to the backend, with their whole path; the longest prefix counts. `/stream` is
    the edge's own"""
    backend: Backend
    """`http://HOST:PORT`, or `https://`"""
    timeout_s: float = Field(default=60, gt=0, le=3_600, allow_inf_nan=False)
    """for an answer of the backend to begin"""


class RecoverySection(Section):
    """A source that has messages which their publisher's stream has lost: the gateway asks it, and appends what it has
    missed in order. See [edge.md](edge.md)."""

    topics: list[TopicPattern] = Field(min_length=1)
    """patterns of topics; a topic has one source. They are recorded"""
    source: str = Field(default="http", pattern=NAME_PATTERN)
    """`http`, or an installed plugin of the group `up_streamer.recovery`"""
    timeout_s: float = Field(default=RECOVERY_TIMEOUT_S, gt=0, le=600, allow_inf_nan=False)
    """after a gap new messages of the topic wait so long for the source's answer; then the gap is reported, and they go
    on"""
    idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """the source is asked after so long without a message of the topic. Without it: only at start, when the network
    returns, and after a gap"""
    settings: dict[str, Any] = Field(default={})
    """the source's own, see there"""
