"""A gateway for tests of the page: the real admin port, in front of a status and operations that the test sets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from streamer.config import AdminSection
from streamer.operating.control import PAUSE_ARGUMENTS
from streamer.operating.http_port import HttpPort
from streamer.operation import Arguments, Operation, Operations
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

TOKEN = "a-token-of-16-bytes"
LETTER_ARGUMENTS = ("numbers", "code", "endpoint", "since_ms", "before_ms", "after", "until", "all", "dry_run")


def moment(ago_s: float = 0.0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def endpoint(name: str, transport: str = "mqtt5", state: str = "ready", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "transport": transport,
        "authorities": [name],
        "state": state,
        "since": moment(7200),
        "reason": "",
        "connected": state != "not ready",
        "received": 0,
        "forwarded": 0,
        "in_per_s": 0.0,
        "out_per_s": 0.0,
        "waiting": 0,
        "lag_records": 0,
        "lag_s": 0.0,
        "retries": 0,
        "held": [],
        "held_count": 0,
        "last_in": None,
        "last_out": None,
        "paused": False,
        "dropped": {},
        "lost": 0,
    } | changes


def flow(source: str, to: str, per_s: float = 0.0, forwarded: int = 0) -> dict[str, Any]:
    return {"from": source, "to": to, "allowed": True, "per_s": per_s, "forwarded": forwarded}


def quiet_status(endpoints: Iterable[dict[str, Any]] = (), **changes: Any) -> dict[str, Any]:
    return {
        "version": "0.2.0",
        "core": "compiled",
        "authority": "vin1",
        "config": "/etc/up-streamer/vin1.toml",
        "data_dir": "/var/lib/up-streamer",
        "pid": 4711,
        "started": moment(93_600),
        "now": moment(),
        "state": "ready",
        "since": moment(7200),
        "reason": "",
        "endpoints": list(endpoints),
        "flows": [],
        "logs": [],
        "disk": {"free_bytes": 0, "reserve_bytes": 0, "log_limit_bytes": 0},
        "dead_letters": {"stored": 0, "total": 0, "by_code": {}},
        "paused": [],
        "follows": [],
        "epochs": [],
        "problems": [],
        "notes": [],
        "certificates": [],
    } | changes


def busy_status() -> dict[str, Any]:
    """A gateway on which something is wrong: what the pictures show."""
    held = {
        "address": "up://chassis/8001/1/8004",
        "reason": "refused",
        "since": moment(640),
        "records": 210,
        "text": "Not authorized",
    }
    recent = {"last_in": moment(0.4), "last_out": moment(0.6)}
    return quiet_status(
        [
            endpoint(
                "body",
                "zenoh",
                **recent,
                authorities=["body", "door"],
                received=812_344,
                forwarded=90_122,
                in_per_s=118.2,
                out_per_s=12.9,
            ),
            endpoint("chassis", "dds", **recent, received=2_904_115, forwarded=4_031, in_per_s=423.6, out_per_s=0.4),
            endpoint(
                "offboard",
                "mqtt5",
                "degraded",
                **recent,
                reason="up://chassis/8001/1/8004 is refused: Not authorized",
                received=12_030,
                forwarded=730_001,
                in_per_s=1.2,
                out_per_s=96.4,
                waiting=1_203,
                lag_records=1_203,
                lag_s=641.0,
                retries=12,
                held=[held],
                held_count=1,
                dropped={"expired": 41, "spoofed": 2, "over_quota": 2_310},
                lost=2_310,
                authorities=["*"],
            ),
            endpoint(
                "diag",
                "mqtt5",
                "not ready",
                reason="connect to 10.0.0.7:1883: Connection refused",
                since=moment(185),
                waiting=88,
                lag_records=88,
                lag_s=185.0,
                last_out=moment(190),
            ),
        ],
        state="degraded",
        reason="",
        flows=[
            flow("body", "chassis", 12.5, 4_031),
            flow("chassis", "body", 12.9, 90_122),
            flow("body", "offboard", 31.4, 230_001),
            flow("chassis", "offboard", 65.0, 500_000),
            flow("offboard", "body", 0.4, 1_033),
            flow("offboard", "chassis", 0.0, 12),
            flow("body", "diag", 0.0, 310),
        ],
        logs=[
            {
                "name": "durable",
                "oldest_seq": 1_204_811,
                "newest_seq": 4_811_090,
                "bytes": 3_400_000_000,
                "limit_bytes": 8_000_000_000,
                "oldest": moment(500_000),
            },
            {
                "name": "volatile",
                "oldest_seq": 1,
                "newest_seq": 40_213,
                "bytes": 9_000_000,
                "limit_bytes": 33_000_000,
                "oldest": moment(300),
            },
        ],
        disk={"free_bytes": 21_400_000_000, "reserve_bytes": 67_108_864, "log_limit_bytes": 8_000_000_000},
        dead_letters={"stored": 14, "total": 57, "by_code": {"PERMISSION_DENIED": 9, "INVALID_ARGUMENT": 5}},
        paused=[{"topic": "up://body/8001/1/8010", "peer": "offboard", "from": ""}],
        follows=[{"endpoint": "body", "service": "up://ecu3/4/1/0", "state": "handed_over", "trouble": ""}],
        epochs=[{"group": "drive", "open": 3, "ended": 1_201, "incomplete": 2}],
        problems=[
            "endpoint offboard: up://chassis/8001/1/8004 is refused: Not authorized (210 records wait since 10 min)",
            "endpoint offboard: 2310 messages that were taken have been dropped from "
            f"{moment(5_400)} to {moment(4_900)} (over_quota 2310), most of phone7 2310; nobody has acknowledged that: "
            "it ends with 'up-streamer history acknowledge'",
            "endpoint diag: connect to 10.0.0.7:1883: Connection refused",
        ],
        notes=["up://body/8001/1/8010 is paused toward offboard"],
        certificates=[
            {"endpoint": "offboard", "setting": "tls.cert_file", "expires": moment(-9 * 86_400)},
            {"endpoint": "", "setting": "cert_file", "expires": moment(-400 * 86_400)},
        ],
    )


def letter(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "number": number,
        "time_ms": int((datetime.now(UTC).timestamp() - 60 * (100 - number % 100)) * 1000),
        "code": "PERMISSION_DENIED",
        "reason": "the broker refuses: Not authorized",
        "endpoint": "offboard",
        "id": f"0193a0f0-7b6c-7000-8000-{number:012x}",
        "source": "up://vin1/8001/1/8004",
        "sink": None,
        "payload_bytes": 310,
    } | changes


def subscription(topic: str, subscriber: str = "up://cloud/9001/1/0", **changes: Any) -> dict[str, Any]:
    return {"topic": topic, "subscriber": subscriber, "sample_period_ms": None, "usubscription": "vin1"} | changes


def message(seq: int, payload: Any, payload_as: str = "text", **changes: Any) -> dict[str, Any]:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    stored_ms = int(datetime.now(UTC).timestamp() * 1000) - (1_000 - seq) * 730
    return {
        "seq": seq,
        "log": "durable",
        "stored_ms": stored_ms,
        "id": f"0193a0f0-7b6c-7000-8000-{seq:012x}",
        "time_ms": stored_ms - 3,
        "type": "publish",
        "source": "up://body/8001/1/8002",
        "priority": "CS1",
        "payload_format": payload_as.upper(),
        "payload_as": payload_as,
        "payload_bytes": len(text) // 2 if payload_as == "hex" else len(text),
        "payload": payload,
    } | changes


class FakeGateway:
    """`status`, `letters`, `subscriptions` and `messages` are what it answers; `calls` are the operations that it was
    asked for. With `folder` the port has a token, in a file there."""

    def __init__(self, folder: Path | None = None, port: int = 0) -> None:
        self.status = quiet_status()
        self.letters: list[dict[str, Any]] = []
        self.subscriptions: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.refusing: set[str] = set()  # endpoints
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.token_file = None if folder is None else folder / "token"
        if self.token_file is not None:
            self.token_file.write_text(TOKEN)
        self.port = port

    async def __aenter__(self) -> Self:
        guard = AdminSection(token_file=self.token_file)
        self._http = HttpPort({"/status": self._status}, {}, self._operations(), guard)
        self.port = await self._http.open(f"127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def asked(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]

    def _status(self) -> tuple[int, str, bytes]:
        return 200, "application/json", json.dumps(self.status | {"now": moment()}).encode()

    def _operations(self) -> Operations:
        def noted(name: str, run: Any, *arguments: str) -> Operation:
            async def noting(given: Arguments) -> dict[str, Any]:
                self.calls.append((name, {key: given._given[key] for key in arguments if key in given}))
                answer: dict[str, Any] = run(self.calls[-1][1])
                return answer

            return Operation(noting, arguments)

        return Operations(
            {
                "dead_letters": noted("dead_letters", self._list, "limit", "before", "code", "endpoint", "since_ms"),
                "messages": noted("messages", self._last, "topic", "limit"),
                "pause": noted("pause", self._pause, *PAUSE_ARGUMENTS),
                "purge_letters": noted("purge_letters", self._purge, *LETTER_ARGUMENTS),
                "resend_letters": noted("resend_letters", self._resend, *LETTER_ARGUMENTS),
                "resume": noted("resume", self._resume, *PAUSE_ARGUMENTS),
                "subscriptions": noted("subscriptions", self._page, "topic", "subscriber", "limit", "after"),
            }
        )

    def _list(self, given: dict[str, Any]) -> dict[str, Any]:
        before = given.get("before", 1 << 60)
        found = sorted((one for one in self._fitting(given) if one["number"] < before), key=lambda one: -one["number"])
        shown = found[: given["limit"]]
        following = shown[-1]["number"] if len(found) > len(shown) else None
        return {"dead_letters": shown, "next": following, "stored": len(self.letters)}

    def _fitting(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        numbers = given.get("numbers")
        return [
            one
            for one in self.letters
            if (numbers is None or one["number"] in numbers)
            and given.get("code") in (None, one["code"])
            and given.get("endpoint") in (None, one["endpoint"])
            and one["number"] > given.get("after", 0)
        ]

    def _resend(self, given: dict[str, Any]) -> dict[str, Any]:
        """Two letters a call; the real one takes more."""
        fitting = sorted(self._fitting(given), key=lambda one: int(one["number"]))
        found = fitting[:2]
        refused = [one for one in found if one["endpoint"] in self.refusing]
        if not given["dry_run"]:
            self.letters = [one for one in self.letters if one not in found or one in refused]
        good, counts = "ready" if given["dry_run"] else "resent", dict[str, int]()
        results = [(one["number"], "refused" if one in refused else good) for one in found]
        for _, result in results:
            counts[result] = counts.get(result, 0) + 1
        return {
            "counts": counts,
            "letters": [
                {"number": number, "result": result, "reason": "Not authorized" if result == "refused" else ""}
                for number, result in results
            ],
            "next": found[-1]["number"] if len(fitting) > len(found) else None,
            "until": 1 << 40,
        }

    def _purge(self, given: dict[str, Any]) -> dict[str, Any]:
        found = self._fitting(given)
        if given["dry_run"]:
            return {"purged": 0, "would_purge": len(found)}
        self.letters = [one for one in self.letters if one not in found]
        return {"purged": len(found)}

    def _page(self, given: dict[str, Any]) -> dict[str, Any]:
        found = [one for one in self.subscriptions if given.get("topic", "") in one["topic"]]
        begin = int(given.get("after", 0))
        end = begin + given["limit"]
        return {
            "subscriptions": found[begin:end],
            "next": str(end) if end < len(found) else None,
            "total": len(self.subscriptions),
            "services": [{"name": "vin1", "healthy": True, "subscriptions": len(self.subscriptions)}],
        }

    def _last(self, given: dict[str, Any]) -> dict[str, Any]:
        if not given["topic"].startswith(("//", "up:")):
            raise invalid(f"topic: expected a uProtocol URI, got {given['topic']!r}")
        return {"topic": given["topic"], "messages": self.messages[: given["limit"]]}

    def _pause(self, given: dict[str, Any]) -> dict[str, Any]:
        self.status["paused"] = [*self.status["paused"], _pause_of(given)]
        return {"paused": []}

    def _resume(self, given: dict[str, Any]) -> dict[str, Any]:
        if _pause_of(given) not in self.status["paused"]:
            raise UStatusError(UCode.NOT_FOUND, "it is not paused")
        self.status["paused"] = [one for one in self.status["paused"] if one != _pause_of(given)]
        return {"paused": []}


def _pause_of(given: dict[str, Any]) -> dict[str, str]:
    everything = uris.format(uris.ANY)
    peer = given.get("peer") or given.get("endpoint") or given["rule_to"]
    return {"topic": given.get("topic", everything), "peer": peer, "from": given.get("rule_from", "")}
