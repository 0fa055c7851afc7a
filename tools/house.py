"""The product, counted: lines, classes, names and code that stand twice, import circles, and how far messages walk.

python -m tools.house [--tree DIR] [--walks] [--names]

tree -> lines of each package (generated code aside), lines over 120 columns
     -> runs of ten lines that stand in two files
     -> names of classes and type aliases that stand in two files, and of constants with different values
     -> objects of more than OBJECT_LINES_MAX lines: a class with those that it inherits from
     -> circles of imports, counting imports inside functions and those for types alone: of modules, and of rooms
        (a room is a folder, or a module at the root of a package), and pairs of rooms that import each other
--walks: the functions and files that one message enters (tools/walks.py)

tests/test_house.py holds the ceilings.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import io
import logging
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path, PurePath
from typing import Final

import structlog

PRODUCT: Final = (
    "uprotocol",
    "transports",
    "storage",
    "history",
    "usubscription",
    "usubscription_client",
    "streamer",
    "spark_ingest",
    "pyspark_uprotocol",
)
COLUMNS_MAX: Final = 120
SHARED_LINES: Final = 10
OBJECT_LINES_MAX: Final = 400
LAYOUT: Final = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.COMMENT}


def sources(tree: Path) -> Iterator[Path]:
    """The hand-written files of the product."""
    for package in PRODUCT:
        yield from (path for path in sorted((tree / package).rglob("*.py")) if not path.stem.endswith("_pb2"))


def code_lines(text: str) -> int:
    """Lines without blank lines, comments and strings that stand alone (docstrings)."""
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        elif token.type == tokenize.STRING and begins:
            begins = False  # a docstring, or a string that begins a line; the latter is rare
        elif token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
            begins = False
    return len(lines)


def line_count(tree: Path) -> int:
    """Lines of the product, with blank lines and comments."""
    return sum(path.read_text().count("\n") for path in sources(tree))


def shared_runs(tree: Path) -> list[str]:
    """Places where SHARED_LINES lines in a row (no blank lines, comments, imports) stand twice, word for word."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sources(tree):
        numbered = [
            (number, line.strip())
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip() and not line.strip().startswith(("#", "import ", "from "))
        ]
        for begin in range(len(numbered) - SHARED_LINES + 1):
            run = tuple(line for _, line in numbered[begin : begin + SHARED_LINES])
            places[run].append(f"{path.relative_to(tree)}:{numbered[begin][0]}")
    shown: dict[tuple[str, ...], str] = {}  # by files: a longer run is shown once
    for where in places.values():
        if len(where) > 1:
            shown.setdefault(tuple(place.rsplit(":", 1)[0] for place in where), " ~ ".join(where))
    return list(shown.values())


@cache
def parsed(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(), str(path))
    gc.freeze()  # all trees are kept: to walk them again and again took two thirds of the time
    return tree


def _names(module: ast.Module) -> Iterator[str]:
    """Classes, nested ones too, and type aliases of the module's own level."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() | ast.Name()) if (
                name.lstrip("_")[:1].isupper() and not name.isupper()
            ):
                yield name


def names_twice(tree: Path) -> dict[str, list[str]]:
    """Names of classes and type aliases that stand in more than one file: name -> files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(tree):
        for name in sorted(set(_names(parsed(path)))):
            found[name].append(str(path.relative_to(tree)))
    return {name: files for name, files in sorted(found.items()) if len(files) > 1}


def constants_twice(tree: Path) -> dict[str, list[str]]:
    """Public constants that stand in several files with different values: name -> files."""
    values: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sources(tree):
        for statement in parsed(path).body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ) if name.isupper() and not name.startswith("_"):
                    values[name][str(path.relative_to(tree))] = ast.unparse(value)
    return {name: list(files) for name, files in sorted(values.items()) if len(set(files.values())) > 1}


