"""The one TOML file: read, checked, and every mistake told with its line.

[streamer]  who we are         [[endpoint]]  networks        [[rule]]  what goes where (default: everything, both ways)
[history]   what is kept       [usubscription]  interest     [express] [egress] [limits]
[admin]     who may ask at the admin port
[[access]]  who reads what of the history, where that is not what the rules say
[[follow]]  whose history is followed
[[epochs]]  which topics have epochs together
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from history.epochs.keeper import GROUPS_MAX
from history.file.writer import GATHER_MS
from storage import logs
from streamer.egress.holds import HELD_HOURS
from streamer.egress.sends import SEND_MS_MAX
from streamer.quotas.ledger import UNITS_PER_S
from streamer.quotas.limits import MEMORY_MIB
from streamer.walk import names
from streamer.walk.access import Pattern as AccessPattern
from transports import plugin as plugins
from transports.certificates import CertificateFile
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.ids import ENTITY, VERSION
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.uri_pb2 import UUri

HOURS_MIN: Final = 0.001  # some seconds; less would delete what is under way
HOURS_MAX: Final = 876_600  # 100 years; who means "for ever" lets the bytes be the limit
GATHER_MS_MAX: Final = 100  # who waits longer for an acknowledgement believes it lost
EPOCH_MS_MAX: Final = 7 * 24 * 3_600_000  # who has epochs of a week does not wait for their end
MIB_MAX: Final = 1 << 40  # an exbibyte: beyond any disk, and far from what an integer of SQLite holds
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


def _valid(check: Callable[[str], object]) -> Callable[[str], str]:
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
    return _valid(uris.validate_authority)(text)


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


def _is_loopback(address: str) -> bool:
    """A name may be anything, but for one."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Mistake = tuple[int, str]  # the line on which it is, and what it is
Location = tuple[int | str, ...]  # of a key: ("endpoint", 1, "name") is the name of the second endpoint
Authority = Annotated[str, AfterValidator(_authority)]
AuthorityPattern = Annotated[str, AfterValidator(_authority_pattern)]
Suffix = Annotated[str, AfterValidator(_suffix)]
Pattern = Annotated[str, AfterValidator(_valid(uris.parse))]
WidePattern = Annotated[str, AfterValidator(_valid(AccessPattern.parse))]


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
    service = AccessPattern.parse(_valid(AccessPattern.parse)(text))
    if uris.is_pattern(service.authority) or service.address.ue_id >> 16:
        raise ValueError(f"expected the history service of one gateway, such as //hub/4/1/0, got {text!r}")
    return _service(text)


Service = Annotated[str, AfterValidator(_one_service)]
ServicePattern = Annotated[str, AfterValidator(_valid(AccessPattern.parse)), AfterValidator(_service)]


def patterns(texts: list[str]) -> list[UUri]:
    return [uris.parse(text) for text in texts]


class _Section(BaseModel):
    """What stands below its fields becomes the tables of docs/configuration.md (tools/config_reference.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamerSection(_Section):
    """Who this streamer is."""

    authority: Authority | None = None
    """the device that the streamer runs on: its history service is `up://AUTHORITY/4/1/...`, its dead letter topic
    `up://AUTHORITY/4/1/8001`. Without it, the first authority that an endpoint names"""
    data_dir: Path = Path("up-streamer-data")
    """log, subscriptions, dead letters, remembered interest"""
    admin: Annotated[str, AfterValidator(_host_port)] | None = None
    """`HOST:PORT` of `/metrics` (Prometheus), `/healthz`, `/readyz` and `/vehicles`; port 0 is any free one"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """what is logged, and all that is worse; the log goes to standard error"""
    log_format: Literal["text", "json"] = "text"
    """of the log: for people, or one JSON object a line, its `timestamp` in UTC with milliseconds"""


class AdminSection(_Section):
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


class EndpointSection(_Section):
    """One network and the authorities that live on it."""

    name: str = Field(pattern=NAME)
    """in rules, metrics and messages, and the name under which the log keeps what waits for it. Rename an endpoint, and
    its backlog waits under the old name: see below"""
    transport: str
    """`zenoh`, `mqtt5`, `dds`, `local`, or a plugin that is installed"""
    authorities: list[AuthorityPattern] = Field(min_length=1)
    """who lives there; `"*.vin123"` are all that end so, `"*"` is every authority that no other endpoint names (the
    fleet side of a cloud gateway). An authority has one network"""
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
    settings: dict[str, Any] = {}
    """the transport's own, see there"""


