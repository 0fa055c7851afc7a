"""Reads the job's Parquet without Spark.

DIR/_spark_metadata (committed files) --> files --> pyarrow dataset    files of an interrupted batch are not read
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.dataset as ds

from spark_ingest.decode import SCHEMA
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

METADATA: Final = "_spark_metadata"
_COMPACT: Final = ".compact"
_TRIES: Final = 5  # Spark compacts every tenth batch; reading takes less time than ten batches
_PARTITIONS: Final = pa.schema([("authority", pa.string()), ("date", pa.date32())])
_FILES_IN: Final = len(_PARTITIONS) + 1  # DIR/authority=A/date=D/FILE


def committed_files(directory: Path) -> list[Path]:
    """The files of all committed batches. Raises UStatusError(NOT_FOUND) if no batch was committed there."""
    if not (directory / METADATA).is_dir():
        raise UStatusError(UCode.NOT_FOUND, f"{directory} has no {METADATA}: no batch was committed there yet")
    for _ in range(_TRIES):
        try:
            entries = _entries(directory / METADATA)
            break
        except FileNotFoundError:  # the running job has just replaced some by a compact one
            continue
    else:
        raise UStatusError(UCode.UNAVAILABLE, f"{directory / METADATA} changes faster than it can be read: try again")
    files: dict[Path, None] = {}
    for entry in entries:
        path = Path(unquote(urlparse(entry["path"]).path))
        if not path.is_relative_to(directory.resolve()):  # the directory was moved
            path = directory.resolve().joinpath(*path.parts[-_FILES_IN:])
        if entry.get("action", "add") == "add":
            files[path] = None
        else:
            files.pop(path, None)
    return list(files)


def _entries(log: Path) -> list[dict[str, Any]]:
    """The entries for added and deleted files, in order."""
    batches = {
        int(name.removesuffix(_COMPACT)): name
        for entry in log.iterdir()
        if (name := entry.name).removesuffix(_COMPACT).isdigit()
    }
    # a compact file repeats all entries before it
    begin = max((number for number, name in batches.items() if name.endswith(_COMPACT)), default=0)
    lines: list[str] = []
    for number in sorted(number for number in batches if number >= begin):
        lines += (log / batches[number]).read_text().splitlines()[1:]  # the first line is the version of the format
    return [json.loads(line) for line in lines]


def read(path: Path | str, columns: list[str] | None = None, filter: Any = None) -> pa.Table:
    """The rows, or some columns of those that match `filter` (a pyarrow expression). Raises as `committed_files`."""
    directory = Path(path)
    files = committed_files(directory)
    schema = pa.unify_schemas([SCHEMA, _PARTITIONS])
    if not files:
        return schema.empty_table().select(columns or schema.names)
    dataset = ds.dataset(
        [str(file) for file in files],
        schema=schema,
        format="parquet",
        partitioning=ds.partitioning(_PARTITIONS, flavor="hive"),
        partition_base_dir=str(directory.resolve()),
    )
    return dataset.to_table(columns=columns, filter=filter)
