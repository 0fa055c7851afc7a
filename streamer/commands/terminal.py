"""Functions that commands share: print, turn errors into a line and an exit code, stop at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import structlog
import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from storage import logs
from uprotocol.status import UStatusError, code_name
from uprotocol.v1.ucode_pb2 import UCode

SWITCH_INTERVAL_S: Final = 0.001  # the longest that the loop and threads of transports wait for each other
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2  # the command line is wrong
EXIT_CONFIG: Final = os.EX_CONFIG  # of `run`: its file is wrong; systemd does not restart it
EXIT_SIGNALLED: Final = 128  # and the number of the signal: 130 after Ctrl-C, 143 after SIGTERM

out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)

T = TypeVar("T")


class Misuse(UStatusError):
    """INVALID_ARGUMENT: the command line is wrong. The exit code is EXIT_USAGE, as for what typer refuses."""

    def __init__(self, what: str) -> None:
        super().__init__(UCode.INVALID_ARGUMENT, what)


@contextlib.contextmanager
def errors(exit_code: int = EXIT_FAILED, log_format: logs.Format = "text") -> Iterator[None]:
    """Turn a UStatusError into a line and an exit code."""
    try:
        yield
    except UStatusError as error:
        if log_format == "json":  # standard error is a log of JSON lines only
            structlog.get_logger().error("the process ends", code=code_name(error.code), error=error.message)
        else:
            err.print(f"[bold red]error[/] {code_name(error.code)}:", end=" ")
            err.print(plain_lines(error.message), markup=False)
        raise typer.Exit(EXIT_USAGE if isinstance(error, Misuse) else exit_code) from None


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it ends, or until Ctrl-C or SIGTERM: then the exit code is 128 and the signal's number."""
    came: list[int] = []

    async def until_signalled() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        return await task

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return asyncio.run(until_signalled())
    except asyncio.CancelledError:
        raise typer.Exit(EXIT_SIGNALLED + (came or [signal.SIGINT])[0]) from None


def tell(as_json: bool, data: dict[str, Any], line: str) -> None:
    """Print `data` as JSON, or `line`."""
    print(json.dumps(data) if as_json else plain_lines(line), flush=True)


def tell_all(as_json: bool, rows: Iterable[dict[str, Any]], title: str, columns: Sequence[str]) -> None:
    """Print each row as a JSON object, or `columns` of all as a table."""
    if not as_json:
        show(title, columns, [[row.get(column) for column in columns] for row in rows])
        return
    for row in rows:
        print(json.dumps(row))


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, safe for foreign text: see `tabled`. Nothing if it has no columns."""
    if columns:
        out.print(tabled(title, columns, rows, width()), crop=False)


def width() -> int | None:
    """Returns the width of the terminal; None: standard output is none."""
    return out.width if sys.stdout.isatty() else None


def lined(lines: Iterable[str]) -> Text:
    """Returns lines, safe for foreign text."""
    is_whole = not sys.stdout.isatty()
    return Text("\n".join(map(plain, lines)), no_wrap=is_whole, overflow="ignore" if is_whole else "fold")


def tabled(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None) -> RenderableType:
    """Returns a table for a terminal of that width; in a narrow one each row is a card, a line for each cell. For None,
    which is a pipe or a file, each row is one line that is never folded, so that other programs can filter it. None is
    an empty cell, and "-" where columns are only told apart by spaces."""
    cells = [[plain("" if cell is None else str(cell)) for cell in row] for row in rows]
    lengths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    if width is None:
        lines = [*([title] if title else []), _spaced(columns, lengths), *(_spaced(row, lengths) for row in cells)]
        return lined(lines)
    if sum(lengths) + 3 * len(lengths) + 1 > width:
        cards = ["\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True) if cell) for row in cells]
        return Text("\n\n".join([*([title] if title else []), *cards, ""]))
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _spaced(cells: Sequence[str], lengths: Sequence[int]) -> str:
    padded = [
        (cell or "-") + " " * (length - cell_len(cell or "-")) for cell, length in zip(cells, lengths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def plain(text: str) -> str:
    """Returns `text` with control characters escaped: foreign text can't control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def plain_lines(text: str) -> str:
    """Returns `text` with control characters escaped, but for the ends of its lines."""
    return "\n".join(map(plain, text.split("\n")))


def moment(ms: int) -> str:
    """Returns Unix milliseconds as readable UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000))
