"""The settings of a DDS transport, and the Cyclone configuration that is made of them.

DdsConfig (checked when it is read) -> configuration(): may block, so off the event loop -> Cyclone's XML
                                       resolves names, looks for the interface                  |
                                       trial() tests one that the user wrote                    v
                                                                                           a child process that may die

Cyclone ends the process (SIGABRT, SIGSEGV) at addresses that it can't use, and writes the reason of a refusal only to
its stderr. So it gets only what it accepts, and our error repeats its reason.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final, Self
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from pydantic import Field, field_validator, model_validator

from transports.arrivals import MESSAGES_MAX
from transports.base import TransportSettings
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

WRITERS_MAX: Final = 4_096  # of one transport, some 10 KB each; one per (source, sink, priority) in use
SEND_TIMEOUT_MS: Final = 2_000  # a receiver that takes nothing for so long is stuck, not slow
# discovery that found nothing new for so long is complete: on one host it takes 1 to 40 ms
DISCOVERY_QUIET_MS: Final = 100
# Cyclone's default: a shorter pause loses nothing; a receiver that was killed blocks its topics for so long
PARTICIPANT_LEASE_MS: Final = 10_000
# participants announce themselves several times per lease; with a shorter one a busy computer loses them
PARTICIPANT_LEASE_MS_MIN: Final = 200
PARTICIPANT_LEASE_MS_MAX: Final = 3_600_000  # a participant does not come back after a longer time
# limits of the interval between announcements, half a lease: they let others find a lost participant again. Cyclone's
# own interval is 30 s
ANNOUNCED_MS_MIN: Final = 250
ANNOUNCED_MS_MAX: Final = 10_000
# a writer asks its readers so often what they have received, until they answer, and each time longer after the fifth
# time; its messages are answered then. Cyclone's own 100 ms would cost as much for a caller that awaits each message
HEARTBEAT_US: Final = 200
PEERS_MAX: Final = 256  # each gets a packet for every index, several times a second during discovery
ADDRESSES_PER_PEER_MAX: Final = 8  # of a name that stands for many hosts
TAG_CHARS_MAX: Final = 255  # Cyclone crashes at a very long one (70,000)
TRIAL_S: Final = 20.0  # a child process needs 0.2 s; an overloaded computer more

_HEARTBEAT: Final = (
    f'<Internal><HeartbeatInterval min="{HEARTBEAT_US} us" minsched="{HEARTBEAT_US} us" max="8 s">{HEARTBEAT_US} us'
    "</HeartbeatInterval></Internal>"
)
# what counts unless the user's own configuration says something else: Cyclone reads several, and the last one wins
_BEFORE_USERS_OWN: Final = f"<CycloneDDS><Domain>{_HEARTBEAT}</Domain></CycloneDDS>,"
_PEER: Final = re.compile(
    r"(?P<host>[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\.?)(:(?P<port>[0-9]{1,5}))?", re.ASCII
)
_TRIAL: Final = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.core import DDSException
domain_id, configuration = int(sys.argv[1]), sys.stdin.read()
try:
    domain = Domain(domain_id, configuration)
    participant = DomainParticipant(domain_id)
except DDSException as error:
    sys.exit(str(error))
"""


