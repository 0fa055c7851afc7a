"""python -m spark_ingest --config FILE: runs the job. The last line of its output is a JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from spark_ingest import pipeline
from storage import logs
from uprotocol.status import UStatusError

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2


def main(arguments: list[str] | None = None, prepare: Callable[[logs.Format], None] = lambda _: None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spark_ingest",
        description="Write the history of a streamer to Parquet. SIGTERM or Ctrl-C stops it cleanly; the next run "
        "continues at that point.",
        epilog="example: python -m spark_ingest --config ingest.toml",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="TOML with [source], [sink], [trigger] and [spark]"
    )
    parser.add_argument(
        "--log-format", choices=get_args(logs.Format), default="text", help="format of the log, on standard error"
    )
    given = parser.parse_args(arguments)
    prepare(given.log_format)
    try:
        config = pipeline.load(given.config)
    except UStatusError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    with pipeline.stop_on_signals() as stopping:
        try:
            report = pipeline.run(config, stopping)
        except UStatusError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_FAILED
    print(json.dumps(report._asdict() | {"stopped": stopping.is_set()}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(prepare=lambda log_format: logs.configure("info", log_format)))  # stdout is for the report
