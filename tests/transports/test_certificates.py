"""Certificates: loaded again after a renewal, reported before they expire, and checked."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamer.part import Parts
from streamer.parts.certificates import CertificatePart
from tests.certificates import DAY, TestAuthority
from tests.conftest import MakeBroker
from tools.broker import Broker
from transports.certificates import CertificateFile, TlsFiles, expires_s, mistake
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


# MQTT


class Connection:
    """The reports of a transport about its connection, to be awaited."""

    def __init__(self, transport: Mqtt5Transport) -> None:
        self._changed = asyncio.Event()
        self._transport = transport
        transport.on_connection(lambda _: self._changed.set())

    async def until(self, connected: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self._transport.connected is not connected:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def broker(make_broker: MakeBroker, authority: TestAuthority) -> Broker:
    """It demands a certificate of `authority`."""
    certificates = (authority.ca, *authority.issue("broker"))
    return make_broker(certificates=certificates, require_client_certificate=True)


def end(broker: Broker, authority: TestAuthority) -> Mqtt5Transport:
    files = {"cert_file": authority.folder / "client.pem", "key_file": authority.folder / "client.key"}
    settings: dict[str, Any] = {"port": broker.port, "client_id": "it", "tls": {"ca_file": authority.ca, **files}}
    return Mqtt5Transport(Mqtt5Config(**settings), LocalUriProvider("sender", 0x10AB, 3))


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The link connects again after some milliseconds; set when that was refused."""
    refused = asyncio.Event()
    real = link.Link._connect

    async def connect(self: link.Link) -> Any:
        try:
            return await real(self)
        except UStatusError:
            refused.set()
            raise

    monkeypatch.setattr(link.Link, "_connect", connect)
    monkeypatch.setattr(link, "RECONNECT_MS", (20,))
    return refused


async def test_a_renewed_client_certificate_is_used_at_the_next_connect(
    broker: Broker, authority: TestAuthority, refusals: asyncio.Event
) -> None:
    authority.issue("client")
    async with end(broker, authority) as transport:
        connection = Connection(transport)
        authority.issue("client", -DAY)
        transport._link.drop("the test says so")
        await asyncio.wait_for(refusals.wait(), DEADLINE_S)  # it has expired, and was read
        authority.issue("client")
        await connection.until(True)
        await transport.send(UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"1", 6)))


@pytest.mark.parametrize("written", ["half of the certificate", "the certificate and not its key"])
async def test_a_pair_that_can_not_be_loaded_keeps_the_last_one(
    broker: Broker, authority: TestAuthority, refusals: asyncio.Event, written: str
) -> None:
    certificate, _ = authority.issue("client")
    new = authority.issue("other")[0].read_bytes()
    async with end(broker, authority) as transport:
        connection = Connection(transport)

        async def connect_again() -> None:
            transport._link.drop("the test says so")
            await connection.until(False)
            await connection.until(True)

        certificate.write_bytes(new[: len(new) // 2] if written.startswith("half") else new)
        with capture_logs() as logs:
            await connect_again()
        assert not refusals.is_set(), "the last pair is good"
        (trouble,) = transport.troubles
        assert "stays in use" in trouble
        assert str(certificate) in trouble
        assert [one for one in logs if one["event"] == "changed files can't be used yet"]
        authority.issue("client")
        await connect_again()
        assert transport.troubles == []


async def test_a_link_that_has_never_had_a_certificate_says_what_is_wrong(
    broker: Broker, authority: TestAuthority
) -> None:
    authority.issue("client")[0].write_text("")
    with pytest.raises(UStatusError, match=r"client\.pem") as refused:
        await end(broker, authority).open()
    assert refused.value.code == UCode.FAILED_PRECONDITION


# Any


def test_files_are_read_again_only_after_a_change(authority: TestAuthority) -> None:
    pair, made = authority.issue("it"), []

    def make() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return made[-1]

    files = TlsFiles(pair, make)
    assert files.current() is files.current() is made[0]
    authority.issue("it")
    assert files.current() is files.current() is made[1]
    assert len(made) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("expired", "has expired at"),
        ("other key", "belongs to another key than"),
        ("no key", "can't be used"),
        ("nothing", "no certificate in PEM form"),
        ("not there", "No such file"),
        ("leaf as CA", "no certificate of a CA"),
        ("good", ""),
        ("good CA", ""),
        ("self-signed CA", ""),
    ],
)
def test_what_is_wrong_with_a_file(authority: TestAuthority, content: str, words: str) -> None:
    certificate, key = authority.issue("it", -DAY if content == "expired" else DAY)
    match content:
        case "other key":
            key = authority.issue("other")[1]
        case "no key":
            key.write_text("{}")
        case "nothing":
            certificate.write_text("{}")
        case "not there":
            certificate.unlink()
    path = authority.ca if "CA" in content and content != "leaf as CA" else certificate
    is_ca = "CA" in content
    said = mistake(CertificateFile("tls.cert_file", path, None if is_ca else key, is_ca), time.time())
    assert words in said
    assert bool(words) == bool(said)


