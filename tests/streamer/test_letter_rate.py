"""The rate limit of dead letters: by kind and in total, per minute."""

from __future__ import annotations

import pytest

from streamer.letters import dead_letter
from streamer.letters.dead_letter import PerMinute


def test_kinds_beyond_the_limit_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "ALL_KINDS", 1 << 20)
    limit = PerMinute(1, 1_000, lambda: 0.0)
    stored = [limit.happened(number, 1).stored for number in range(dead_letter.LETTER_KINDS_MAX + 100)]
    assert stored == [True] * (dead_letter.LETTER_KINDS_MAX + 1) + [False] * 99


def test_kinds_without_end_are_bounded_in_all_until_the_minute_is_over() -> None:
    now = 0.0
    limit = PerMinute(10, 1_000, lambda: now)
    granted = [limit.happened(number, 100) for number in range(1_000)]
    assert sum(one.stored for one in granted) == 10 * dead_letter.ALL_KINDS
    assert sum(one.whole for one in granted) == 10 * dead_letter.ALL_KINDS
    now = 60.0
    granted = [limit.happened(number, 500) for number in range(1_000)]
    assert sum(one.whole for one in granted) == 2 * dead_letter.ALL_KINDS
    assert len(limit._kinds) <= dead_letter.LETTER_KINDS_MAX + 1
