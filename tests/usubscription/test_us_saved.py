"""The last known interest on disk: complete, and written less often if it is large."""

from __future__ import annotations

import asyncio
from pathlib import Path

from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from usubscription_client import sources
from usubscription_client.interest import InterestSource
from usubscription_client.sources import SavedInterest


def table_of(count: int) -> InterestSource:
    table = InterestSource("test")
    for number in range(count):
        topic = uris.uri("vehicle1", 0x8001, 1, 0x8000 + number)
        table.put(Subscription(topic, uris.uri("cloud", 1, 1, 0), Status.SUBSCRIBED, None, number or None))
    return table


async def test_the_loop_goes_on_while_much_is_saved_and_what_changes_meanwhile_harms_nothing(tmp_path: Path) -> None:
    count = 10 * sources.STEP_ENTRIES
    table = table_of(count)
    saved = SavedInterest(tmp_path / "interest.json", table.subscriptions)

    async def turns_of_a_save(changed_at: int) -> int:
        saving, turns = asyncio.ensure_future(saved.save()), 0
        while not saving.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == changed_at:
                table.replace([next(table.subscriptions())])
        return turns

    assert await turns_of_a_save(changed_at=0) > 10
    await turns_of_a_save(changed_at=3)
    loaded = SavedInterest(tmp_path / "interest.json", list).load()
    assert 1 <= len(loaded) <= count
    await saved.save()
    assert SavedInterest(tmp_path / "interest.json", list).load() == list(table.subscriptions())


async def test_the_larger_the_file_the_later_it_follows_a_change(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    for count, least_s in ((10, sources.SAVE_DELAY_S), (5_000, 5.0)):
        saved = SavedInterest(tmp_path / "interest.json", table_of(count).subscriptions)
        await saved.save()
        before = loop.time()
        saved.changed()
        assert saved._due is not None
        assert least_s <= saved._due.when() - before < least_s + 1
        await saved.close()


async def test_what_is_due_at_the_end_is_saved(tmp_path: Path) -> None:
    table = table_of(3)
    saved = SavedInterest(tmp_path / "interest.json", table.subscriptions)
    saved.changed()
    await saved.close()
    assert SavedInterest(tmp_path / "interest.json", list).load() == list(table.subscriptions())
    await saved.close()