def test_a_chain_ends_with_its_first_and_a_bundle_of_cas_with_its_last(authority: TestAuthority) -> None:
    short = authority.issue("short", DAY)[0]
    long = authority.issue("long", 3 * DAY)[0]
    both = authority.folder / "both.pem"
    both.write_bytes(long.read_bytes() + short.read_bytes())
    ends = [expires_s(CertificateFile("x", path)) for path in (short, long)]
    assert expires_s(CertificateFile("x", both)) == ends[0]
    assert expires_s(CertificateFile("x", both, is_ca=True)) == ends[1]


def test_an_odd_certificate_of_a_bundle_hides_no_other(authority: TestAuthority) -> None:
    odd = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    authority.ca.write_bytes(odd + authority.ca.read_bytes() + odd)
    assert mistake(CertificateFile("tls.ca_file", authority.ca, is_ca=True), time.time()) == ""


async def test_a_certificate_is_reported_14_days_before_it_expires(authority: TestAuthority) -> None:
    path, _ = authority.issue("it", 20 * DAY)
    clock_ms = int(time.time() * 1000)
    none = SimpleNamespace(certificate_files=())
    config = SimpleNamespace(admin=none, http=none, endpoint=[], streamer=SimpleNamespace(admin=None))
    assembly: Any = SimpleNamespace(config=config, runtime=SimpleNamespace(now_ms=lambda: clock_ms))
    expiries = CertificatePart(assembly, Parts(assembly, []))
    expiries.add("cloud", [CertificateFile("tls.cert_file", path)])

    async def look() -> tuple[list[str], list[str]]:
        """The notes, and what is logged."""
        with capture_logs() as logs:
            await expiries.look()
        return expiries.notes(), [one["log_level"] for one in logs]

    assert expiries.notes() == [], "before the first look"
    assert await look() == ([], [])
    ((endpoint, setting, ends),) = expiries
    assert (endpoint, setting) == ("cloud", "tls.cert_file")
    assert ends == pytest.approx(time.time() + 20 * 86_400, abs=120)
    clock_ms += 7 * 86_400_000
    (note,), levels = await look()
    assert note.startswith(f"endpoint cloud: tls.cert_file {path} expires in 13 days, at ")
    assert levels == ["warning"]
    assert (await look())[1] == [], "once"
    clock_ms += 14 * 86_400_000
    (note,), levels = await look()
    assert "has expired at" in note
    assert levels == ["warning"]
    path.write_text("{}")
    (note,), levels = await look()
    assert "no certificate in PEM form" in note
    assert levels == ["warning"]
    assert not list(expiries)
    authority.issue("it", 40 * DAY)
    assert await look() == ([], ["info"])