class RuleSection(_Section):
    """Messages of `from` may go to `to`."""

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field(alias="from")
    """name of the endpoint where messages come in"""
    to: str
    """name of the endpoint where they may leave"""
    allow: list[Pattern] = []
    """patterns; of publishes and notifications the source counts, of requests and responses the method. None: all"""
    deny: list[Pattern] = []
    """patterns; stronger than `allow`. A denied request answers PERMISSION_DENIED"""
    delivery: Literal["standard"] = "standard"
    """the only one so far"""


class AccessSection(_Section):
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


class FollowSection(_Section):
    """A history elsewhere that this streamer follows: what is in it enters this one's log exactly once, whatever
    happens to either side or to the network between. See [following.md](following.md)."""

    endpoint: str
    """through which it is reached; its authorities live there"""
    service: ServicePattern
    """`//vehicle1/4/1/0` is the history of the gateway vehicle1; `//*/4/1/0` are those of all gateways there that
    announce themselves to us (`followed_by`), each for its own authority and the family of that"""
    topics: list[Pattern] = []
    """patterns of what is taken and kept, though nobody here wants it. What somebody wants, as that changes, and what
    `history.record` names is taken in any case"""
    mode: Literal["auto", "poll", "push"] = "auto"
    """how records come: pushed, polled where pushes fail; or always one of them"""


class EpochsSection(_Section):
    """Topics that have epochs together: whoever reads them by epochs has all records of one, or none. They are
    recorded. See [epochs.md](epochs.md)."""

    name: str = Field(pattern=NAME)
    """of the group, for its readers; groups of the same name on other gateways are of the same clock"""
    topics: list[Pattern] = Field(min_length=1)
    """patterns; a topic is in one group"""
    by: Literal["bucket", "progress"] = "bucket"
    """`bucket`: the time in the ids of messages says which epoch each is of. `progress`: publishers open and close
    epochs"""
    width_ms: int | None = Field(default=None, ge=1, le=EPOCH_MS_MAX)
    """of a bucket"""
    lateness_ms: int = Field(default=0, ge=0, le=EPOCH_MS_MAX)
    """a bucket ends when there was a message whose id is so much later than its end"""
    ahead_ms: int = Field(default=5_000, ge=0, le=EPOCH_MS_MAX)
    """an id that is so much ahead of our clock opens no bucket: its message joins the lowest one that is open, and is
    counted"""
    timeout_ms: int = Field(default=10_000, ge=1, le=EPOCH_MS_MAX)
    """a bucket that has not ended so long after its first message ends as incomplete, and so does an epoch whose
    publisher says and sends nothing for so long"""

    @property
    def ends(self) -> str:
        """In words, when one is over."""
        if self.by == "progress":
            return f"when it is closed, or {self.timeout_ms} ms after the last sign of its publisher"
        return (
            f"{self.width_ms} ms after it begins, and {self.lateness_ms} ms later; at the latest {self.timeout_ms} ms"
        )


class HistorySection(_Section):
    """What is kept, where, and how long."""

    record: list[Pattern] = []
    """patterns of topics that are kept whether or not somebody subscribed"""
    volatile: list[Pattern] = []
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
    `retention_mib`). Counted, in all, while the streamer runs and the network is away; told by `/readyz` when nine
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


class USubscriptionSection(_Section):
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


class EgressSection(_Section):
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
    """to one endpoint, so that a vehicle that is back after days keeps below what the cloud takes of one authority
    (`limits.authority_messages_per_s`); what a second allows may leave at once, in batches of a quarter. Without it
    4000 for an endpoint with a `suffix`, and as fast as it goes for others"""


class ExpressSection(_Section):
    """Requests and responses, in memory until they are sent or their ttl has run out."""

    messages_max: int = Field(default=4_096, ge=1)
    """requests and responses that wait for one endpoint, in bytes a 32nd of `limits.memory_mib`; beyond it
    RESOURCE_EXHAUSTED. One caller has at most a quarter of it, the callers of one authority together a half. Frames of
    histories have as much beside it, one follower a half of that"""


