"""The pages of the admin port, for monitors and people. http_port.py serves them.

/healthz  alive           /readyz    503 if a state is not ready, else 200: states with time and reason;
                                     `problems`: everything that is wrong; `notes`: other facts for the operator
/status   what each endpoint does, and why (status.py)
/metrics  for Prometheus  /vehicles  traffic of each source authority, one JSON object per line
/         a page for people: the files of page/, which show what /status and the operations answer
/operations/NAME          POST of the arguments as a JSON object: see operations.py. Only with admin.token_file

Admin: limits time and length -> HttpPort: limits and authenticates clients

Answers take at most a tenth of the loop's time: if clients ask more often, they get the last answer again. Long lists
are cut.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from streamer.config import AdminSection
from streamer.operating.states import NOT_READY, READY, cut, cut_line
from streamer.operation import Operations

if TYPE_CHECKING:
    from streamer.operating.http_port import HttpPort

VEHICLES_AT_ONCE: Final = 500  # written in one step of some milliseconds
LOOP_SHARE: Final = 0.1  # of the loop's time, for answers
LOOP_S_MAX: Final = 0.25  # ... and at once; the first answer of each page is always made


class AdminAnswer(NamedTuple):
    status: int
    type: str
    body: bytes


class Admin:
    """Serves one streamer at `address` (HOST:PORT). `guard`: token and certificate. `states`: see States.as_dict;
    without it, the state is ready if there are no problems. `status`: a StreamerStatus as JSON. The last answer of a
    page is repeated while answers take more than LOOP_SHARE of the loop's time."""

    def __init__(
        self,
        address: str | None,
        problems: Callable[[], list[str]],
        metrics: Callable[[], bytes] = lambda: b"",
        notes: Callable[[], list[str]] = list,
        vehicles: Callable[[], Iterable[dict[str, Any]]] = list,
        *,
        states: Callable[[], dict[str, Any]] = dict,
        status: Callable[[], bytes] = lambda: b"{}",
        guard: AdminSection | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._address, self.port = address, 0  # the port is known once it is open
        self._problems, self._metrics, self._notes, self._vehicles = problems, metrics, notes, vehicles
        self._states, self._status = states, status
        self._guard, self._operations = guard or AdminSection(), operations
        self._made: dict[str, AdminAnswer] = {}  # the last answer of each page
        self._left_s, self._refilled_at = LOOP_S_MAX, time.perf_counter()
        self._http: HttpPort | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Raises UStatusError: UNAVAILABLE if the port can't be opened, FAILED_PRECONDITION for a file of `guard`."""
        if self._address is None:
            return
        from streamer.operating.http_port import HttpPort  # imports aiohttp (0.1 s, 11 MiB) only if needed

        pages = {"/metrics": self.metrics, "/healthz": self.health, "/readyz": self.ready, "/status": self.status}
        self._http = HttpPort(pages, {"/vehicles": self.vehicles}, self._operations, self._guard)
        self.port = await self._http.open(self._address)

    async def change(self, address: str | None, guard: AdminSection) -> None:
        """Closes the port and serves `address`; None: nothing. Raises as `open`."""
        await self.close()
        self._http, self._address, self._guard, self.port = None, address, guard, 0
        await self.open()

    async def close(self) -> None:
        """Closes the port. May be called twice."""
        if self._http is not None:
            await self._http.close()

    # Pages

    def health(self) -> AdminAnswer:
        return AdminAnswer(200, "application/json", b'{"status":"alive"}\n')

    def metrics(self) -> AdminAnswer:
        return self._kept("metrics", lambda: AdminAnswer(200, "text/plain; version=0.0.4", self._metrics()))

    def ready(self) -> AdminAnswer:
        return self._kept("ready", self._make_ready)

    def status(self) -> AdminAnswer:
        return self._kept("status", lambda: AdminAnswer(200, "application/json", self._status() + b"\n"))

    def vehicles(self) -> Iterator[bytes] | None:
        """Returns the list in slices; None if requested too often: it is too long to be kept."""
        return self._slices() if self._may_work() else None

    def _slices(self) -> Iterator[bytes]:
        rest = iter(self._vehicles())
        while True:
            with self._working():
                part = b"".join(json.dumps(one).encode() + b"\n" for one in islice(rest, VEHICLES_AT_ONCE))
            if not part:
                return
            yield part

    def _make_ready(self) -> AdminAnswer:
        problems = cut(self._problems())
        report = {"status": NOT_READY if problems else READY, **self._states()}
        for state in (report["streamer"], *report["endpoints"].values()) if "endpoints" in report else ():
            state["reason"] = cut_line(state["reason"])
        status = 503 if report["status"] == NOT_READY else 200
        report |= {"problems": problems, "notes": cut(self._notes())}
        return AdminAnswer(status, "application/json", json.dumps(report).encode() + b"\n")

    def _kept(self, page: str, make: Callable[[], AdminAnswer]) -> AdminAnswer:
        if page not in self._made or self._may_work():
            with self._working():
                self._made[page] = make()
        return self._made[page]

    def _may_work(self) -> bool:
        now = time.perf_counter()
        self._left_s = min(self._left_s + LOOP_SHARE * (now - self._refilled_at), LOOP_S_MAX)
        self._refilled_at = now
        return self._left_s > 0

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._left_s -= time.perf_counter() - begin
