"""The page of the admin port in a real browser: each screen, narrow and wide, light and dark, by keyboard, with a token
that is wrong or withdrawn, over a restart, with hostile text, and with very much of everything.

PAGE_PICTURES=FOLDER saves pictures of every screen there. Those of the documentation are made by
PAGE_PICTURES=docs/pictures pytest tests/operating/test_page.py -k documentation
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.edge.chromium import Chromium
from tests.operating import fake_gateway as fakes
from tests.operating.fake_gateway import TOKEN, FakeGateway
from tests.tiers import full

pytestmark = full

WIDTHS = {360: 740, 1600: 1000}
PICTURE_BYTES_MIN = 10_000  # a blank page makes fewer; how many more depends on the fonts of the machine
SCREENS = ("status", "letters", "topics")
LONGEST_TASK_MS = 2_000  # of the browser, with hundreds of endpoints, on a busy machine
# what must not happen in the page, and the timers that it has
WATCH = """
    window.wrong = []; window.timers = new Map(); window.longest = 0;
    addEventListener('error', event => wrong.push(String(event.message)));
    addEventListener('unhandledrejection', event => wrong.push(String(event.reason)));
    addEventListener('securitypolicyviolation', event => wrong.push(`policy: ${event.violatedDirective}`));
    const set = window.setTimeout, clear = window.clearTimeout;
    window.setTimeout = (work, ms) => {
      const id = set(() => { timers.delete(id); work(); }, ms);
      timers.set(id, ms);
      return id;
    };
    window.clearTimeout = id => { timers.delete(id); clear(id); };
    new PerformanceObserver(list => { for (const one of list.getEntries()) longest = Math.max(longest, one.duration); })
      .observe({entryTypes: ['longtask']});
"""
# of all text that is visible: its contrast with what is behind it
CONTRAST = """(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const parts = colour => {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      return canvas.getImageData(0, 0, 1, 1).data;
    };
    const linear = part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const apart = 'svg, datalist, noscript, option, :disabled, .unseen, .skip';
    const weak = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const one = node.parentElement;
      if (!node.data.trim() || !one.checkVisibility() || one.closest(apart)) continue;
      let behind = one;
      while (behind && parts(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
      const back = getComputedStyle(behind ?? document.body).backgroundColor;
      const both = [getComputedStyle(one).color, back].map(colour => light(parts(colour)) + 0.05);
      const contrast = Math.max(...both) / Math.min(...both);
      if (contrast < 4.5) weak.push(`${node.data.trim().slice(0, 30)}: ${contrast.toFixed(1)}`);
    }
    return weak;
})()"""
FOCUSED = """(() => {
    const one = document.activeElement, style = getComputedStyle(one), place = one.getBoundingClientRect();
    if (one === document.body) return 'the end';
    if (style.outlineStyle === 'none' || place.width < 2 || place.right < 0) return `not seen: ${one.outerHTML}`;
    return one.id || one.getAttribute('href') || one.getAttribute('aria-label') || one.innerText;
})()"""
OVERLAP = """(() => {
    const all = [...document.querySelectorAll('text.rate')].map(one => one.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
    return all.some((a, index) => all.slice(index + 1).some(b => meet(a, b)));
})()"""
DASHES = """['flowing', 'idle', 'held', 'stopped']
    .map(kind => getComputedStyle(document.querySelector(`.arc.${kind}`)).strokeDasharray)"""
HOSTILE = "<img src=x onerror=\"wrong.push('hostile')\"><script>wrong.push('hostile')</script>'\"&\u202e\x00"


class Page:
    """The page of a gateway in a browser."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser
        self.evaluate, self.until = browser.evaluate, browser.until

    async def open(self, gateway: FakeGateway, screen: str = "status", token: str | None = None) -> None:
        await self.browser.open(f"{gateway.url}#{screen}")
        if gateway.token_file is not None and token is None:
            await self.until("!document.getElementById('token-screen').hidden")
            await self.give_token(TOKEN)
            await self.until("document.getElementById('token-screen').hidden")

    async def give_token(self, token: str) -> None:
        await self.until("document.activeElement.id === 'token'")
        await self.type(token)
        await self.press("Enter")

    async def type(self, text: str) -> None:
        await self.browser.call("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        texts = {"Enter": "\r", " ": " "}
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": texts[key]} if key in texts else {}
        await self.browser.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **code, **text)
        await self.browser.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **code)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def text(self, selector: str) -> str:
        found: str = await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    async def says(self, selector: str, part: str) -> None:
        await self.until(
            f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(part)})"
        )

    async def asks(self, part: str) -> None:
        """Until the dialog is open with this text."""
        await self.until("document.getElementById('confirm').open")
        await self.says("#confirm", part)

    async def rows(self, table: str, count: int) -> None:
        await self.until(f"document.querySelectorAll('#{table} tbody tr').length === {count}")

    async def size(self, width: int, scheme: str = "light") -> None:
        size = {"width": width, "height": WIDTHS.get(width, 800), "deviceScaleFactor": 1, "mobile": False}
        await self.browser.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.browser.call("Emulation.setEmulatedMedia", features=features)

    async def is_sound(self) -> None:
        assert await self.evaluate("wrong") == []
        assert await self.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with Chromium(tmp_path / "browser") as browser:
        await browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        await browser.call("Emulation.setScrollbarsHidden", hidden=True)  # as on a telephone
        page = Page(browser)
        await page.size(1600)
        yield page


