"""The pages hold: the readings, the links, and the numbers that they take from the code."""

from __future__ import annotations

import importlib
import re
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from history.file.rows import SCHEMA_VERSION
from streamer.building import MemoryLimits
from streamer.config import loads
from tools.house import PRODUCT

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve()
READINGS = ROOT / "docs" / "readings.md"
MAP = ROOT / "docs" / "index.md"
README_PAGES_MAX = 5
SKIPPED = {READINGS, HERE, ROOT / "docs" / "spec-coverage.md"}  # the list itself, and what is made of other files
FOLDERS = ("docs", "tests", "tools", "deploy", "examples", "campaigns", ".github")
TEXT = {".py", ".md", ".toml", ".proto", ".yml", ".conf", ".service"}
PICTURE_BYTES_MAX = 150_000
NUMBER = re.compile(r"\b[A-Z]-[0-9]+\b")
ROW = re.compile(r"^\| ([A-Z]-[0-9]+) \|.*\| ([^|]*) \|$", re.MULTILINE)


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "deploy" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def used() -> dict[str, set[str]]:
    """Each number of a reading, and the files that name it."""
    found: dict[str, set[str]] = defaultdict(set)
    files = [path for folder in (*FOLDERS, *PRODUCT) for path in (ROOT / folder).rglob("*") if path.suffix in TEXT]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        if path not in SKIPPED and path.name != "CHANGELOG.md":
            for number in NUMBER.findall(path.read_text(encoding="utf-8")):
                found[number].add(path.relative_to(ROOT).as_posix())
    return found


def rows() -> dict[str, str]:
    """Number of a reading -> its last column."""
    found = ROW.findall(READINGS.read_text(encoding="utf-8"))
    assert len({number for number, _ in found}) == len(found), "a number has two rows"
    return dict(found)


def test_every_reading_that_is_named_has_a_row_and_every_row_is_named() -> None:
    named = used()
    missing = {number: sorted(files) for number, files in named.items() if number not in rows()}
    assert not missing, f"docs/readings.md has no row for {missing}"
    assert not set(rows()) - set(named), "rows that nothing in the project names"


def test_a_reading_lives_where_its_row_says() -> None:
    named = used()
    for number, cell in rows().items():
        files = re.findall(r"`([^`]+)`", cell)
        assert files, f"{number} lives nowhere"
        assert set(files) <= named[number], f"{number} is not named in {set(files) - named[number]}"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}, and there is no such heading"


@pytest.mark.parametrize(
    "page", [page for page in pages() if page not in SKIPPED], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_files_that_are_named_are_there(page: Path) -> None:
    """Names with a folder of ours before them, as code or in the text. (DDS topics and keys of Zenoh begin with
    uprotocol/, too.) Not those in rows of what is planned."""
    folders = "|".join(name for name in (*FOLDERS, *PRODUCT) if name != "uprotocol")
    text = re.sub(r"^\|.*\| planned: .*\|$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name in set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w)", text)):
        assert (ROOT / name).exists() or (page.parent / name).exists(), (
            f"{page.name} names {name}, which does not exist"
        )