class LimitsSection(_Section):
    """How much there may be of everything: the memory that is given, and what one message or authority may take."""

    memory_mib: int = Field(default=MEMORY_MIB, ge=32, le=MIB_MAX)
    """for topics, queues and replies, beside what an idle streamer takes; half of it is for topics. What fits:
    [security.md](security.md)"""
    message_bytes_max: int = Field(default=MESSAGE_BYTES_MAX, ge=1 << 16, le=1 << 27)
    """of a payload; told to the network where its protocol can, counted as `too_large` elsewhere"""
    authority_messages_per_s: int = Field(default=UNITS_PER_S, ge=1)
    """what an authority that only a pattern names (a vehicle of a fleet) may send in the mean of some seconds while the
    streamer has more to do than it can; the rest is dropped as `over_quota`. A message counts once more for each KiB.
    Authorities that an endpoint names have no such limit"""


class DispatchSection(_Section):
    """Who may stop and start dispatching."""

    control: list[Pattern] = []
    """patterns of callers that may Pause and Resume; the command line of this machine may always"""


class Config(_Section):
    streamer: StreamerSection = StreamerSection()
    admin: AdminSection = AdminSection()
    endpoint: list[EndpointSection] = Field(min_length=1)
    rule: list[RuleSection] = []
    access: list[AccessSection] = []
    follow: list[FollowSection] = []
    epochs: list[EpochsSection] = Field(default=[], max_length=GROUPS_MAX)
    history: HistorySection = HistorySection()
    usubscription: USubscriptionSection = USubscriptionSection()
    egress: EgressSection = EgressSection()
    express: ExpressSection = ExpressSection()
    limits: LimitsSection = LimitsSection()
    dispatch: DispatchSection = DispatchSection()

    @model_validator(mode="after")
    def _hangs_together(self) -> Self:
        """Raises what is wrong though each part is right by itself, with the key to be changed for each mistake."""
        mistakes = [*self._mistakes_of_admin(), *self._mistakes_of_endpoints(), *self._mistakes_of_rules()]
        if mistakes := [*mistakes, *self._mistakes_of_following(), *self._mistakes_of_epochs()]:
            told = "; ".join(what for what, _ in mistakes)
            raise PydanticCustomError("incoherent", "{told}", {"told": told, "mistakes": mistakes})
        return self

    def _mistakes_of_admin(self) -> Iterator[tuple[str, Location]]:
        address, guard = self.streamer.admin, self.admin
        if (guard.cert_file is None) != (guard.key_file is None):
            yield "cert_file and key_file go together", ("admin",)
        if address is None and guard.model_fields_set:
            yield "[admin] says who may ask at streamer.admin, which is not set", ("admin",)
        is_guarded = None not in (guard.cert_file, guard.token_file)
        if address is not None and not (is_guarded or guard.unprotected or _is_loopback(address)):
            what = (
                f"streamer.admin {address!r} can be reached from other machines: give [admin] cert_file, key_file and "
                "token_file, or, where the network itself keeps everybody out, unprotected = true"
            )
            yield what, ("streamer", "admin")

    def _mistakes_of_endpoints(self) -> Iterator[tuple[str, Location]]:
        names: set[str] = set()
        owners: dict[str, EndpointSection] = {}
        for index, endpoint in enumerate(self.endpoint):
            if endpoint.name in names:
                yield f"two endpoints are named {endpoint.name!r}; names must differ", ("endpoint", index, "name")
            names.add(endpoint.name)
            for authority in endpoint.authorities:
                owner = owners.setdefault(authority, endpoint)
                if owner is not endpoint:
                    both = f"{owner.name!r} and {endpoint.name!r}"
                    what = f"authority {authority!r} belongs to both endpoint {both}; one network has it"
                    yield what, ("endpoint", index, "authorities")
            if len(set(endpoint.authorities)) < len(endpoint.authorities):
                yield f"endpoint {endpoint.name!r} names an authority twice", ("endpoint", index, "authorities")
        yield from self._mistakes_of_home(list(owners))

    def _mistakes_of_home(self, authorities: list[str]) -> Iterator[tuple[str, Location]]:
        if all(map(uris.is_pattern, authorities)):
            what = "at least one endpoint must name an authority: the streamer lives there"
            yield what, ("endpoint", 0, "authorities")
        elif self.authority not in authorities:
            what = f"streamer.authority {self.authority!r} is not an authority of any endpoint"
            yield f"{what}; known are {', '.join(authorities)}", ("streamer", "authority")
        else:
            serves = f"usubscription = 'embedded' serves authority {self.authority!r}"
            for index, endpoint in enumerate(self.endpoint):
                if endpoint.usubscription == "embedded" and endpoint is not self.home:
                    what = f"{serves}, so only endpoint {self.home.name!r} can have it"
                    yield what, ("endpoint", index, "usubscription")
            yield from self._mistakes_of_names()

    def _mistakes_of_names(self) -> Iterator[tuple[str, Location]]:
        """Two names for one authority, or one name for two, would be loops and mix-ups while running."""
        inside = {authority for endpoint in self.endpoint if not endpoint.suffix for authority in endpoint.authorities}
        for index, endpoint in enumerate(self.endpoint):
            place = ("endpoint", index, "suffix")
            if endpoint.suffix and endpoint is self.home:
                owns = f"endpoint {endpoint.name!r} has the streamer's own authority {self.authority!r}"
                yield f"{owns}: a suffix is for the networks outside", place
            elif endpoint.suffix:
                for why in islice(names.mistakes(endpoint.suffix, inside, set(endpoint.authorities)), 1):
                    yield f"suffix {endpoint.suffix!r} of endpoint {endpoint.name!r}: {why}", place
        if self.usubscription.answers_for and self.usubscription_of(self.home) != "embedded":
            needs = f"usubscription.answers_for needs usubscription = 'embedded' at endpoint {self.home.name!r}"
            yield f"{needs}: nobody would answer", ("usubscription", "answers_for")

    def _mistakes_of_rules(self) -> Iterator[tuple[str, Location]]:
        names = sorted({endpoint.name for endpoint in self.endpoint})
        used: list[tuple[str, Location, str | None]] = []
        for index, rule in enumerate(self.rule):
            used += [("a rule", ("rule", index, "from"), rule.from_), ("a rule", ("rule", index, "to"), rule.to)]
            if rule.from_ == rule.to:
                yield f"a rule from {rule.from_!r} to itself would forward in a circle", ("rule", index, "to")
        used += [("access", ("access", index, "endpoint"), entry.endpoint) for index, entry in enumerate(self.access)]
        used += [("follow", ("follow", index, "endpoint"), one.endpoint) for index, one in enumerate(self.follow)]
        for who, place, name in used:
            if name not in (None, *names):
                yield f"{who} names endpoint {name!r}, which there is not; known are {', '.join(names)}", place

    def _mistakes_of_following(self) -> Iterator[tuple[str, Location]]:
        """What would be followed for nothing is a mistake, too."""
        if all(uris.is_pattern(one) for endpoint in self.endpoint for one in endpoint.authorities):
            return  # told already: nobody is us
        seen: set[tuple[str, str]] = set()
        for index, one in enumerate(self.follow):
            place = ("follow", index, "service")
            service = AccessPattern.parse(one.service)  # a publisher of our own host may have a history
            if (one.endpoint, one.service) in seen:
                yield f"{one.service} at endpoint {one.endpoint!r} is followed twice", place
            elif (service.authority, service.address.ue_id) == (self.authority, ENTITY):
                yield f"{one.service} is this streamer itself", place
            elif not self._may_be_at(service, one.endpoint):
                yield f"{one.service} can't be followed: nobody else of that name lives at {one.endpoint!r}", place
            for topic in one.topics:
                if not self._may_have(one, service, uris.parse(topic)):
                    what = f"the history {one.service} at endpoint {one.endpoint!r} never has {topic}"
                    yield what, ("follow", index, "topics")
            seen.add((one.endpoint, one.service))
        for index, endpoint in enumerate(self.endpoint):
            authority = AccessPattern.parse(endpoint.followed_by).authority if endpoint.followed_by else ""
            if authority == self.authority:
                what = f"endpoint {endpoint.name!r}: followed_by names this streamer itself"
                yield what, ("endpoint", index, "followed_by")
            elif authority and self._owner(authority) is not endpoint:
                what = f"endpoint {endpoint.name!r}: {authority!r}, which followed_by names, does not live there"
                yield what, ("endpoint", index, "followed_by")

    def _mistakes_of_epochs(self) -> Iterator[tuple[str, Location]]:
        for index, one in enumerate(self.epochs):
            at = f"epochs {one.name!r}"
            if one.by == "bucket" and one.width_ms is None:
                yield f"{at}: a bucket has a width_ms", ("epochs", index, "by")
            for key in ("width_ms", "lateness_ms", "ahead_ms") if one.by == "progress" else ():
                if key in one.model_fields_set:
                    yield f"{at}: {key} is of buckets; by progress it is the publishers who say", ("epochs", index, key)
            if one.timeout_ms <= (one.width_ms or 0) + one.lateness_ms:
                what = f"{at}: timeout_ms {one.timeout_ms} ends what goes on: it is longer than width and lateness"
                yield what, ("epochs", index, "timeout_ms")
            for topic in one.topics:
                parsed, place = uris.parse(topic), ("epochs", index, "topics")
                if parsed.resource_id < uris.RESOURCE_TOPIC_MIN:
                    yield f"{at}: {topic} can't be a topic", place
                if not parsed.authority_name:
                    yield f"{at}: {topic} names no authority, and so no topic that comes here", place
                elif parsed.authority_name != uris.WILDCARD_AUTHORITY and not self._owner(parsed.authority_name):
                    yield f"{at}: no endpoint has the authority of {topic}", place
            for other in self.epochs[:index]:
                if other.name == one.name:
                    yield f"two groups of epochs are named {one.name!r}; names must differ", ("epochs", index, "name")
                elif pairs := [(a, b) for a in one.topics for b in other.topics if _meet(a, b)]:
                    what = (
                        f"{at}: {pairs[0][0]} has topics of {other.name!r} ({pairs[0][1]}), too: each is in one group"
                    )
                    yield what, ("epochs", index, "topics")

    def _owner(self, authority: str) -> EndpointSection | None:
        """As Endpoints.owner; of a family as well."""
        named = {name: endpoint for endpoint in self.endpoint for name in endpoint.authorities}
        return next((named[one] for one in uris.owners(authority) if one in named), None)

    def _may_be_at(self, service: AccessPattern, name: str) -> bool:
        """One that is not our own; True for an endpoint that there is not, which is told already."""
        for endpoint in self.endpoint:
            if endpoint.name == name:
                there = {one for one in endpoint.authorities if uris.is_one_of(one, {service.authority})}
                if service.address.ue_id == ENTITY:
                    there.discard(self.authority)
                return bool(there) or self._owner(service.authority) is endpoint
        return True

    def _may_have(self, follow: FollowSection, service: AccessPattern, topic: UUri) -> bool:
        """Whether records of `topic` may be in what is followed, and are taken from there."""
        authority = topic.authority_name
        if authority != uris.WILDCARD_AUTHORITY:
            owner = self._owner(authority)
            if owner is None or owner.name != follow.endpoint:
                return False
        if topic.resource_id < uris.RESOURCE_TOPIC_MIN or not service.address.ue_id >> 16:
            return topic.resource_id >= uris.RESOURCE_TOPIC_MIN
        is_there = authority == uris.WILDCARD_AUTHORITY or uris.is_one_of(authority, {service.authority})
        return is_there and ids.narrowed(uris.of_authority(service.address, authority), topic) is not None

    @property
    def authority(self) -> str:
        """The streamer's own authority."""
        if self.streamer.authority is not None:
            return self.streamer.authority
        return next(a for endpoint in self.endpoint for a in endpoint.authorities if not uris.is_pattern(a))

    @property
    def answers_for(self) -> frozenset[str]:
        """Authorities beside its own for which the embedded uSubscription answers; a family at home has no other."""
        if self.usubscription_of(self.home) != "embedded":
            return frozenset()
        if self.usubscription.answers_for is not None:
            return frozenset(self.usubscription.answers_for)
        return frozenset(filter(uris.is_family, self.home.authorities))

    @property
    def home(self) -> EndpointSection:
        """The endpoint on whose network the streamer's own authority lives."""
        return next(endpoint for endpoint in self.endpoint if self.authority in endpoint.authorities)

    def usubscription_of(self, endpoint: EndpointSection) -> Literal["embedded", "remote", "none"]:
        if endpoint.usubscription is not None:
            return endpoint.usubscription
        if endpoint is self.home:
            return "embedded"
        nobody = uris.WILDCARD_AUTHORITY in endpoint.authorities or all(map(uris.is_pattern, endpoint.authorities))
        return "none" if nobody else "remote"

    @property
    def rules(self) -> list[RuleSection]:
        """As written; where none is written, every endpoint to every other."""
        if self.rule:
            return self.rule
        names = [endpoint.name for endpoint in self.endpoint]
        return [RuleSection.model_validate({"from": a, "to": b}) for a in names for b in names if a != b]