def filled(gateway: FakeGateway) -> FakeGateway:
    gateway.status = fakes.busy_status()
    gateway.letters = [
        *(fakes.letter(number) for number in range(1, 9)),
        fakes.letter(
            9, code="INVALID_ARGUMENT", endpoint="body", reason="no Protobuf of this topic", sink="up://body/9000/1/0"
        ),
    ]
    gateway.subscriptions = [
        fakes.subscription(
            f"up://body/8001/1/{0x8000 + number:X}",
            sample_period_ms=None if number % 3 else 100,
            usubscription="vin1" if number % 2 else "cloud",
        )
        for number in range(9)
    ]
    gateway.messages = [
        fakes.message(990, {"path": "Vehicle.Speed", "double_value": 13.4}, "decoded", payload_format="PROTOBUF"),
        fakes.message(989, '{"open":true,"doors":[1,2]}', "json"),
        fakes.message(988, "the door is open"),
        fakes.message(987, "0a1b2c3d" * 40, "hex", payload_bytes=9_000, payload_format="RAW"),
    ]
    return gateway


async def shown(page: Page, screen: str) -> None:
    """Goes to a screen, and waits until it is complete."""
    await page.click(f"nav a[href='#{screen}']")
    await page.until(f"!document.getElementById('{screen}-screen').hidden")
    if screen == "status":
        await page.until("document.querySelector('#drawing svg') !== null")
        await page.rows("endpoints", 4)
    elif screen == "letters":
        await page.rows("letters", 9)
    else:
        await page.rows("subscriptions", 9)
        await page.click("#subscriptions button.link")
        await page.rows("messages", 4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_every_screen_is_whole_in_every_size_and_scheme(
    page: Page, tmp_path: Path, width: int, scheme: str
) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.size(width, scheme)
        await page.open(gateway)
        for screen in SCREENS:
            await shown(page, screen)
            await page.is_sound()
            assert await page.evaluate(CONTRAST) == []
            await _all_have_names(page)
            await page.evaluate("scrollTo(0, 0)")
            await page.browser.look(pictures(tmp_path) / f"{screen}-{width}-{scheme}.png", scheme)
        assert await page.text("h1") == "up-streamer vin1"
        assert await page.text("#state") == "! degraded"


@pytest.mark.parametrize(
    ("screen", "width", "scheme"),
    [("status", 1200, "light"), ("status", 360, "dark"), ("letters", 1200, "dark"), ("topics", 1200, "light")],
)
async def test_pictures_of_the_documentation(page: Page, tmp_path: Path, screen: str, width: int, scheme: str) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.size(width, scheme)
        await page.open(gateway)
        await shown(page, screen)
        await page.evaluate("scrollTo(0, 0)")
        path = pictures(tmp_path) / f"page-{screen}-{width}-{scheme}.png"
        await page.browser.look(path, scheme)
    assert path.stat().st_size > PICTURE_BYTES_MIN


def pictures(otherwise: Path) -> Path:
    return Path(os.environ.get("PAGE_PICTURES", otherwise))


async def _all_have_names(page: Page) -> None:
    """Every control has a name for screen readers."""
    tree = (await page.browser.call("Accessibility.getFullAXTree"))["nodes"]
    controls = ("button", "textbox", "searchbox", "checkbox", "combobox", "link", "table", "image", "Date")
    found = [one for one in tree if not one["ignored"] and one["role"]["value"] in controls]
    assert len(found) >= 8
    assert [one["role"]["value"] for one in found if not one["name"]["value"]] == []


async def test_the_drawing_shows_state_and_flow_not_by_colour_alone(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        gateway.status["flows"].append(fakes.flow("diag", "body", 5.0) | {"allowed": False})
        for width in WIDTHS:
            await page.size(width)
            await page.open(gateway, token=TOKEN if width != 360 else None)
            await page.until("document.querySelectorAll('.box').length === 4")
            boxes = await page.evaluate("[...document.querySelectorAll('.box')].map(one => one.textContent)")
            assert ["not ready" in text for text in boxes] == [False, False, False, True]
            assert ["held" in text for text in boxes] == [False, False, True, False]
            arcs = await page.evaluate("[...document.querySelectorAll('.arc title')].map(one => one.textContent)")
            assert len(arcs) == 7, "what no rule lets pass is not drawn"
            labels = await page.evaluate("[...document.querySelectorAll('text.rate')].map(one => one.textContent)")
            assert sorted(labels) == sorted(["13/s", "13/s", "‖ 31/s", "‖ 65/s", "0.4/s", "0/s", "✕ 0/s"])
            assert len(set(await page.evaluate(DASHES))) == 4
            assert not await page.evaluate(OVERLAP)
            label = await page.evaluate("document.querySelector('#drawing svg').getAttribute('aria-label')")
            assert "diag not ready" in label
            assert "chassis to offboard: ‖ 65/s" in label


async def test_the_status_follows_what_changes(page: Page) -> None:
    async with FakeGateway() as gateway:
        gateway.status = fakes.quiet_status([fakes.endpoint("a"), fakes.endpoint("b")], flows=[fakes.flow("a", "b")])
        await page.open(gateway)
        await page.says("#state", "✓ ready")
        await page.until("document.querySelector('#drawing text.rate')?.textContent === '0/s'")
        assert await page.text("#problems") == ""
        await page.evaluate("document.querySelector('#endpoints tr:nth-child(2)').kept = true")
        changed = fakes.endpoint("b", state="degraded", reason="late <b>", in_per_s=2.5)
        gateway.status = fakes.quiet_status(
            [fakes.endpoint("new"), changed], state="degraded", problems=["endpoint b: late <b>"]
        )
        await page.says("#state", "! degraded")
        await page.says("#problems", "endpoint b: late <b>")
        await page.says("#endpoints", "2.5/s")
        assert await page.evaluate(
            "[...document.querySelectorAll('#endpoints tbody tr')].map(one => one.kept === true)"
        ) == [
            False,
            True,
        ]  # a row of the same endpoint stays: what is selected in it stays, too
        exact = await page.evaluate("document.querySelector('#endpoints tr:nth-child(2) .fair').title")
        assert exact.startswith(changed["since"][:19])
        await page.is_sound()


async def test_nothing_is_asked_while_nobody_looks(page: Page) -> None:
    async with FakeGateway() as gateway:
        await page.open(gateway)
        await page.until("[...timers.values()].includes(2000)")
        await page.evaluate(
            "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await page.until("![...timers.values()].includes(2000)")
        gateway.status = fakes.quiet_status(state="not ready", reason="starting")
        await page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        await page.says("#state", "✕ not ready")
        await page.until("[...timers.values()].includes(2000)")


# Token


async def test_a_token_is_asked_for_and_a_wrong_or_withdrawn_one_is_refused(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.browser.open(gateway.url)
        await page.says("#token-why", "to those who have its token")
        assert "offboard" not in await page.evaluate("document.body.innerText")
        await page.give_token("wrong")
        await page.says("#token-why", "not accepted")
        await page.give_token("wrong €")  # not even a header
        await page.says("#token-why", "not accepted")
        await page.give_token(TOKEN)
        await page.rows("endpoints", 4)
        assert (
            await page.evaluate("[location.href, document.cookie, localStorage.length].join(' ')")
            == f"{gateway.url}  0"
        )
        await page.browser.open(f"{gateway.url}#letters")
        await page.browser.call("Page.reload")
        await page.rows("letters", 9)  # the tab still has it
        assert gateway.token_file is not None
        gateway.token_file.write_text("another-token-of-16-bytes")
        await page.says("#token-why", "not any more")
        assert "Not authorized" not in await page.evaluate("document.body.innerText")
        await page.give_token("another-token-of-16-bytes")
        await page.rows("letters", 9)
        await page.click("#forget")
        await page.says("#token-screen", "admin.token_file")
        assert await page.evaluate("sessionStorage.length") == 0
        await page.is_sound()


async def test_without_a_token_the_first_screen_works_and_the_others_say_what_to_configure(page: Page) -> None:
    async with filled(FakeGateway()) as gateway:
        await page.open(gateway)
        await page.rows("endpoints", 4)
        for screen in ("letters", "topics"):
            await page.click(f"nav a[href='#{screen}']")
            await page.says(f"#{screen}-screen .said", "they need admin.token_file")
        await page.click("nav a[href='#status']")
        await page.click("#facts .paused button")
        await page.asks("up://body/8001/1/8010")
        await page.click("#confirm-do")
        await page.says("#facts .said", "they need admin.token_file")
        assert gateway.calls == []


# The gateway is away


async def test_the_page_says_that_the_gateway_is_away_and_goes_on_after_a_restart(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.open(gateway)
        await page.rows("endpoints", 4)
    await page.says("#silence", "No answer since ")
    assert await page.evaluate("document.body.classList.contains('stale')")
    await page.rows("endpoints", 4)  # of before
    async with FakeGateway(tmp_path, gateway.port) as again:
        again.status = fakes.quiet_status([fakes.endpoint("a")])
        await page.rows("endpoints", 1)
        assert await page.evaluate("document.getElementById('silence').hidden")
        assert not await page.evaluate("document.body.classList.contains('stale')")
    await page.click("nav a[href='#letters']")
    await page.says("#letters-said", "does not answer")
    assert await page.evaluate("wrong") == []


# Dead letters


async def test_dead_letters_are_filtered_and_paged(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        gateway.letters = [
            fakes.letter(number, code="NOT_FOUND" if number % 2 else "INTERNAL") for number in range(1, 251)
        ]
        await page.open(gateway, "letters")
        await page.rows("letters", 100)
        await page.click("#letters-more")
        await page.rows("letters", 200)
        await page.click("#letters-more")
        await page.rows("letters", 250)
        assert await page.evaluate("document.getElementById('letters-more').hidden")
        numbers = await page.evaluate(
            "[...document.querySelectorAll('#letters tbody td:nth-child(2)')].map(one => one.innerText)"
        )
        assert numbers == [str(number) for number in range(250, 0, -1)]
        await page.evaluate("document.getElementById('letters-code').focus()")
        await page.type("internal")
        await page.press("Enter")
        await page.until("document.querySelector('#letters tbody td:nth-child(4)').innerText === 'INTERNAL'")
        assert gateway.asked("dead_letters")[-1] == {"code": "INTERNAL", "limit": 100}
        await page.evaluate("document.getElementById('letters-since').value = '2026-01-01T00:00'")
        await page.click("#letters-form button")
        await page.says("#letters-said", "100 letters are shown, 250 stored.")


async def test_selected_letters_are_resent_after_a_trial_and_a_question(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        gateway.refusing = {"body"}
        await page.open(gateway, "letters")
        await page.rows("letters", 9)
        assert await page.text("#letters-resend") == "Resend all …"
        for number in (3, 5, 9):
            await page.click(f"[aria-label='Select letter {number}']")
        await page.evaluate("document.getElementById('letters-resend').focus()")
        assert await page.text("#letters-resend") == "Resend 3 selected …"
        await page.click("#letters-resend")
        await page.asks("the 3 selected. A trial says: 2 ready, 1 refused (Not authorized).")
        await page.press("Escape")
        await page.until("!document.getElementById('confirm').open")
        await page.until("document.activeElement.id === 'letters-resend' && document.activeElement.ariaBusy !== 'true'")
        assert gateway.asked("resend_letters") == [
            {"numbers": [3, 5, 9], "dry_run": True},
            {"numbers": [3, 5, 9], "dry_run": True, "after": 5, "until": 1 << 40},
        ]
        await page.press("Enter")
        await page.asks("A trial says")
        await page.click("#confirm-do")
        await page.rows("letters", 7)
        await page.says("#letters-said", "Resend: 2 resent, 1 refused (Not authorized).")
        assert not any(given["dry_run"] for given in gateway.asked("resend_letters")[-2:])
        assert {3, 5}.isdisjoint(one["number"] for one in gateway.letters)
        await page.is_sound()


async def test_all_that_fit_are_purged_after_a_question(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.open(gateway, "letters")
        await page.rows("letters", 9)
        await page.evaluate("document.getElementById('letters-endpoint').value = 'offboard'")
        await page.click("#letters-form button")
        await page.rows("letters", 8)
        await page.click("#letters-purge")
        await page.asks(
            "all that fit the filter. A trial says: 8 purged. What is purged can’t be brought back.",
        )
        await page.click("#confirm-do")
        await page.says("#letters-said", "Purge: 8 purged.")
        assert gateway.asked("purge_letters") == [
            {"endpoint": "offboard", "dry_run": True},
            {"endpoint": "offboard", "dry_run": False},
        ]
        assert [one["number"] for one in gateway.letters] == [9]
        await page.evaluate("document.getElementById('letters-form').reset()")
        await page.click("#letters-form button")
        await page.rows("letters", 1)
        await page.click("#letters-purge")
        await page.asks("This is for all. A trial says: 1 purged.")
        await page.click("#confirm-do")
        await page.says("#letters-said", "Purge: 1 purged.")
        assert gateway.asked("purge_letters")[-1] == {"all": True, "dry_run": False}


# Topics


async def test_subscriptions_are_filtered_and_paged(page: Page, tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        gateway.subscriptions = [fakes.subscription(f"up://v{number}/8001/1/8000") for number in range(450)]
        await page.open(gateway, "topics")
        await page.says("#subscriptions-said", "200 of 450 shown.")
        await page.click("#subscriptions-more")
        await page.rows("subscriptions", 400)
        await page.click("#subscriptions-more")
        await page.rows("subscriptions", 450)
        await page.evaluate("document.getElementById('subscriptions-topic').focus()")
        await page.type("//v449/")
        await page.press("Enter")
        await page.rows("subscriptions", 1)
        assert gateway.asked("subscriptions")[-1] == {"topic": "//v449/", "limit": 200}


async def test_the_last_messages_of_a_topic_are_shown_as_what_they_are(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.open(gateway, "topics")
        await shown(page, "topics")
        assert gateway.asked("messages") == [{"topic": "up://body/8001/1/8000", "limit": 20}]
        texts = await page.evaluate("[...document.querySelectorAll('#messages pre')].map(one => one.textContent)")
        assert json.loads(texts[0]) == {"path": "Vehicle.Speed", "double_value": 13.4}
        assert json.loads(texts[1]) == {"open": True, "doors": [1, 2]}
        assert texts[2] == "the door is open"
        assert texts[3].startswith("0a 1b 2c 3d 0a")
        await page.says("#messages", "RAW, 9,000 bytes, the first 160 are shown")
        await page.evaluate("document.getElementById('messages-topic').value = 'nonsense'")
        await page.click("#messages-form button")
        await page.says("#messages-said", "expected a uProtocol URI, got 'nonsense'")


async def test_a_topic_is_paused_and_resumed(page: Page, tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        gateway.status = fakes.quiet_status([fakes.endpoint("offboard")])
        await page.open(gateway, "topics")
        await page.evaluate("document.getElementById('pause-topic').focus()")
        await page.type("//v/8001/1/FFFF")
        await page.press("Tab")
        await page.press("Tab")
        await page.type("offboard")
        await page.press("Enter")
        await page.asks("//v/8001/1/FFFF waits in the log, and does not go to offboard")
        await page.click("#confirm-do")
        await page.says("#pause-said", "Paused.")
        await page.says("#topics-paused", "❚❚ //v/8001/1/FFFF toward offboard")
        await page.click("nav a[href='#status']")
        await page.says("#facts .paused", "//v/8001/1/FFFF")
        await page.click("#facts .paused button")
        await page.asks("Resume?")
        await page.click("#confirm-do")
        await page.until("document.querySelector('#facts .paused') === null")
        assert gateway.asked("resume") == [{"topic": "//v/8001/1/FFFF", "peer": "offboard"}]


async def test_an_endpoint_and_a_rule_are_paused_and_resumed(page: Page, tmp_path: Path) -> None:
    async with FakeGateway(tmp_path) as gateway:
        gateway.status = fakes.quiet_status(
            [fakes.endpoint("a"), fakes.endpoint("b"), fakes.endpoint("c")],
            flows=[fakes.flow("a", "b", 1.0), fakes.flow("c", "b", 1.0)],
        )
        await page.open(gateway, "topics")
        for origin, given, text in (
            ("", {"endpoint": "b"}, "everything toward b"),
            ("a", {"rule_from": "a", "rule_to": "b"}, "everything from a toward b"),
        ):
            await page.evaluate(f"document.getElementById('pause-from').value = '{origin}'")
            await page.evaluate("document.getElementById('pause-peer').value = 'b'")
            await page.click("#pause-form button")
            await page.asks("Everything")
            await page.click("#confirm-do")
            await page.says("#topics-paused", text)
            assert gateway.asked("pause")[-1] == given
            await page.click("nav a[href='#status']")
            held = 2 if origin == "" else 1
            await page.until(f"document.querySelectorAll('.arc.held').length === {held}")
            await page.click("#facts .paused button")
            await page.asks(text)
            await page.click("#confirm-do")
            await page.until("document.querySelector('.arc.held') === null")
            await page.click("nav a[href='#topics']")
            await page.until("document.querySelector('#topics-paused li') === null")
            await page.until("document.querySelector('#pause-form button').ariaBusy !== 'true'")
        assert gateway.asked("resume")[-1] == {"rule_from": "a", "rule_to": "b"}
        await page.evaluate("document.getElementById('pause-topic').value = '//v/8001/1/8000'")
        await page.click("#pause-form button")
        await page.says("#pause-said", "A rule is paused as a whole")


# Keyboard


async def test_everything_is_reached_and_seen_by_keyboard(page: Page, tmp_path: Path) -> None:
    async with filled(FakeGateway(tmp_path)) as gateway:
        await page.open(gateway, "letters")
        await page.rows("letters", 9)
        await page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
        await page.browser.call("Page.reload")
        await page.rows("letters", 9)
        visited: list[str] = []
        while not visited or visited[-1] != "the end":
            await page.press("Tab")
            visited.append(await page.evaluate(FOCUSED))
        order = ["#content", "#status", "#letters", "#topics", "forget", "letters-code", "letters-endpoint"]
        assert visited[:7] == order
        assert not [one for one in visited if one.startswith("not seen")]
        assert visited.index("letters-all") < visited.index("Select letter 9") < visited.index("Select letter 1")
        await page.evaluate("document.querySelector('.skip').focus()")
        await page.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "content"
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "letters-code"
        await page.evaluate("document.querySelector('[aria-label=\"Select letter 9\"]').focus()")
        await page.press(" ")
        await page.until("document.getElementById('letters-purge').innerText === 'Purge 1 selected …'")
        await page.evaluate("document.getElementById('letters-purge').focus()")
        await page.press("Enter")
        await page.until("document.getElementById('confirm').open")
        assert await page.evaluate("document.activeElement.innerText") == "Cancel"
        await page.press("Tab")
        await page.press("Enter")
        await page.says("#letters-said", "Purge: 1 purged.")


# Hostile and large


async def test_foreign_text_is_only_text(page: Page, tmp_path: Path) -> None:
    held = {"address": HOSTILE, "reason": HOSTILE, "since": HOSTILE, "records": 1, "text": HOSTILE}
    async with FakeGateway(tmp_path) as gateway:
        gateway.status = fakes.quiet_status(
            [
                fakes.endpoint(
                    HOSTILE,
                    HOSTILE,
                    "degraded",
                    reason=HOSTILE,
                    authorities=[HOSTILE],
                    held=[held],
                    held_count=1,
                    last_in=HOSTILE,
                    dropped={HOSTILE: 1},
                ),
                fakes.endpoint("b", state=HOSTILE),
            ],
            authority=HOSTILE,
            reason=HOSTILE,
            problems=[HOSTILE],
            notes=[HOSTILE],
            flows=[fakes.flow(HOSTILE, "b", 1.0)],
            paused=[{"topic": HOSTILE, "peer": HOSTILE}],
            follows=[{"endpoint": HOSTILE, "service": HOSTILE, "state": HOSTILE, "trouble": HOSTILE}],
            epochs=[{"group": HOSTILE, "open": 1, "ended": 2, "incomplete": 1}],
            dead_letters={"stored": 1, "total": 1, "by_code": {HOSTILE: 1}},
            certificates=[{"endpoint": HOSTILE, "setting": HOSTILE, "expires": HOSTILE}],
        )
        gateway.letters = [
            fakes.letter(1, code=HOSTILE, reason=HOSTILE, endpoint=HOSTILE, source=HOSTILE, sink=HOSTILE, id=HOSTILE)
        ]
        gateway.subscriptions = [fakes.subscription(f"//{HOSTILE}", HOSTILE, usubscription=HOSTILE)]
        gateway.messages = [
            fakes.message(1, HOSTILE, type=HOSTILE, id=HOSTILE, sink=HOSTILE, log=HOSTILE, payload_format=HOSTILE),
            fakes.message(2, json.dumps({HOSTILE: HOSTILE}), "json"),
            fakes.message(3, {"__proto__": HOSTILE}, "decoded"),
        ]
        for width in WIDTHS:
            await page.size(width)
            await page.open(gateway, token=None if width == 360 else TOKEN)
            await page.until("document.querySelectorAll('.box').length === 2")
            await page.says("#endpoints", "<script>")
            await page.click("nav a[href='#letters']")
            await page.rows("letters", 1)
            await page.click("nav a[href='#topics']")
            await page.rows("subscriptions", 1)
            await page.click("#subscriptions button.link")
            await page.rows("messages", 3)
            await page.click("#topics-paused button")
            await page.asks("<script>")
            await page.press("Escape")
            assert await page.evaluate("document.querySelectorAll('img, body script').length") == 0
            await page.is_sound()


async def test_hundreds_of_endpoints_and_thousands_of_subscriptions_do_not_freeze_it(
    page: Page, tmp_path: Path
) -> None:
    def many(rate: float) -> dict[str, Any]:
        states = ["ready", "ready", "degraded", "not ready"]
        endpoints = [
            fakes.endpoint(f"network-{number:03}-of-the-fleet", state=states[number % 4], in_per_s=rate + number)
            for number in range(500)
        ]
        flows = [
            fakes.flow(endpoints[number % 500]["name"], endpoints[(number * 7 + 1) % 500]["name"], rate)
            for number in range(2_000)
        ]
        problems = [f"endpoint {number}: it is not ready" for number in range(301)]
        return fakes.quiet_status(endpoints, flows=flows, problems=problems, state="degraded")

    async with FakeGateway(tmp_path) as gateway:
        gateway.status = many(1.0)
        gateway.subscriptions = [fakes.subscription(f"up://v{number}/8001/1/8000") for number in range(2_000)]
        await page.open(gateway)
        await page.rows("endpoints", 500)
        await page.until("document.querySelectorAll('.box').length === 8")
        await page.says("#drawing-says", "8 of 500 networks")
        gateway.status = many(2.0)
        await page.says("#endpoints tbody tr", "2.0/s")
        await page.evaluate("document.getElementById('endpoint-filter').focus()")
        await page.type("network-49")
        await page.rows("endpoints", 10)
        await page.press("Escape")
        await page.rows("endpoints", 500)
        await page.is_sound()
        await page.click("nav a[href='#topics']")
        for count in range(200, 2_000, 200):
            await page.rows("subscriptions", count)
            await page.click("#subscriptions-more")
        await page.rows("subscriptions", 2_000)
        assert await page.evaluate("longest") < LONGEST_TASK_MS
        await page.is_sound()
