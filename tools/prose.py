"""Words and turns of phrase that a reader stumbles over, in code and documentation.

python -m tools.prose [PATH ...]     prints `file:line: what was found -> what to write instead`; exit code 1 if any

Python: docstrings, comments and other strings, and the names that are defined. Markdown: all of the text outside code.
Each row of PHRASES is for everybody; each row of NAMES is one word of an identifier. A line ends the search with the
comment `prose: ok`, where the word is that of a specification or a library.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]

# pattern, what to write instead. Case does not matter.
PHRASES: Final = {
    r"which there (?:is|are) not?\b": "unknown X; known: a, b",
    r"\bthere is none (?:of|for|that)\b|\bwhere there is none\b": "say what is missing: no X",
    r"\bwhat there is(?: of| not)?\b": "say what: the records, the topics ...",
    r"\bnobody is told\b|\bis told of\b|\bare told of\b|\bwho is told\b": "is reported, is notified",
    r"\btells? (?:who|what|whether|how|of|that)\b": "reports, says, returns",
    r"\bas it (?:is|was) now\b": "current",
    r"\bhangs? together\b": "is consistent",
    r"\bheeds?\b|\bheeded\b": "applies, reads, respects",
    r"\brung\b|\brings? the\b": "a doorbell arrived",
    r"\bso much (?:later|ahead|for)\b": "give the amount",
    r"\bthe house\b": "the product, the code",
    r"\bgoes nowhere\b|\bgo nowhere\b": "is dropped",
    r"\bwithout a word\b|\bin silence\b|\bfalls? silent\b": "without a report, stops answering",
    r"\bwhatever it is\b|\b(?:of|for|to) whoever\b": "name the actor",
    r"\bnothing is known of\b": "unknown",
    r"\bas ever\b": "unchanged",
    r"\bmakes? (?:it|them) anew\b|\bmade anew\b|\basked anew\b": "creates again, asks again",
    r"\bhow many that were\b|\bwhat that is\b|\bwhat that was\b": "Returns ...",
    r"\bin the (?:room|rooms)\b|\bno room (?:for|left)\b|\broom for (?:one|more)\b": "capacity, space",
    r"\bof late\b|\bhence\b|\bthereof\b|\bwhereof\b|\bhenceforth\b": "recently, therefore, of it",
}
NAMES: Final = {
    "told": "notified, reported",
    "gone": "removed, finished, missing",
    "rung": "on_doorbell",
    "heed": "refresh, apply",
    "heeds": "refresh, apply",
    "anew": "again, new",
}
SUFFIXES: Final = (".py", ".md")
SKIPPED: Final = re.compile(
    r"_pb2|^docs/spec-coverage\.md$|^campaigns/fuzz/corpus/|^(tools|tests)/(test_)?prose\.py$|/target/"
)


class Finding(NamedTuple):
    file: str
    line: int
    found: str
    better: str


_PHRASES = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in PHRASES.items()]


def in_text(file: str, texts: Iterator[tuple[int, str]]) -> Iterator[Finding]:
    """Findings in lines of prose: number, text."""
    for number, text in texts:
        for pattern, better in _PHRASES:
            if match := pattern.search(text):
                yield Finding(file, number, match[0], better)


def _python_prose(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def _defined_names(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def in_python(file: str, source: str) -> Iterator[Finding]:
    """Findings in docstrings, comments, strings and the names that are defined."""
    yield from in_text(file, _python_prose(source))
    for number, name in _defined_names(source):
        for word in re.findall(r"[A-Z]?[a-z]+", name):
            if better := NAMES.get(word.lower()):
                yield Finding(file, number, name, better)


def _markdown_prose(source: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "`", line)


def findings(root: Path, files: list[str]) -> list[Finding]:
    """All findings in `files` (paths below `root`), once each, without lines marked `prose: ok`."""
    found: set[Finding] = set()
    for file in files:
        source = (root / file).read_text(encoding="utf-8")
        lines = source.splitlines()
        of_file = in_python(file, source) if file.endswith(".py") else in_text(file, _markdown_prose(source))
        found |= {one for one in of_file if "prose: ok" not in lines[one.line - 1]}
    return sorted(found)


def checked_files(root: Path) -> list[str]:
    """The files of the project that have prose."""
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name.endswith(SUFFIXES) and not SKIPPED.search(name) and (root / name).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="only files below these")
    arguments = parser.parse_args()
    files = [name for name in checked_files(ROOT) if not arguments.paths or name.startswith(tuple(arguments.paths))]
    found = findings(ROOT, files)
    for one in found:
        print(f"{one.file}:{one.line}: {one.found!r} -> {one.better}")
    print(f"{len(found)} findings in {len(files)} files", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
