"""The sections of the configuration, each with the checks of its own keys."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from history.file.writer import GATHER_MS
from streamer.egress.address_holds import HELD_HOURS
from streamer.walk.access import AccessPattern
from streamer.walk.endpoint import SEND_MS_MAX
from streamer.walk.ledger import UNITS_PER_S
from transports.certificates import CertificateFile
from uprotocol import uri as uris
from uprotocol.core.ustreamer.ids import ENTITY, VERSION
from uprotocol.status import UStatusError
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.uri_pb2 import UUri

HOURS_MIN: Final = 0.001  # some seconds; less would delete what is under way
HOURS_MAX: Final = 876_600  # 100 years; who means "for ever" lets the bytes be the limit
GATHER_MS_MAX: Final = 100  # who waits longer for an acknowledgement believes it lost
EPOCH_MS_MAX: Final = 7 * 24 * 3_600_000  # who has epochs of a week does not wait for their end
MEMORY_MIB: Final = 512  # in addition to some 100 MiB of an idle streamer
MIB_MAX: Final = 1 << 40  # an exbibyte: beyond any disk, and far from what an integer of SQLite holds
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


def valid(check: Callable[[str], object]) -> Callable[[str], str]:
    """A text that `check` takes."""

    def validate(text: str) -> str:
        try:
            check(text)
        except UStatusError as error:
            raise ValueError(error.message) from None
        return text

    return validate


def _authority(text: str) -> str:
    if not text:
        raise ValueError("an authority may not be empty")
    return valid(uris.validate_authority)(text)


def _authority_pattern(text: str) -> str:
    """An authority, `*`, or a family like `*.vin123`."""
    if uris.is_family(text):
        _authority(text[2:])
        if uris.is_pattern(text[2:]):
            raise ValueError(f"{text!r} has more than one *; expected a name behind the *.")
        return text
    return _authority(text)


def _suffix(text: str) -> str:
    if text:
        _authority(text)
    if uris.is_pattern(text) or text.startswith((".", "[")):
        raise ValueError(f"expected what stands behind the dot, such as vin123 for ecu1.vin123, got {text!r}")
    return text


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("expected HOST:PORT with a port of 0 (any free one) to 65535")
    return text


def is_loopback(address: str) -> bool:
    """A name may be anything, but for one."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Location = tuple[int | str, ...]  # of a key: ("endpoint", 1, "name") is the name of the second endpoint
HostPort = Annotated[str, AfterValidator(_host_port)]
Authority = Annotated[str, AfterValidator(_authority)]
AuthorityPattern = Annotated[str, AfterValidator(_authority_pattern)]
Suffix = Annotated[str, AfterValidator(_suffix)]
TopicPattern = Annotated[str, AfterValidator(valid(uris.parse))]
WidePattern = Annotated[str, AfterValidator(valid(AccessPattern.parse))]


def _service(text: str) -> str:
    """The address of a history service."""
    pattern = AccessPattern.parse(text)
    address = pattern.address
    if not pattern.authority or (address.ue_id & 0xFFFF, address.ue_version_major) != (ENTITY, VERSION):
        raise ValueError(
            "expected a history service, of a gateway as //vehicle1/4/1/0, of a publisher as //vehicle1/80010004/1/0"
        )
    if address.resource_id:
        raise ValueError("the address of a service has resource 0")
    if address.ue_id >> 16 == uris.WILDCARD_ENTITY_INSTANCE:
        raise ValueError("publishers are followed type by type, such as //vehicle1/80010004/1/0 for the type 8001")
    return text


def _one_service(text: str) -> str:
    service = AccessPattern.parse(valid(AccessPattern.parse)(text))
    if uris.is_pattern(service.authority) or service.address.ue_id >> 16:
        raise ValueError(f"expected the history service of one gateway, such as //hub/4/1/0, got {text!r}")
    return _service(text)


Service = Annotated[str, AfterValidator(_one_service)]
ServicePattern = Annotated[str, AfterValidator(valid(AccessPattern.parse)), AfterValidator(_service)]


def patterns(texts: list[str]) -> list[UUri]:
    return [uris.parse(text) for text in texts]


