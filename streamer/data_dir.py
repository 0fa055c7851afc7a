"""The names of the files in a data_dir. The folders of versions before have the same."""

from __future__ import annotations

from typing import Final

LOG_FILE: Final = "history.db"
LOG_LOCK: Final = f"{LOG_FILE}.lock"  # held by a running streamer
LOG_MARK: Final = f"{LOG_FILE}.mark"
LETTERS_FILE: Final = "dead-letters.db"
SUBSCRIPTIONS_FILE: Final = "usubscription.db"  # of the embedded service
PARTNERS_FILE: Final = f"{SUBSCRIPTIONS_FILE}.partners"
PAUSES_FILE: Final = "paused.json"
RESERVE_FILE: Final = "reserve"  # of the disk
CONTROL_SOCKET: Final = "control.sock"
RESTORING, RESTORED, REPLACED = "restoring", "restored", "replaced-"  # folders of a restore; the last begins a name


def interest_file(authority: str) -> str:
    """What the uSubscription of `authority` answered last."""
    return f"interest-{authority}.json"


def transport_file(endpoint: str) -> str:
    """For UTransport.remember_in."""
    return f"endpoint-{endpoint}.json"
