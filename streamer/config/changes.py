"""What differs between two configurations, in the words of the file, and which of it needs a restart.

differences(old, new) -> + endpoint diag    - rule a -> b    ~ history.record    ! streamer.authority needs a restart
appliable(old, new) -> `new`, with what needs a restart as in `old`: what a running streamer can take over
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from storage import logs
from streamer.config.model import Config
from streamer.config.sections import Section
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

NEEDS_RESTART: Final = " needs a restart"
CHANGED_CHARACTERS_MAX: Final = 120  # of one value in a line

# Keys by which files on disk are named or were filled, and by which the memory was divided at the start
RESTART_KEYS: Final = (
    ("streamer", "authority"),
    ("streamer", "data_dir"),
    ("history", "volatile"),
    ("limits", "memory_mib"),
    ("limits", "message_bytes_max"),
)


def _callers(entry: Any) -> str:
    where = f" at {entry.endpoint}" if entry.endpoint else ""
    return f"of {', '.join(entry.callers) or 'all callers'}{where}"


# sections that may stand several times, and how one of them is called
NAMES: Final[dict[str, Callable[[Any], str]]] = {
    "endpoint": lambda one: str(one.name),
    "rule": lambda one: f"{one.from_} -> {one.to}",
    "access": _callers,
    "follow": lambda one: f"{one.service} at {one.endpoint}",
    "epochs": lambda one: str(one.name),
    "channel": lambda one: str(one.name),
    "proxy": lambda one: str(one.prefix),
    "recovery": lambda one: f"{one.source} of {', '.join(one.topics)}",
}


@dataclass(frozen=True)
class Difference:
    """One difference. `sign`: + added, - removed, ~ changed, ! needs a restart. `section`: where it stands; `name`:
    which of the sections that may stand several times."""

    sign: Literal["+", "-", "~", "!"]
    section: str
    name: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.sign} {self.what}{f': {self.detail}' if self.detail else ''}"


def differences(old: Config, new: Config) -> list[Difference]:
    """Returns the differences in the order of the sections; what needs a restart comes first. Raises as
    `appliable`."""
    needed = restarts(old, new)
    kept = {one.what.removesuffix(NEEDS_RESTART) for one in needed}
    return [*needed, *(one for one in _found(old, appliable(old, new)) if one.what not in kept)]


def restarts(old: Config, new: Config) -> list[Difference]:
    """Returns the differences that need a restart."""
    found = [
        f"{section}.{key}"
        for section, key in RESTART_KEYS
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]
    if old.authority != new.authority and "streamer.authority" not in found:
        found.append("streamer.authority")
    if old.home.name != new.home.name:
        found.append(f"another name of the endpoint of our own authority ({old.home.name} -> {new.home.name})")
    elif old.usubscription_of(old.home) != new.usubscription_of(new.home):
        found.append(f"endpoint {new.home.name}: usubscription")
    elif old.answers_for != new.answers_for:
        found.append("usubscription.answers_for")
    if old.epochs != new.epochs:
        found.append("epochs")
    return [Difference("!", what.partition(".")[0], "", what + NEEDS_RESTART) for what in found]


def appliable(old: Config, new: Config) -> Config:
    """Returns `new`, with what needs a restart as in `old`. Raises FAILED_PRECONDITION if the two do not fit."""
    needed = ", ".join(one.what for one in restarts(old, new))
    if old.authority != new.authority or old.home.name != new.home.name:
        what = f"{needed}, and nothing of the file can be applied before that"
        raise UStatusError(UCode.FAILED_PRECONDITION, what)
    kept: dict[str, Any] = {name: getattr(new, name) for name in new.model_fields_set}
    for section, key in RESTART_KEYS:
        ours, theirs = getattr(old, section), kept.get(section, getattr(new, section))
        if getattr(ours, key) != getattr(theirs, key):
            kept[section] = _with(theirs, key, getattr(ours, key))
    kept["epochs"] = old.epochs
    if old.usubscription_of(old.home) != new.usubscription_of(new.home):
        mode = old.usubscription_of(old.home)
        kept["endpoint"] = [_with(one, "usubscription", mode) if one is new.home else one for one in new.endpoint]
    elif old.answers_for != new.answers_for:
        ours, theirs = old.usubscription.answers_for, kept.get("usubscription", new.usubscription)
        if ours is None and old.home.authorities != new.home.authorities:  # of which it is made by default
            ours = sorted(old.answers_for)
        kept["usubscription"] = _with(theirs, "answers_for", ours)
    try:
        return Config.model_validate(kept)
    except ValidationError as error:
        why = "; ".join(one["msg"] for one in error.errors())
        what = f"{needed}, and the rest of the file does not fit what runs: {why}"
        raise UStatusError(UCode.FAILED_PRECONDITION, what) from None


def _with(section: Section, key: str, value: Any) -> Section:
    """Returns a copy with another value; other keys stay given or not, as they were."""
    given = {name: getattr(section, name) for name in section.model_fields_set} | {key: value}
    return type(section).model_validate(given)


def _found(old: Config, new: Config) -> Iterator[Difference]:
    for section in Config.model_fields:
        before, after = (one.rules if section == "rule" else getattr(one, section) for one in (old, new))
        if section not in NAMES:
            for key, detail in _keys(before, after):
                yield Difference("~", section, key, f"{section}.{key}", detail)
            continue
        ours, theirs = _by_name(section, before), _by_name(section, after)
        for name in ours:
            if name not in theirs:
                yield Difference("-", section, name, f"{section} {name}")
        for name, one in theirs.items():
            if name not in ours:
                was = one.renamed_from if section == "endpoint" else None
                detail = f"renamed from {was}, whose backlog it gets" if was in ours else ""
                yield Difference("+", section, name, f"{section} {name}", detail)
            elif one != ours[name]:
                detail = ", ".join(f"{key} {what}" for key, what in _keys(ours[name], one))
                yield Difference("~", section, name, f"{section} {name}", detail)
        if section == "access" and [one for one in ours if one in theirs] != [one for one in theirs if one in ours]:
            yield Difference("~", section, "", section, "the order of its entries")


def _by_name(section: str, ones: list[Any]) -> dict[str, Any]:
    """Returns the sections by their names; a name that comes again has its number."""
    found: dict[str, Any] = {}
    for one in ones:
        name = NAMES[section](one)
        again = sum(known == name or known.startswith(f"{name} (") for known in found)
        found[f"{name} ({again + 1})" if again else name] = one
    return found


def _keys(old: Any, new: Any, within: str = "") -> Iterator[tuple[str, str]]:
    """Yields each key that differs, with dots where tables are nested, and how."""
    ours, theirs = dict(old), dict(new)
    for key in [*ours, *(one for one in theirs if one not in ours)]:
        before, after, name = ours.get(key), theirs.get(key), f"{within}{key.rstrip('_')}"
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _keys(before, after, f"{name}.")
        elif logs.is_secret(name):
            yield name, "has changed"
        elif isinstance(before, list) and isinstance(after, list):
            yield name, _listed(before, after)
        else:
            yield name, f"{_shown(before)} -> {_shown(after)}"


def _listed(before: list[Any], after: list[Any]) -> str:
    parts = [*(f"-{_shown(one)}" for one in before if one not in after)]
    parts += [f"+{_shown(one)}" for one in after if one not in before]
    return _shown(" ".join(parts) or "in another order")


def _shown(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= CHANGED_CHARACTERS_MAX else text[:CHANGED_CHARACTERS_MAX] + "..."