class Section(BaseModel):
    """What stands below its fields becomes the tables of docs/configuration.md (tools/config_reference.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamerSection(Section):
    """Who this streamer is."""

    authority: Authority | None = None
    """the device that the streamer runs on: its history service is `up://AUTHORITY/4/1/...`, its dead letter topic
    `up://AUTHORITY/4/1/8001`. Without it, the first authority that an endpoint names"""
    data_dir: Path = Path("up-streamer-data")
    """log, subscriptions, dead letters, remembered interest"""
    admin: HostPort | None = None
    """`HOST:PORT` of the page, `/metrics`, `/status`, `/healthz`, `/readyz` and `/vehicles`; port 0 is any free one"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """what is logged, and all that is worse; the log goes to standard error"""
    log_format: Literal["text", "json"] = "text"
    """of the log: for people, or one JSON object a line, its `timestamp` in UTC with milliseconds"""


class AdminSection(Section):
    """Who may ask at `streamer.admin`."""

    cert_file: Path | None = None
    """certificate of the port, PEM; with it, TLS only. All three files are read again after they have changed"""
    key_file: Path | None = None
    """its key, PEM, without a passphrase"""
    token_file: Path | None = None
    """a token; who asks shows it (`Authorization: Bearer TOKEN`) or is answered 401"""
    unprotected: bool = False
    """lets `streamer.admin` listen beyond loopback without certificate or token: for a network that nobody but the
    monitor is on"""

    @property
    def certificate_files(self) -> list[CertificateFile]:
        return [] if self.cert_file is None else [CertificateFile("cert_file", self.cert_file, self.key_file)]


class EndpointSection(Section):
    """One network and the authorities that live on it."""

    name: str = Field(pattern=NAME_PATTERN)
    """in rules, metrics and messages, and the name under which the log keeps what waits for it. Rename an endpoint, and
    its backlog waits under the old name, unless `renamed_from` has that: see below"""
    transport: str
    """`zenoh`, `mqtt5`, `dds`, `local`, or a plugin that is installed"""
    authorities: list[AuthorityPattern] = Field(min_length=1)
    """who lives there; `"*.vin123"` are all that end so, `"*"` is every authority that no other endpoint names (the
    fleet side of a cloud gateway). An authority has one network"""
    renamed_from: str | None = Field(default=None, pattern=NAME_PATTERN)
    """its name before: what waits under that name is carried over, in order, once, and so are its pauses"""
    suffix: Suffix | None = None
    """of an endpoint that leads off the vehicle: there our `ecu1` is `ecu1.SUFFIX`; `""` says that our names are unique
    as they are. See [names.md](names.md)"""
    usubscription: Literal["embedded", "remote", "none"] | None = None
    """`embedded`: the service of the streamer's authority runs inside. `remote`: the service of each named authority is
    asked. `none`: nobody is asked. Without it, `embedded` at home, `none` for `"*"`, `remote` elsewhere"""
    followed_by: Service | None = None
    """the history service of a gateway there (`//hub/4/1/0`) that follows ours: once it has taken over, publishes are
    not pushed to this endpoint any more, and wait for it as long as `retention_mib` bears. See
    [following.md](following.md)"""
    hold: bool = True
    """publishes at whose address nobody there listens, as far as the network can say, wait until somebody does
    (`egress.unheard_hours`); `false`: they are sent all the same, and are lost. See [delivery.md](delivery.md)"""
    messages_per_s: int | None = Field(default=None, ge=1)
    """publishes and notifications a second that leave for this network, for an endpoint that leads to a gateway which
    serves many like us: when all come back at once, it and its broker must bear the sum. A message counts once more for
    each KiB; what a second allows may leave at once, in batches of a quarter; requests and responses don't wait.
    Without it `egress.messages_per_s`. See [delivery.md](delivery.md#when-a-gateway-has-too-much-to-do)"""
    settings: dict[str, Any] = {}
    """the transport's own, see there"""


class RuleSection(Section):
    """Messages of `from` may go to `to`."""

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field(alias="from")
    """name of the endpoint where messages come in"""
    to: str
    """name of the endpoint where they may leave"""
    allow: list[TopicPattern] = []
    """patterns; of publishes and notifications the source counts, of requests and responses the method. None: all"""
    deny: list[TopicPattern] = []
    """patterns; stronger than `allow`. A denied request answers PERMISSION_DENIED"""


class AccessSection(Section):
    """Who reads what of the history. A caller reads what came from its own network and what the rules let go there,
    unless an entry names it: then what matches `allow` (none given: what it would read without the entry) and not
    `deny`; the first entry that names it counts."""

    endpoint: str | None = None
    """callers on this endpoint; without it, on any"""
    callers: list[WidePattern] = []
    """patterns of callers, by authority (`*.vin123`, too) and uEntity; their resource is 0. None: all"""
    allow: list[WidePattern] = []
    """patterns of topics that these callers read, and no other ones, whatever the rules say. None: what the rules say.
    A pattern without authority (`/FFFFFFFF/FF/FFFF`) stands for the caller's own, `//*.vin123/...` for a family"""
    deny: list[WidePattern] = []
    """patterns of topics that they don't read; stronger than `allow`. The topic is as if it weren't there"""


class FollowSection(Section):
    """A history elsewhere that this streamer follows: what is in it enters this one's log exactly once, whatever
    happens to either side or to the network between. See [following.md](following.md)."""

    endpoint: str
    """through which it is reached; its authorities live there"""
    service: ServicePattern
    """`//vehicle1/4/1/0` is the history of the gateway vehicle1; `//*/4/1/0` are those of all gateways there that
    announce themselves to us (`followed_by`), each for its own authority and the family of that"""
    topics: list[TopicPattern] = []
    """patterns of topics that are taken and kept even if nobody here wants them. What somebody wants at the time, and
    what `history.record` names, is taken in any case. This does not make the other side keep them: record them there
    (`history.record`), or subscribe to them there. `/readyz` has a note about topics that are not kept there"""
    mode: Literal["auto", "poll", "push"] = "auto"
    """how records come: pushed, polled where pushes fail; or always one of them"""


class EpochsSection(Section):
    """Topics that have epochs together: whoever reads them by epochs has all records of one, or none. They are
    recorded. See [epochs.md](epochs.md)."""

    name: str = Field(pattern=NAME_PATTERN)
    """of the group, for its readers; groups of the same name on other gateways are of the same clock"""
    topics: list[TopicPattern] = Field(min_length=1)
    """patterns; a topic is in one group"""
    by: Literal["bucket", "progress"] = "bucket"
    """`bucket`: the time in the ids of messages says which epoch each is of. `progress`: publishers open and close
    epochs"""
    width_ms: int | None = Field(default=None, ge=1, le=EPOCH_MS_MAX)
    """of a bucket"""
    lateness_ms: int = Field(default=0, ge=0, le=EPOCH_MS_MAX)
    """a bucket ends when there was a message whose id is later than its end by this much, and our clock is there"""
    ahead_ms: int = Field(default=5_000, ge=0, le=EPOCH_MS_MAX)
    """a message whose id is further ahead of our clock opens no bucket. It joins the lowest open one, which is then
    incomplete, and is counted as `ahead`"""
    timeout_ms: int = Field(default=10_000, ge=1, le=EPOCH_MS_MAX)
    """a bucket that has not ended so long after its first message ends as incomplete, and so does an epoch whose
    publisher says and sends nothing for so long. While nothing comes, readers of several gateways wait this long for
    ours, and up to 20 s more"""

    @property
    def ends(self) -> str:
        """In words, when one is over."""
        if self.by == "progress":
            return f"when it is closed, or {self.timeout_ms} ms after the last sign of its publisher"
        return (
            f"{self.width_ms} ms after it begins, and {self.lateness_ms} ms later; at the latest {self.timeout_ms} ms"
        )


class HistorySection(Section):
    """What is kept, where, and how long."""

    record: list[TopicPattern] = []
    """patterns of topics that are kept whether or not somebody subscribed"""
    volatile: list[TopicPattern] = []
    """patterns of topics that are kept in memory only: for high rates on flash that must not wear. They do not survive
    a restart"""
    retention_hours: float = Field(default=168, ge=HOURS_MIN, le=HOURS_MAX, allow_inf_nan=False)
    """older records are deleted, unless an endpoint has not had them yet"""
    retention_mib: int = Field(default=1024, ge=1, le=MIB_MAX)
    """of the durable log on disk, all its files together; stronger than every cursor. Where the disk has less, that is
    the limit: what is free there and what the log has, less the reserve"""
    reserve_mib: int | None = Field(default=None, ge=0, le=MIB_MAX)
    """of the disk of `data_dir`, kept in a file, and given up when that disk is full: then old records can be deleted,
    and it is made again. At most a quarter of the disk. Without it 32, or an eighth of a small disk. 0: none"""
    volatile_mib: int = Field(default=64, ge=8, le=MIB_MAX)  # less would not hold what is under way between networks
    """of the volatile log in memory"""
    gather_ms: float = Field(default=GATHER_MS, ge=0, le=GATHER_MS_MAX, allow_inf_nan=False)
    """for so long a message waits at most, before it is stored and sent on, for others that come in that time: then
    they share one write to the disk. Nothing waits where that brings nothing, such as for a sender that waits for each
    acknowledgement. 0: no waiting, for the lowest latency and four times the flash wear at 1,000 messages/s"""
    absent_hours: float = Field(default=168, gt=0, le=HOURS_MAX, allow_inf_nan=False)
    """for so long an endpoint that is away holds what it has not had against `retention_hours` (never against
    `retention_mib`). Counted, in all, while the streamer runs and the network is away; shown by `/readyz` when nine
    tenths are over"""

    acknowledge_after_hours: float = Field(default=24, ge=0, le=HOURS_MAX, allow_inf_nan=False)
    """a loss in a network, such as that of a session which a broker has not kept, makes its endpoint `degraded` for so
    long, over restarts, and then counts as acknowledged. 0: until a person says `up-streamer history acknowledge`.
    Damage of the log always waits for a person"""

    @property
    def absent_ms(self) -> int:
        return int(self.absent_hours * 3_600_000)

    @property
    def acknowledge_after_ms(self) -> int:
        return int(self.acknowledge_after_hours * 3_600_000)


class USubscriptionSection(Section):
    """Who is asked what somebody wants."""

    static_file: Path | None = None
    """topics and subscribers as JSON, in the format of the Rust streamer; in addition to the services"""
    answers_for: list[AuthorityPattern] | None = None
    """authorities that have no uSubscription of their own: the embedded one is theirs, too. Without it, the families
    (`*.x`) at home"""
    reset: Literal["linked", "all", "off"] = "linked"
    """what a Reset of the embedded service ends. `linked`: a uSubscription service of another authority ends what it
    shares with this one, and nothing of others. `all`: any uSubscription service ends everything, as the specification
    has it; for networks on which nobody else can speak as entity 0. `off`: nothing. What is not allowed is
    PERMISSION_DENIED. See [security.md](security.md)"""
    refresh_s: float = Field(default=60, ge=1)
    """how often a service is asked again, in seconds, though its notifications are followed"""


class EgressSection(Section):
    """How hard a peer is tried."""

    retry_min_ms: int = Field(default=50, ge=1)
    """first pause after a failed send; each further one is longer, with jitter"""
    retry_max_ms: int = Field(default=10_000, ge=1)
    """longest pause; a network that returns ends it"""
    send_ms_max: int = Field(default=SEND_MS_MAX, ge=1)
    """a transport that has not returned from sending for so long, and a second more for each 8 KiB that is under way (a
    message counts as its payload and 256 bytes), hangs: `/readyz` says so, it is closed and opened again, and what it
    has not answered is sent again. The default is more than any of ours takes: MQTT gives up when nothing moves for
    20 s, Zenoh and DDS after some seconds"""
    refused_hours: float = Field(default=HELD_HOURS, gt=0)
    """for so long at most, while the streamer runs, publishes and notifications wait whose address the network refuses
    (an access rule, a topic name that it does not allow). Retention (`retention_hours`, `retention_mib`) may end that
    sooner"""
    unheard_hours: float = Field(default=HELD_HOURS, gt=0)
    """the same for publishes at whose address nobody listens"""
    messages_per_s: int | None = Field(default=None, ge=1)
    """the same for each endpoint that has no `messages_per_s` of its own. Without both, 1000 for an endpoint with a
    `suffix`, and as fast as it goes for others"""


class ExpressSection(Section):
    """Requests and responses, in memory until they are sent or their ttl has run out."""

    messages_max: int = Field(default=4_096, ge=1)
    """requests and responses that wait for one endpoint, in bytes a 32nd of `limits.memory_mib`; beyond it
    RESOURCE_EXHAUSTED. One caller has at most a quarter of it, the callers of one authority together a half. Frames of
    histories have as much beside it, one follower a half of that"""


class LimitsSection(Section):
    """How much there may be of everything: the memory that is given, and what one message or authority may take."""

    memory_mib: int = Field(default=MEMORY_MIB, ge=32, le=MIB_MAX)
    """for topics, queues and replies, beside what an idle streamer takes; half of it is for topics. What fits:
    [security.md](security.md)"""
    message_bytes_max: int = Field(default=MESSAGE_BYTES_MAX, ge=1 << 16, le=1 << 27)
    """of a payload; announced to the network where its protocol can, counted as `too_large` elsewhere"""
    authority_messages_per_s: int = Field(default=UNITS_PER_S, ge=1)
    """what an authority that only a pattern names (a vehicle of a fleet) may send while the streamer has more to do
    than it can: 2 seconds of it may come at once, and 100 seconds of what the durable log keeps. The rest is dropped
    as `over_quota`. A message counts once more for each KiB. Authorities that an endpoint names have no such limit"""


class DispatchSection(Section):
    """Who may stop and start dispatching."""

    control: list[TopicPattern] = []
    """patterns of callers that may Pause and Resume; the command line of this machine may always"""


def _collector(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"expected the address of a collector such as http://127.0.0.1:4318, got {text!r}")
    return text


class TracingSection(Section):
    """Where the spans of traced messages go. Needs the extra `otel`."""

    otlp: Annotated[str, AfterValidator(_collector)] | None = None
    """an OpenTelemetry collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318`; spans are posted to
    `/v1/traces` below it. Without it nothing is traced"""
    share: float = Field(default=1.0, ge=0, le=1)
    """of the traces whose senders have sampled them, so many are recorded; all gateways with the same share record the
    same traces"""
    service_name: str = Field(default="up-streamer", min_length=1)
    """`service.name` of the spans; their `service.instance.id` is the authority of the streamer"""
    headers_file: Path | None = None
    """headers for the collector, such as a token: `NAME: VALUE` in each line. It is read for each batch"""
    ca_file: Path | None = None
    """certificates of the authorities that the collector's certificate may come from, PEM; without it those of the
    system"""