def _meet(one: str, other: str) -> bool:
    return uris.meets(uris.parse(one), uris.parse(other))


def load(path: Path) -> Config:
    """Read and check `path`, transports' settings, too. Raises UStatusError(INVALID_ARGUMENT), a line per mistake."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise invalid(f"can't read {path}: {why}") from None
    return loads(text, str(path))


def loads(text: str, name: str = "config") -> Config:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(_not_toml(text, name, str(error))) from None
    except RecursionError:
        raise invalid(f"{name}:1: this is not a configuration: its values are nested too deeply to be read") from None
    mistakes = list(_settings_mistakes(text, raw))
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        mistakes += _explain(text, error, Config)
    if mistakes:
        raise invalid("\n".join(f"{name}:{line}: {what}" for line, what in sorted(set(mistakes))))
    return config


def _not_toml(text: str, name: str, said: str) -> str:
    """tomllib tells the line in words only: "(at line 3, column 7)", or "(at end of document)"."""
    at = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)$", said)
    line = int(at[1]) if at and at[1] else text.count("\n") + 1
    return f"{name}:{line}: this is not valid TOML: {said}"


def _settings_mistakes(text: str, raw: dict[str, Any]) -> Iterator[Mistake]:
    """What the transports say of their settings; sections of another shape are told of elsewhere."""
    endpoints = raw.get("endpoint")
    for index, endpoint in enumerate(endpoints if isinstance(endpoints, list) else []):
        match endpoint:
            case {"transport": str(transport)} if isinstance(settings := endpoint.get("settings", {}), dict):
                try:
                    plugins.configure(transport, settings)
                except UStatusError as error:
                    line = line_of(text, ("endpoint", index, "transport"))
                    yield line, f"endpoint {endpoint.get('name')!r}: {error.message}"
                except ValidationError as error:
                    model = plugins.load(transport).config
                    yield from _explain(text, error, model, ("endpoint", index, "settings"))


def _explain(text: str, mistakes: ValidationError, model: type[BaseModel], within: Location = ()) -> Iterator[Mistake]:
    """Line, and `where: what`, of each mistake that `model` has found in what is `within` that table."""
    for error in mistakes.errors(include_url=False):
        location = (*within, *error["loc"])
        where = ".".join(str(part) for part in location)
        if error["type"] == "incoherent":
            yield from ((line_of(text, at), what) for what, at in error["ctx"]["mistakes"])
            continue
        if error["type"] == "extra_forbidden":
            what = f"unknown key {location[-1]!r}{plugins.did_you_mean(model, error['loc'])}"
        else:
            what = error["msg"].removeprefix("Value error, ")
            if isinstance(error["input"], str | int | float | bool) and not logs.is_secret(where):
                what += f" (got {error['input']!r})"
        yield line_of(text, location), f"{where + ': ' if where else ''}{what}"


def line_of(text: str, location: Location) -> int:
    """The line on which `location` is written, or the nearest line above it that is; tomllib itself keeps no lines."""
    best, best_depth = 1, 0
    table: Location = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line):
            parts = [part.strip().strip("\"'") for part in header[2].split(".")]
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
                table = (*parts, counts[header[2]])
            else:
                table = tuple(p for part in parts for p in ((part, counts[part]) if part in counts else (part,)))
            here = table
        elif entry := re.match(r"\s*([A-Za-z0-9_\-\"'.]+)\s*=", line):
            here = (*table, *(part.strip("\"'") for part in entry[1].split(".")))
        else:
            continue
        depth = min(len(here), len(location))  # one [[rule]] is a part of ("rule",)
        if here[:depth] == location[:depth] and depth > best_depth:
            best, best_depth = number, depth
    return best