def linked(text: str) -> list[str]:
    """The files that a text links to, without the headings in them."""
    return [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def test_the_map_has_each_page_once() -> None:
    """Of the decisions (docs/adr) it has the folder."""
    pages = {path.relative_to(MAP.parent) for path in MAP.parent.rglob("*.md")} - {Path(MAP.name)}
    expected = ["adr", *(page.as_posix() for page in pages if page.parts[0] != "adr")]
    targets = [target for target in linked(MAP.read_text(encoding="utf-8")) if not target.startswith("../")]
    assert sorted(targets) == sorted(expected)


def test_the_map_is_in_the_sections_of_the_site() -> None:
    heads = re.split(r"^## (.*)$", MAP.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    rows = re.compile(r"^\| \[([^\]]+)\]\(([^)]+\.md)\) \|", re.MULTILINE)
    first, *sections = tomllib.loads((MAP.parent / "site.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert list(first.values()) == [MAP.name]
    shown = [
        (name, [page for row in pages for page in row.items()]) for each in sections for name, pages in each.items()
    ]
    assert shown == [(name, rows.findall(text)) for name, text in zip(heads[::2], heads[1::2], strict=True)]


def test_the_readme_is_no_second_map() -> None:
    """It links to the map and a few pages beside the claims, each of which names its proof."""
    claims, others = [], []
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        pages = [target for target in linked(section) if target.startswith("docs/")]
        (claims if section.startswith("What you get") else others).extend(pages)
    assert claims
    assert "docs/index.md" in others
    assert len(set(others)) <= README_PAGES_MAX, sorted(set(others))


MIB, KIB = 1 << 20, 1 << 10
# page, its words with # for the number (each # the next constant), how many units of the constant the number counts,
# and the constants
NUMBERS: list[tuple[str, str, float, list[str]]] = [
    ("architecture", "the volatile log (# records behind)", 1, ["streamer.walk.flow:LAG_RECORDS_MAX"]),
    ("architecture", "and # every 20 ms", 1, ["streamer.walk.flow:SHARE_RECORDS"]),
    ("architecture", "every # ms while we use less", 0.001, ["streamer.walk.flow:MEASURE_S"]),
    ("architecture", "less than # of a processor", 1, ["streamer.walk.flow:BUSY"]),
    ("architecture", "can't send again, for up to # s", 1, ["streamer.walk.flow:HOLD_S"]),
    ("architecture", "waits, # s at most, until each linked node", 1, ["transports.zenoh.transport:FLUSH_S_MAX"]),
    ("architecture", "takes up to # messages", 1, ["transports.zenoh.receiver:HELD_MESSAGES_MAX"]),
    ("architecture", "and # MiB of large ones", MIB, ["transports.arrivals:BYTES_MAX"]),
    ("benchmarks", "After the last one the subscriber listens on for # s", 1, ["campaigns.bench.networks:QUIET_S"]),
    ("benchmarks", "as take the lane some # s", 1, ["campaigns.bench.measure:RUN_S"]),
    ("benchmarks", "**At # messages/s**, for # s", 1, ["campaigns.bench.measure:LATENCY_RATE",
        "campaigns.bench.measure:LATENCY_S"]),
    ("benchmarks", "up to # unacknowledged, since a client library", 1, ["campaigns.bench.mqtt:WINDOW_MESSAGES_MAX"]),
    ("benchmarks", "a streamer each, # s", 1, ["campaigns.bench.costs.disk:SHORT_S"]),
    ("benchmarks", "Up to # topics, or with `--seconds #` and more, each topic is published # times", 1, [
        "campaigns.bench.costs.topics:WARM_UP_TOPICS_MAX", "campaigns.bench.costs.topics:LONG_S",
        "campaigns.bench.costs.topics:WARM_UP_ROUNDS",
    ]),

        ("benchmarks",
        "destination's broker # ms away each way (campaigns/bench/far.py), #/s offered, `in_flight_max = #`", 1, [
        "campaigns.bench.costs.brokers:FAR_MS", "campaigns.bench.costs.brokers:OFFERED_PER_S",
        "campaigns.bench.costs.brokers:IN_FLIGHT_MAX",
    ]),
    ("benchmarks", '"Flat" is # times', 1, ["campaigns.bench.targets:FLAT"]),
    ("configuration", "for up to # s before something is dropped", 1, ["streamer.walk.flow:HOLD_S"]),
    ("configuration", "Without both, # for an endpoint with a `suffix`", 1, ["streamer.building:PACE_OUTSIDE_PER_S"]),
    ("configuration", "# seconds of it may come at once, and # seconds of what the durable log keeps", 1, [
        "streamer.walk.ledger:BURST_S", "streamer.walk.ledger:BACKLOG_S",
    ]),
    ("following", "At most # histories are followed", 1, ["streamer.following.follows:HISTORIES_FOLLOWED_MAX"]),
    ("following", "for # s, doubling to # s, after three misses", 1, [
        "history.reading.following:REST_S_MIN", "history.reading.following:REST_S_MAX",
    ]),
    ("following", "(# to # s, # s at first)", 1, [
        "history.reading.following:QUIET_S_MIN", "history.reading.following:QUIET_S_MAX",
        "history.reading.following:QUIET_S_FIRST",
    ]),
    ("following", "long poll outstanding for up to # topics", 1, ["history.reading.feed:FEEDS_MAX"]),
    ("following", "at most # of them and some # MiB", 1, [
        "history.publisher:QUEUE_MESSAGES_MAX", "history.publisher:PUBLISHER_TAIL_BYTES_MAX/2097152",
    ]),
    ("following", "reaches back (# MiB or # days", 1, [
        "history.publisher:PUBLISHER_RETENTION_BYTES/1048576", "history.log.log:RETENTION_MS/86400000",
    ]),
    ("following", "at most # publishers of one authority", 1, ["streamer.following.follows:PUBLISHERS_OF_ONE_MAX"]),
    ("following", "has answered nothing for # s", 1, ["streamer.following.sorting:SILENT_S"]),
    ("following", "At the start, and every # s or so", 1, ["history.publisher:PUBLISHER_ANNOUNCE_S"]),
    ("following", "follows the announced history, after # s at most", 1, ["streamer.following.follows:BEGIN_S_MAX"]),
    ("following", "every # s until it has taken over, every # s then", 1, [
        "streamer.following.handover:ANNOUNCE_S", "streamer.following.handover:ANNOUNCE_TAKEN_S",
    ]),
    ("following", "# random bytes, the name by which", 1, ["history.service.followers:FOLLOWER_BYTES"]),
    ("following", "at most # in one Command", 1, ["history.service.matches:PATTERNS_MAX"]),
    ("following", "# s to # days; 0: # s. A poll", 1_000, [
        "history.service.followers:LEASE_MS_MIN", "history.service.poll:LEASE_MS_MAX/86400",
        "history.service.followers:LEASE_MS_DEFAULT",
    ]),
    ("following", "What it waits is the service's (# s)", 1_000, ["history.service.followers:PUSH_WAIT_MS"]),
    ("following", "at most # MiB, and # frames", 1, [
        "history.service.followers:WINDOW_BYTES_MAX/1048576", "history.service.followers:WINDOW_FRAMES_MAX",
    ]),
    ("following", "a notification with a ttl of # s", 1_000, ["history.service.followers:FRAME_TTL_MS"]),
    ("following", "| followers | # | a quarter |", 1, ["history.service.followers:FOLLOWERS_MAX"]),
    ("following", "| # with 512 MiB | a quarter |", 1, ["history.service.followers:TOPICS_MAX"]),
    ("following", "of one follower | # |", 1, ["history.service.matches:WILDCARD_PATTERNS_MAX"]),
    ("history", "without a record for # minutes", 60, ["history.log.streams:FORGET_AFTER_S"]),
    ("history", "looked for every # s", 1, ["history.log.streams:SWEEP_S"]),
    ("history", "An eighth of the capacity (1/#)", 1, ["history.log.streams:RESERVE_SHARE"]),
    ("history", "at most # topics by default", 1, ["history.log.streams:STREAMS_MAX"]),
    ("history", "of at most # authorities", 1, ["history.log.streams:FORGOTTEN_AUTHORITIES_MAX"]),
    ("history", "at most #. The service gives one", 1, ["history.records.witness:WITNESSES_MAX"]),
    ("history", "(# records, 768 KiB, 60 s)", 1, ["history.service.poll:POLL_RECORDS_MAX"]),
    ("history", "(10,000 records, # KiB, 60 s)", KIB, ["history.service.poll:POLL_BYTES_MAX"]),
    ("history", "(10,000 records, 768 KiB, # s)", 1_000, ["history.service.poll:POLL_WAIT_MS_MAX"]),
    ("history", "# ms at least, are left for the way back", 1, ["history.service.poll:TTL_MARGIN_MS"]),
    ("history", "(# patterns, # of them with wildcards", 1, [
        "history.service.matches:PATTERNS_MAX", "history.service.matches:WILDCARD_PATTERNS_MAX",
    ]),
    ("history", "more than # logs", 1, ["history.service.poll:POSITIONS_MAX"]),
    ("history", "at most # topics and # KiB of them", 1, [
        "history.service.service:PAGE_TOPICS_MAX", "history.service.service:PAGE_BYTES_MAX/1024",
    ]),
    ("history", "where more than # match", 1, ["history.service.service:TOPICS_AT_ONCE_MAX"]),
    ("history", "has at most # of the # names", 1, [
        "history.service.consumers:CONSUMERS_MAX/4", "history.service.consumers:CONSUMERS_MAX",
    ]),
    ("history", "# requests at once", 1, ["history.service.service:REQUESTS_RUNNING_MAX"]),
    ("history", "(and # MiB of them), # polls that wait, # that read", 1, [
        "uprotocol.communication.rpc_server:REQUESTS_BYTES_MAX/1048576", "history.service.service:POLLS_WAITING_MAX",
        "history.service.service:SEATS_MAX",
    ]),
    ("history", "at most # wait to be sent", 1, ["uprotocol.communication.rpc_server:RESPONSES_WAITING_MAX"]),
    ("history", "one per # topics, of which # may have wildcards", 1, [
        "history.reading.feed:FEEDS_MAX", "history.service.matches:WILDCARD_PATTERNS_MAX",
    ]),
    ("history", "# KiB of messages wait for it", KIB, ["history.reading.feed:FEED_BYTES_MAX"]),
    ("history", "a file above # MiB is not checked whole", MIB, ["history.file.rows:CHECK_BYTES_MAX"]),
    ("history", "waits for others, at most # ms", 1, ["history.file.writer:GATHER_MS"]),
    ("history", "has brought, or # records", 1, ["history.file.writer:GATHER_RECORDS"]),
    ("history", "as soon as they have moved by # records", 1, ["history.file.writer:CURSORS_RECORDS"]),
    ("history", "written alone: after # s", 1, ["history.file.writer:CURSORS_IDLE_S"]),
    ("history", "the tail holds at most # MiB", MIB, ["history.log.log:TAIL_BYTES_MAX"]),
    ("history", "has the first # records", 1, ["history.records.chunk:PASSED_RECORDS_MAX"]),
    ("history", "(a sixteenth, # to # MiB)", MIB, [
        "history.file.retention:WAL_BYTES_MIN", "history.file.retention:WAL_BYTES_MAX",
    ]),
    ("history", "(a sixteenth, at most # MiB)", MIB, ["history.file.retention:TRANSACTION_BYTES_MAX"]),
    ("usubscription", "the ids of the last # commands", 1, ["usubscription.store.tables:HANDLED_MAX"]),
    ("usubscription", "at most # changes together", 1, ["usubscription.store.database:OUTBOX_CHANGES_MAX"]),
    ("usubscription", "tried again after # s doubling to # s", 1_000, [
        "usubscription.notifier:NOTIFIER_RETRY_FIRST_MS", "usubscription.notifier:NOTIFIER_RETRY_MAX_MS",
    ]),
    ("usubscription", "Topics don't wait for each other: # of an authority are in flight at first, one more with each "
                      "answer up to #", 1, [
        "usubscription.remote:WINDOW_FIRST", "usubscription.remote:WINDOW_MAX",
    ]),
    ("usubscription", "with back-off (# s doubling to # s", 1_000, [
        "usubscription.state:RETRY_FIRST_MS", "usubscription.state:RETRY_MAX_MS",
    ]),
    ("usubscription", "(`STORE.partners`, at most #)", 1, ["usubscription.audit:PARTNERS_MAX"]),
    ("usubscription", "at most # entries", 1, ["usubscription.service:PAGE_ENTRIES_MAX"]),
    ("usubscription", "# subscriptions, # registrations for topics and # for everything, # changes not yet notified", 1,
     [
        "usubscription.store.database:SUBSCRIPTIONS_MAX", "usubscription.store.database:REGISTRATIONS_MAX",
        "usubscription.store.database:REGISTERED_FOR_ALL_MAX", "usubscription.store.database:OUTBOX_CHANGES_MAX",
    ]),
    ("usubscription", "The details of a subscription have at most # bytes, and each # of them", 1, [
        "usubscription.store.database:DETAILS_BYTES_MAX", "uprotocol.communication.shares:UNIT_BYTES",
    ]),
    ("usubscription", "# requests waiting for the store", 1, ["storage.runtime:WAITING_MAX"]),
    ("usubscription", "with up to # subscribers is answered from memory", 1,
        ["usubscription.store.store:SUBSCRIBERS_MAX"]),
    ("readings", "the service decides, # entries", 1, ["usubscription.service:PAGE_ENTRIES_MAX"]),
    ("mqtt5", "waits, unacknowledged, for # s", 1_000, ["transports.mqtt5.receiving:UNCLAIMED_MS_MAX"]),
    ("mqtt5", "connection that has lasted # s", 1, ["transports.mqtt5.link:STEADY_S"]),
    ("mqtt5", "Three connections in a row that are lost within # s", 1, ["transports.mqtt5.link:BRIEF_S"]),
    ("configuration", "that came within a minute, # at least", 1, ["streamer.operating.states:MESSAGES_MIN"]),
    ("configuration", "Beyond # such lines of a kind", 1, ["storage.logs:CHANGE_LINES_MAX"]),
    ("mqtt5", "beyond # waiting", 1, ["transports.mqtt5.receiving:UNACKNOWLEDGED_MESSAGES_MAX"]),
    ("mqtt5", "with 8,192 or # MiB of them", 1, ["transports.mqtt5.receiving:INBOX_BYTES_MAX/1048576"]),
    ("mqtt5", "After # s it is read nevertheless", 1, ["transports.mqtt5.receiving:PRESSED_S_MAX"]),
    ("mqtt5", "and # bytes for what a broker adds", 1, ["transports.mqtt5.link:BROKER_ADDS_BYTES"]),
    ("mqtt5", "with every answer up to #:", 1, ["transports.mqtt5.window:NEAR_MESSAGES"]),
    ("mqtt5", "and # MiB of those over 4 KiB", 1, ["transports.mqtt5.window:IN_FLIGHT_BYTES_MAX/1048576"]),
    ("mqtt5", "in order, after # ms to 1 s", 1, ["transports.arrivals:REDELIVERY_MS_MIN"]),
    ("mqtt5", "in order, after 5 ms to # s", 1_000, ["transports.arrivals:REDELIVERY_MS_MAX"]),
    ("zenoh", "the first batch waits until somebody is known to listen to its first key, for # s at most", 1, [
        "transports.zenoh.sender:SETTLE_S_MAX",
    ]),
    ("zenoh", "# publishes and # MiB of large ones", 1, [
        "transports.zenoh.receiver:HELD_MESSAGES_MAX", "transports.zenoh.receiver:ARRIVALS_BYTES_MAX/1048576",
    ]),
    ("zenoh", "of requests and responses #", 1, ["transports.arrivals:MESSAGES_MAX"]),
    ("zenoh", "see below: # s at most, and # s more for Zenoh itself", 1, [
        "transports.zenoh.transport:FLUSH_S_MAX", "transports.zenoh.transport:LEAVE_S_MAX",
    ]),
    ("zenoh", "is given # s after the last message", 1, ["transports.zenoh.sender:LINGER_S"]),
    ("zenoh", "publishers declared at once | #, each after # messages", 1, [
        "transports.zenoh.sender:PUBLISHERS_MAX", "transports.zenoh.sender:PUTS_BEFORE_DECLARED",
    ]),
    ("dds-mapping", "KEEP_ALL, # samples (up to #,", 1, [
        "transports.dds.link:READER_SAMPLES_MIN", "transports.dds.link:READER_SAMPLES_MAX",
    ]),
    ("dds-mapping", "free capacity in writers by # messages", 1, ["transports.dds.writers:WRITES_WAITING_MAX"]),
    ("dds-mapping", "TRANSIENT_LOCAL, KEEP_LAST # for the writer", 1, ["transports.dds.roll_call:SEEN_DEPTH"]),
    ("dds-mapping", "at least #; infinite without ttl", 1, ["transports.dds.mapping:LIFESPAN_MS_MIN"]),
    ("dds-mapping", "nothing new for `discovery_quiet_ms` (#), after # s", 1, [
        "transports.dds.config:DISCOVERY_QUIET_MS", "transports.dds.readers:DISCOVERY_S_MAX",
    ]),
    ("dds-mapping", "announced the new reader, after # s at the latest", 1, ["transports.dds.readers:SEEN_S"]),
    ("dds-mapping", "each of our listeners waits # s for it in vain", 1, ["transports.dds.readers:SEEN_S"]),
    ("dds-mapping", "for its lease (`lease_ms`, # s)", 1_000, ["transports.dds.config:PARTICIPANT_LEASE_MS"]),
    ("dds-mapping", "at least every # s (Cyclone by itself", 1_000, ["transports.dds.config:ANNOUNCED_MS_MAX"]),
    ("dds-mapping", "takes up to # samples at a time", 1, ["transports.dds.link:TAKE_SAMPLES_MAX"]),
    ("dds-mapping", "may stand for up to # addresses", 1, ["transports.dds.config:ADDRESSES_PER_PEER_MAX"]),
    ("dds-mapping", "or `HOST:PORT`; # at most", 1, ["transports.dds.config:PEERS_MAX"]),
]  # fmt: skip


def constant(name: str) -> float:
    module, _, rest = name.partition(":")
    attribute, _, divisor = rest.partition("/")
    value: float = getattr(importlib.import_module(module), attribute)
    return value / int(divisor or 1)


@pytest.mark.parametrize(
    ("page", "words", "unit", "names"), NUMBERS, ids=[f"{page}: {words[:40]}" for page, words, _, _ in NUMBERS]
)
def test_a_number_is_the_codes(page: str, words: str, unit: float, names: list[str]) -> None:
    pattern = r"\s+".join(re.escape(word).replace(r"\#", r"([\d][\d,.]*\d|\d)") for word in words.split())
    found = re.search(pattern, (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert found is not None, f"docs/{page}.md does not say {words!r} any more: change it here as well"
    assert [float(text.replace(",", "")) * unit for text in found.groups()] == [constant(name) for name in names]


def test_the_pauses_between_two_tries_to_connect_are_the_codes() -> None:
    said = "after {}, {}, {}, {}, then every {} ms".format(
        *importlib.import_module("transports.mqtt5.link").RECONNECT_MS
    )

    assert said in (ROOT / "docs" / "mqtt5.md").read_text(encoding="utf-8")


def test_every_metric_and_reason_is_in_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## Metrics")[2]
    families = importlib.import_module("streamer.operating.metrics").FAMILIES
    metrics = {f"up_streamer_{name}" + "_total" * ("Counter" in kind.__name__) for name, (kind, *_) in families.items()}
    assert len(metrics) > 20
    assert metrics == set(re.findall(r"`(up_streamer_\w+)`", table))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "streamer").rglob("*.py"))
    reasons = set(re.findall(r"""dropped\["(\w+)"\]|reason="(\w+)\"""", sources))
    assert reasons
    assert not [reason for pair in reasons for reason in pair if reason and f"`{reason}`" not in table]


def test_no_page_installs_our_bare_name_from_an_index() -> None:
    """A checkout or a wheel has a path; our bare name would be somebody else's package, if there ever is one."""
    found_text = re.compile(
        r"""pip (?:install|wheel)(?![^\n]*--no-index)[^\n`]*?[ '"](up[-_]streamer)(?=[\['"\s`]|$)""", re.MULTILINE
    )
    assert found_text.search("pip install 'up-streamer[zenoh]'")
    assert found_text.search("pip install -U up-streamer")
    assert not found_text.search("pip install './up_streamer-0.2.0-py3-none-any.whl[zenoh]'")
    files = [
        path for folder in ("deploy", "examples", *PRODUCT) for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    for path in {*pages(), *(one for one in files if one.suffix in TEXT or one.name in ("Dockerfile", "compose.yaml"))}:
        text = re.sub(r"\s*[\"']?\n\s*[\"']", "", path.read_text(encoding="utf-8"))  # a sentence of code over two lines
        assert not (found := found_text.search(text)), f"{path.relative_to(ROOT)}: {found and found[0]}"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


HOME = '[[endpoint]]\nname = "home"\ntransport = "local"\nauthorities = ["vehicle1"]\n'


def zenoh_parts(names: tuple[str, ...]) -> str:
    return "".join((ROOT / "deploy" / "zenoh" / f"{name}.toml").read_text(encoding="utf-8") for name in names)


EXAMPLES: list[tuple[str, str]] = [
    ("docs/tutorials/gateway.md", blocks("docs/tutorials/gateway.md")[0]),
    (
        "docs/mqtt5.md",
        HOME + textwrap.dedent(re.findall(r"(?:^    .*\n)+", (ROOT / "docs/mqtt5.md").read_text(), re.MULTILINE)[0]),
    ),
    *zip(
        ("docs/following.md: the origin", "docs/following.md: the follower"),
        (
            HOME + blocks("docs/following.md")[0],
            HOME.replace("vehicle1", "hub") + HOME.replace("home", "vehicles") + blocks("docs/following.md")[1],
        ),
        strict=True,
    ),
    ("docs/spark.md: a vehicle", HOME + blocks("docs/spark.md")[1]),
    ("docs/dds-mapping.md", HOME.replace('"local"', '"dds"') + blocks("docs/dds-mapping.md")[0]),
    *[
        (f"deploy/zenoh {' and '.join(parts)}", HOME.replace('"local"', '"zenoh"') + zenoh_parts(parts))
        for parts in [
            ("gateway-by-certificate", "hosts-rules"),
            ("gateway-by-user", "hosts-rules"),
            ("host-by-certificate",),
            ("host-by-user",),
            ("programs",),
        ]
    ],
    *[
        (path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for folder in ("deploy/docker", "examples/vehicle-cloud", "examples/following", "examples/epochs")
        for path in sorted((ROOT / folder).rglob("*.toml"))
    ],
]


@pytest.mark.parametrize(("where", "text"), EXAMPLES, ids=[where for where, _ in EXAMPLES])
def test_an_example_is_a_configuration(where: str, text: str) -> None:
    assert loads(text, where).authority


def test_followers_have_the_room_that_the_page_says() -> None:
    assert (
        MemoryLimits(512 << 20).followed_topics_max == importlib.import_module("history.service.followers").TOPICS_MAX
    )


def test_the_example_of_the_service_is_one() -> None:
    config = importlib.import_module("usubscription.__main__").validate(
        tomllib.loads(blocks("docs/usubscription.md")[0]), "the page"
    )
    assert config.authority == "cloud"


def test_the_example_of_the_spark_job_is_one(tmp_path: Path) -> None:
    (tmp_path / "ingest.toml").write_text(blocks("docs/spark.md")[0])
    assert importlib.import_module("spark_ingest.pipeline").load(tmp_path / "ingest.toml").trigger.available_now


def test_what_fits_into_the_memory_is_the_codes() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d,]+)(?: \(the default\))? \| ([\d,]+) \| ([\d,]+) \| [\d,]+ \| ([\d,]+) \|$", page, re.MULTILINE
    )
    assert len(rows) >= 5, "docs/security.md has lost its table of topics"
    for row in rows:
        memory_mib, *said = (int(text.replace(",", "")) for text in row)
        limits = MemoryLimits(memory_mib << 20)
        assert said == [limits.topics_max, limits.authority_topics_max, limits.streams_cached_max], memory_mib


def test_the_page_on_the_history_names_the_format_of_the_log() -> None:
    page = (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
    assert re.findall(r"format of the file has version (\d+)", page) == [str(SCHEMA_VERSION)]


def test_pictures_are_small() -> None:
    """Each clone has all of them, and each reader of a page loads its own."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").glob("*.*")}
    assert len(sizes) >= 10
    assert {name: size for name, size in sizes.items() if size > PICTURE_BYTES_MAX} == {}
