"""The page of the admin port on a running gateway: what it shows is what the gateway does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamer.config import AdminSection
from tests.edge.chromium import Chromium
from tests.tiers import full
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = full

MakeWorld = Any
Publish = Callable[..., UMessage]
SPEED = "up://vehicle1/8001/1/8001"
APP = "up://cloud/9001/1/0"


async def test_it_shows_and_changes_what_a_gateway_does(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    world = await make_world(subscriptions={SPEED[3:]: [APP[3:]]}, start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section, "admin": AdminSection(token_file=token)})
    await world.start()
    streamer = world.streamer
    vehicle = await world.node("vehicle", "vehicle1")
    await vehicle.send(publish(SPEED, "hello <b>"))
    await world.until(lambda: streamer.assembly.logs.durable.newest_seq >= 1)
    streamer.assembly.dead_letters.add(publish(SPEED, "lost"), UCode.NOT_FOUND, "nobody is there", "cloud")

    async with Chromium(tmp_path / "browser") as browser:

        async def says(selector: str, text: str) -> None:
            await browser.until(f"(document.querySelector('{selector}')?.textContent ?? '').includes('{text}')")

        await browser.open(f"http://127.0.0.1:{streamer.admin.port}/")
        await says("#token-why", "to those who have its token")
        await browser.evaluate(
            "document.getElementById('token').value = 'secret'; document.querySelector('#token-form button').click()"
        )
        await browser.until("document.querySelectorAll('#endpoints tbody tr').length === 3")
        await says("h1", "vehicle1")
        await says("#drawing", "cloud")
        await says("#facts", "The durable log")

        await browser.evaluate("location.hash = 'topics'")
        await says("#subscriptions", SPEED)
        await says("#subscriptions", APP)
        await browser.evaluate("document.querySelector('#subscriptions button.link').click()")
        await says("#messages pre", "hello <b>")
        await browser.evaluate(
            f"document.getElementById('pause-topic').value = '{SPEED}';"
            "document.getElementById('pause-peer').value = 'cloud';"
            "document.querySelector('#pause-form button').click()"
        )
        await browser.until("document.getElementById('confirm').open")
        await browser.evaluate("document.getElementById('confirm-do').click()")
        await says("#topics-paused", f"{SPEED} toward cloud")
        assert [(one.topic, one.peer) for one in streamer.assembly.paused] == [(SPEED, "cloud")]
        await browser.evaluate("document.querySelector('#topics-paused button').click()")
        await browser.until("document.getElementById('confirm').open")
        await browser.evaluate("document.getElementById('confirm-do').click()")
        await world.until(lambda: not [*streamer.assembly.paused])

        await browser.evaluate("location.hash = 'letters'")
        await says("#letters", "nobody is there")
        for action, trial in (("resend", "1 "), ("purge", "1 purged")):
            await browser.evaluate(f"document.getElementById('letters-{action}').click()")
            await browser.until("document.getElementById('confirm').open")
            await says("#confirm-text", f"A trial says: {trial}")
            if action == "purge":
                await browser.evaluate("document.getElementById('confirm-do').click()")
            else:
                await browser.evaluate("document.getElementById('confirm').close()")
                await browser.until("document.getElementById('letters-resend').ariaBusy !== 'true'")
        await says("#letters-said", "Purge: 1 purged.")
        assert streamer.assembly.dead_letters.stock.letters == 0

        await world.stop()
        await says("#silence", "No answer since")