def long_objects(tree: Path) -> dict[str, int]:
    """Returns the objects of more than OBJECT_LINES_MAX lines: `file:class` -> lines of the class and of its bases in
    the product. A class that others inherit from is not counted by itself."""
    classes: dict[str, tuple[Path, ast.ClassDef]] = {}
    for path in sources(tree):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, (path, node))

    def bases(name: str) -> set[str]:
        named = [base.value if isinstance(base, ast.Subscript) else base for base in classes[name][1].bases]
        known = {base.id for base in named if isinstance(base, ast.Name) and base.id in classes} - {name}
        return known.union(*map(bases, known))

    def lines(name: str) -> int:
        node = classes[name][1]
        return (node.end_lineno or node.lineno) - node.lineno + 1

    inherited = {base for name in classes for base in bases(name)}
    sizes = {name: lines(name) + sum(map(lines, bases(name))) for name in classes.keys() - inherited}
    return {
        f"{classes[name][0].relative_to(tree)}:{name}": size
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size > OBJECT_LINES_MAX
    }


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """Those of a block, and of the blocks in it."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for statement in getattr(block, name, ()):
            yield statement
            yield from _statements(statement)


def _imported(module: ast.Module, files: Mapping[str, Path]) -> Iterator[str]:
    """Modules of `files` that are imported anywhere: of `from a import b` a.b where that is a module, else a."""
    for node in _statements(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & files.keys()
            if names - files.keys() and node.module in files:
                yield node.module


def module_name(path: PurePath) -> str:
    """`path` is relative to the folder that imports begin in."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the others of `files` (module -> file) that it imports, also within functions or for types alone.
    A file that does not exist imports nothing."""
    return {
        name: set(_imported(parsed(path), files)) - {name} if path.exists() else set() for name, path in files.items()
    }


def _product_graph(tree: Path) -> dict[str, set[str]]:
    return import_graph({module_name(path.relative_to(tree)): path for path in sources(tree)})


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Sets of nodes that lead to each other in a circle, by whatever way."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reach = {name: reachable(name) for name in graph}
    sets = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph if name in reach[name]
    }
    return [list(names) for names in sorted(sets)]


def module_circles(tree: Path) -> list[list[str]]:
    """Sets of modules that import each other in a circle."""
    return circles(_product_graph(tree))


def _room_graph(tree: Path) -> dict[str, set[str]]:
    """Room -> rooms that its modules import. A folder is a room, and so is a module at the root of a package that has
    folders; the `__init__` of a package with folders only names what is in them."""
    packages = {module_name(path.relative_to(tree)) for path in sources(tree) if path.name == "__init__.py"}
    parted = {package.partition(".")[0] for package in packages if "." in package}

    def room_of(module: str) -> str:
        package = module if module in packages else module.rpartition(".")[0]
        return module if package in parted else package

    rooms: dict[str, set[str]] = defaultdict(set)
    for module, imported in _product_graph(tree).items():
        if module not in parted:
            rooms[room_of(module)].update(room_of(other) for other in imported - parted)
    return {room: imported - {room} for room, imported in rooms.items()}


def room_circles(tree: Path) -> list[list[str]]:
    """Sets of rooms that import each other in a circle."""
    return circles(_room_graph(tree))


def room_pairs(tree: Path) -> list[tuple[str, str]]:
    """Pairs of rooms that import each other."""
    graph = _room_graph(tree)
    return sorted((room, other) for room in graph for other in graph[room] if room < other and room in graph[other])


def show(tree: Path) -> None:
    total: Counter[str] = Counter()
    print(f"{'package':<22}{'files':>6}{'lines':>8}{'code':>8}{'over 120':>10}")
    for package in PRODUCT:
        texts = [path.read_text() for path in sources(tree) if path.relative_to(tree).parts[0] == package]
        row = {
            "files": len(texts),
            "lines": sum(text.count("\n") for text in texts),
            "code": sum(map(code_lines, texts)),
            "over 120": sum(len(line) > COLUMNS_MAX for text in texts for line in text.splitlines()),
        }
        total.update(row)
        print(f"{package:<22}{row['files']:>6}{row['lines']:>8}{row['code']:>8}{row['over 120']:>10}")
    print(f"{'all':<22}{total['files']:>6}{total['lines']:>8}{total['code']:>8}{total['over 120']:>10}")
    _show_list(f"places that share {SHARED_LINES} lines", shared_runs(tree))
    _show_list("names in two or more files", [f"{name}: {', '.join(at)}" for name, at in names_twice(tree).items()])
    constants = [f"{name}: {', '.join(at)}" for name, at in constants_twice(tree).items()]
    _show_list("constants with different values in two or more files", constants)
    objects = [f"{lines} {name}" for name, lines in long_objects(tree).items()]
    _show_list(f"objects above {OBJECT_LINES_MAX} lines", objects)
    _show_list("circles of imports between modules", [" <-> ".join(names) for names in module_circles(tree)])
    _show_list("circles of imports between rooms", [" <-> ".join(names) for names in room_circles(tree)])
    _show_list("pairs of rooms that import each other", [" <-> ".join(pair) for pair in room_pairs(tree)])


def _show_list(title: str, rows: list[str]) -> None:
    print(f"{title}: {len(rows)}", *rows, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="another checkout than this one")
    parser.add_argument("--walks", action="store_true", help="trace the walks of messages, too (needs mosquitto)")
    parser.add_argument("--names", action="store_true", help="with --walks: name the functions")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    sys.path.insert(0, str(tree))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    show(tree)
    if arguments.walks:
        from tools.walks import show_walks, walks

        show_walks(asyncio.run(walks(tree)), arguments.names)


if __name__ == "__main__":
    main()