class DdsConfig(TransportSettings):
    """The domain and its network. Without any option Cyclone decides, by CYCLONEDDS_URI if that is set, or who has
    joined the domain in this process before."""

    domain_id: int = Field(default=0, ge=0, le=230)
    """participants of different domains never meet"""
    interface: str | None = None
    """network interface by name, as in `ip link`: `lo` for this host only. Without it Cyclone chooses"""
    multicast: bool | None = None
    """false: discovery asks only the peers, by unicast. Without it Cyclone uses multicast if the interface can"""
    peers: tuple[str, ...] = Field(default=(), max_length=PEERS_MAX)
    """hosts that discovery asks directly: names or IPv4 addresses, or `HOST:PORT`; 256 at most"""
    participants_per_host_max: int = Field(default=32, ge=1, le=119)
    """without multicast: participants looked for on each peer"""
    tag: str | None = Field(default=None, min_length=1, max_length=TAG_CHARS_MAX)
    """only participants with the same tag find one another"""
    lease_ms: int | None = Field(default=None, ge=PARTICIPANT_LEASE_MS_MIN, le=PARTICIPANT_LEASE_MS_MAX)
    """after so long without a sign of us others forget us; a shorter pause loses nothing. Without it 10000, Cyclone's
    default"""
    cyclone_xml: str | None = None
    """a whole Cyclone configuration, instead of the options above"""
    cyclone_file: Path | None = None
    """a file with a whole Cyclone configuration, instead of the options above"""
    discovery_quiet_ms: int = Field(default=DISCOVERY_QUIET_MS, ge=1)
    """opening ends when discovery has found nothing new for so long"""
    send_timeout_ms: int = Field(default=SEND_TIMEOUT_MS, ge=1)
    """how long a receiver that takes nothing may block a sender; then UNAVAILABLE"""
    writers_max: int = Field(default=WRITERS_MAX, ge=1)
    """DDS writers at a time; a new one then replaces the least recently used one"""
    inbox_messages_max: int = Field(default=MESSAGES_MAX, ge=1)
    """messages between the network and the listeners"""

    @field_validator("peers")
    @classmethod
    def _peers_can_be_asked(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            _host_and_port(peer)
        return peers

    @field_validator("interface")
    @classmethod
    def _interface_has_a_name(cls, interface: str | None) -> str | None:
        if interface is not None and (not interface or interface.split() != [interface] or not interface.isascii()):
            raise ValueError(f"an interface is named as in `ip link`, without spaces, got {interface!r}")
        return interface

    @field_validator("tag")
    @classmethod
    def _tag_is_text(cls, tag: str | None) -> str | None:
        if tag is not None and not (tag.isascii() and tag.isprintable()):
            raise ValueError("a tag has printable ASCII characters only")
        return tag

    @field_validator("cyclone_xml")
    @classmethod
    def _xml_is_whole(cls, xml: str | None) -> str | None:
        return xml if xml is None else _plain(xml)

    @model_validator(mode="after")
    def _one_configuration(self) -> Self:
        whole = [name for name in ("cyclone_xml", "cyclone_file") if getattr(self, name) is not None]
        others = [*whole[1:], *self._options()]
        if whole and others:
            raise ValueError(f"{whole[0]} is a whole configuration and can't be combined with {', '.join(others)}")
        if self.multicast is False and not self.peers:
            raise ValueError("without multicast discovery needs peers: name at least one host, such as 127.0.0.1")
        return self

    @property
    def is_default(self) -> bool:
        """True if no option says how to join the domain."""
        return self.cyclone_xml is None and self.cyclone_file is None and not self._options()

    @property
    def _environment(self) -> str:
        """Cyclone's configuration in CYCLONEDDS_URI, which counts where no option is set; else ""."""
        return os.environ.get("CYCLONEDDS_URI", "") if self.is_default else ""

    @property
    def is_users_own(self) -> bool:
        """True if the user wrote Cyclone's configuration, so that it must be tried; else it is made of the options."""
        return self.cyclone_xml is not None or self.cyclone_file is not None or bool(self._environment)

    def configuration_key(self) -> str:
        """Equal for equal configurations, whose users share a domain. Names of peers are not resolved."""
        if self.cyclone_xml is not None:
            return self.cyclone_xml
        if self.cyclone_file is not None:
            return str(self.cyclone_file.absolute())
        return self._environment or self.xml(list(self.peers))

    def configuration(self) -> str:
        """What Cyclone gets: XML, or several documents and files separated by commas. May block, to read a file and to
        resolve names.

        Raises UStatusError(UNAVAILABLE) if a file, an interface or the address of a peer is missing, which may exist
        later.
        """
        if self.cyclone_xml is not None:
            return _BEFORE_USERS_OWN + self.cyclone_xml
        if self.cyclone_file is not None:
            return _BEFORE_USERS_OWN + _read(self.cyclone_file)
        if self._environment:
            return _BEFORE_USERS_OWN + self._environment
        if self.interface is not None:
            names = sorted(name for _, name in socket.if_nameindex())
            if self.interface not in names:
                raise UStatusError(
                    UCode.UNAVAILABLE, f"no network interface {self.interface!r} now; known: {', '.join(names)}"
                )
        return self.xml([address for peer in self.peers for address in _addresses(peer)])

    def _options(self) -> list[str]:
        """The options that are set and become Cyclone's configuration."""
        names = [name for name in ("interface", "multicast", "tag", "lease_ms") if getattr(self, name) is not None]
        return [*names, "peers"] if self.peers else names

    def xml(self, addresses: list[str]) -> str:
        """The options as Cyclone's XML, with these addresses for the peers."""
        general, discovery = "", ""
        if self.interface is not None:
            multicast = "" if self.multicast is None else f' multicast="{str(self.multicast).lower()}"'
            general += f"<Interfaces><NetworkInterface name={quoteattr(self.interface)}{multicast}/></Interfaces>"
        if self.multicast is not None:
            general += f"<AllowMulticast>{str(self.multicast).lower()}</AllowMulticast>"
        if self.tag is not None:
            discovery += f"<Tag>{escape(self.tag)}</Tag>"
        if self.multicast is False:
            discovery += "<ParticipantIndex>auto</ParticipantIndex>"
            discovery += f"<MaxAutoParticipantIndex>{self.participants_per_host_max}</MaxAutoParticipantIndex>"
        if self.lease_ms is not None:
            discovery += f"<LeaseDuration>{self.lease_ms} ms</LeaseDuration>"
        again_ms = min(max((self.lease_ms or PARTICIPANT_LEASE_MS) // 2, ANNOUNCED_MS_MIN), ANNOUNCED_MS_MAX)
        discovery += f"<SPDPInterval>{again_ms} ms</SPDPInterval>"
        if addresses:
            discovery += f"<Peers>{''.join(f'<Peer address={quoteattr(address)}/>' for address in addresses)}</Peers>"
        return (
            f"<CycloneDDS><Domain><General>{general}</General><Discovery>{discovery}</Discovery>"
            f"{_HEARTBEAT}</Domain></CycloneDDS>"
        )


def _host_and_port(peer: str) -> tuple[str, str | None]:
    """Raises ValueError, with a text for the author of the configuration."""
    match = _PEER.fullmatch(peer)
    if match is None:
        raise ValueError(
            f"a peer is a host name or an IPv4 address, optionally with a port (HOST:PORT), got {peer!r}; IPv6 is not "
            "supported"
        )
    host, port = match["host"], match["port"]
    if port is not None and not 0 < int(port) < 65_536:
        raise ValueError(f"the port of the peer {peer!r} is not between 1 and 65535")
    if re.fullmatch(r"[0-9.]+", host) or host.lower().startswith("0x"):
        # raises ValueError; Cyclone takes "1" as 0.0.0.1 and crashes at 256.1.1.1
        address = ipaddress.IPv4Address(host)
        if not _is_usable(address):
            raise ValueError(f"the peer {peer!r} is not the address of a host")
    return host, port


def _is_usable(address: ipaddress.IPv4Address) -> bool:
    return (
        int(address) >> 24 != 0 and not address.is_reserved
    )  # Cyclone crashes at 0.0.0.0; multicast groups are allowed


def _addresses(peer: str) -> list[str]:
    """The current addresses of `peer`, in Cyclone's form. Raises UStatusError(UNAVAILABLE) if it has none."""
    host, port = _host_and_port(peer)
    try:
        entries = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UStatusError(UCode.UNAVAILABLE, f"the DDS peer {peer!r} has no IPv4 address now: {error}") from error
    addresses = list(
        dict.fromkeys(str(entry[4][0]) for entry in entries if _is_usable(ipaddress.IPv4Address(entry[4][0])))
    )
    if not addresses:
        raise UStatusError(UCode.UNAVAILABLE, f"the DDS peer {peer!r} has no address of a host")
    return [address if port is None else f"{address}:{int(port)}" for address in addresses[:ADDRESSES_PER_PEER_MAX]]


def _plain(xml: str) -> str:
    """`xml`, checked. Raises ValueError if it is not ASCII, which the binding needs, or not well-formed."""
    if not xml.isascii():
        raise ValueError("a Cyclone configuration is plain ASCII")
    try:
        ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"expected a Cyclone configuration in XML: {error}") from error
    return xml


def _read(file: Path) -> str:
    """Cyclone itself can't read a file with a space in its name."""
    try:
        return _plain(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UStatusError(UCode.UNAVAILABLE, f"the Cyclone configuration {file} can't be used now: {error}") from error


def trial(domain_id: int, configuration: str) -> str:
    """Let another process join the domain. Returns Cyclone's error; "" if it could join. Blocks for some 0.2 s."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _TRIAL, str(domain_id)]
    try:
        done = subprocess.run(
            command,
            input=configuration,
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the trial process failed: {error}"
    if done.returncode == 0:
        return ""
    reported = [re.sub(r"^[0-9.]+ \[[0-9]*\] +[^:]*: ", "", line) for line in done.stderr.strip().splitlines()]
    end = f"ended by signal {-done.returncode}" if done.returncode < 0 else ""
    return "; ".join([*reported[-4:], *([end] if end else [])]) or "no reason was given"
