"""Why a broker is away, and short connections: the reasons that the transport reports, and its retry intervals."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.broker import Broker
from transports.conformance import TcpProxy
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider

MakeBroker = Callable[..., Broker]
DEADLINE_S = 30
NAMED = {"client_id": "gateway", "session_expiry_s": 3_600}


def end(port: int, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=port, **settings), LocalUriProvider("sender", 0x10AB, 3))


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.005)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the attempts that were waited for; the waits are short, and grow."""
    seen: list[int] = []

    def wait_ms(attempt: int, _chance: float) -> float:
        seen.append(attempt)
        return 5.0 * attempt

    monkeypatch.setattr(link, "reconnect_wait_ms", wait_ms)
    return seen


@pytest.mark.broker
async def test_two_clients_with_one_client_id_are_named_and_take_over_ever_more_rarely(
    make_broker: MakeBroker, attempts: list[int]
) -> None:
    broker = make_broker()
    async with end(broker.port, **NAMED) as one, end(broker.port, **NAMED) as other:
        await until(lambda: len(attempts) >= 10)
        assert max(attempts) >= 5
        for number in range(1, max(attempts) + 1):
            assert attempts.count(number) <= 2, "no connection had lasted, so neither begins anew"
        await until(lambda: one.troubles and other.troubles)
        for trouble in (*one.troubles, *other.troubles):
            assert "does another gateway use the client_id 'gateway'?" in trouble


async def test_a_broker_that_says_that_the_session_was_taken_over_is_believed_at_once() -> None:
    """mosquitto only hangs up; others send DISCONNECT 0x8E first."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_024)
        writer.write(b"\x20\x03\x00\x00\x00" + b"\xe0\x02\x8e\x00")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    one = end(server.sockets[0].getsockname()[1], **NAMED)
    with contextlib.suppress(UStatusError):
        await one.open()
    (trouble,) = one.troubles
    assert "another client logs in" in trouble
    assert "client_id 'gateway'" in trouble
    await one.close()
    server.close()


@pytest.mark.broker
async def test_a_trouble_with_connections_ends_when_one_has_lasted(
    make_broker: MakeBroker, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker()
    async with end(broker.port, **NAMED) as one:
        async with end(broker.port, **NAMED):
            await until(lambda: one.troubles)
        await until(lambda: one.connected)
        assert one.troubles
        monkeypatch.setattr(link, "STEADY_S", 0.0)
        assert one.troubles == []
        attempts.clear()
        async with end(broker.port, **NAMED):
            await until(lambda: len(attempts) >= 4)
        assert set(attempts) == {1}, "each connection counts as sound, so the waits begin anew"


@pytest.mark.broker
@pytest.mark.parametrize("named", [True, False])
async def test_connections_that_are_lost_at_once_raise_the_question(
    make_broker: MakeBroker, attempts: list[int], *, named: bool
) -> None:
    """Without a client_id of the settings it is made up, and nobody else can have it."""
    broker = make_broker()
    proxy = TcpProxy(broker.host, broker.port)
    await proxy.start()
    async with end(proxy.port, **(NAMED if named else {})) as one:
        for number in range(1, link.BRIEF_MAX + 1):
            await until(lambda: one.connected)
            assert one.troubles == []
            proxy.cut()
            await until(lambda: not one.connected)
            assert bool(one.troubles) is (number == link.BRIEF_MAX)
            proxy.mend()
        (trouble,) = one.troubles
        assert f"{link.BRIEF_MAX} in a row were lost within {link.BRIEF_S:.0f} s" in trouble
        assert ("does another gateway use the client_id 'gateway'?" in trouble) is named
    await proxy.stop()


@pytest.mark.broker
async def test_the_reason_of_being_away_is_what_the_last_attempt_was_answered(
    make_broker: MakeBroker, attempts: list[int]
) -> None:
    broker = make_broker(users={"gateway": "right", "other": "right"})
    async with end(broker.port, username="gateway", password="right") as one:
        assert one.away_because == ""
        broker.stop()
        await until(lambda: "no connection to the broker" in one.away_because)
        assert str(broker.port) in one.away_because
        one._link._config = one._link._config.model_copy(update={"username": "nobody"})
        broker.start()
        await until(lambda: "refuses the login" in one.away_because)
        assert not one.connected
        one._link._config = one._link._config.model_copy(update={"username": "gateway"})
        await until(lambda: one.connected)
        assert one.away_because == ""


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """A directory with a certificate for 127.0.0.1 that was valid for one day of 2020, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, and it makes the certificate of this test")
    (tmp_path / "settings").write_text(
        "[ca]\ndefault_ca=own\n[own]\nnew_certs_dir=.\ndatabase=index\nserial=serial\ndefault_md=sha256\n"
        "policy=any\nx509_extensions=names\n[any]\ncommonName=supplied\n[names]\nsubjectAltName=IP:127.0.0.1\n"
        "[req]\ndistinguished_name=any\n"
    )
    (tmp_path / "index").touch()
    (tmp_path / "serial").write_text("01\n")
    new = "req -config settings -newkey rsa:2048 -nodes -subj /CN=broker -keyout key.pem -out request.pem"
    sign = "ca -config settings -batch -selfsign -keyfile key.pem -in request.pem -out certificate.pem -notext"
    for command in (new, f"{sign} -startdate 20200101000000Z -enddate 20200102000000Z"):
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


async def test_an_expired_certificate_is_named(expired: Path, attempts: list[int]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(expired / "certificate.pem", expired / "key.pem")

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    one = end(server.sockets[0].getsockname()[1], tls={"ca_file": expired / "certificate.pem"})
    with pytest.raises(UStatusError, match="certificate has expired"):
        await one.open()
    with pytest.raises(UStatusError):
        await one._link._connect()  # as after a loss
    assert "certificate has expired" in one.away_because
    server.close()
