"""Builds the site of the documentation: `make docs`.

docs/, the files that its pages link to, the docstrings of docs/public-api.md
    --> dist/site-source --zensical--> dist/site --> every link is followed, and nothing comes from elsewhere

python tools/docs_site.py             build and check
python tools/docs_site.py --source    write dist/site-source only; needs griffe, not zensical

Pages of docs keep their names. A link that leaves docs leads to a copy below files/: a page as it is, another file as
a block of code. The first column of the tables in docs/public-api.md leads to api/MODULE.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
DIST: Final = ROOT / "dist"
SOURCE: Final = DIST / "site-source"
SITE: Final = DIST / "site"
API_PAGE: Final = DOCS / "public-api.md"
PROTOS: Final = ROOT / "uprotocol" / "proto"
LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
WITHIN: Final = re.compile(r"\[([^\]]+)\]\(#[^)]*\)")  # of a docstring: a link within the page that shows it elsewhere
FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ROW: Final = re.compile(r"^\| `([\w.*]+)` \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".yml": "yaml", ".html": "html", ".proto": "protobuf"}
DRAWN: Final = re.compile(r"-->|<--|\S {3,}\S|^\s*[|+]", re.MULTILINE)  # a paragraph that is a picture


# Pages


class Source:
    """Writes the sources of the site."""

    def __init__(self) -> None:
        self._waiting: list[Path] = []  # files of the repository that need a page
        self._placed: set[Path] = set()

    def write(self) -> None:
        shutil.rmtree(SOURCE, ignore_errors=True)
        for path in sorted(DOCS.rglob("*")):
            if path.is_file() and path.suffix != ".toml":
                self._place(path)
        write_api(SOURCE / "api")
        while self._waiting:
            self._place(self._waiting.pop())

    def _place(self, path: Path) -> None:
        if path in self._placed:
            return
        self._placed.add(path)
        to = SOURCE / place_of(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            to.write_text(self._page(path), encoding="utf-8")
        elif path.is_file() and (DOCS in path.parents or path.suffix in (".png", ".svg")):
            shutil.copy(path, to)
        else:
            to.write_text(block_of(path), encoding="utf-8")

    def _page(self, path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        if path == API_PAGE:
            text = ROW.sub(lambda row: f"| [`{row[1]}`]({api_name(row[1])}) | {row[2]} | {row[3]} |", text)
        return outside_code(text, lambda part: LINK.sub(lambda link: self._link(path, link[1]), part))

    def _link(self, page: Path, target: str) -> str:
        """Returns the target as a link of the site."""
        name, hash_, anchor = target.partition("#")
        if "://" in target or not name or (page == API_PAGE and name.startswith("api/")):
            return target
        there = (page.parent / name).resolve()
        if there.is_dir():
            there = there / "README.md" if (there / "README.md").exists() else there
        if not there.exists():
            raise SystemExit(f"{page.relative_to(ROOT)} links to {target}, which does not exist")
        self._waiting.append(there)
        return os.path.relpath(SOURCE / place_of(there), (SOURCE / place_of(page)).parent) + hash_ + anchor


def place_of(path: Path) -> Path:
    """Returns where the page of a file or folder lies in the source of the site."""
    if DOCS in path.parents:
        return path.relative_to(DOCS) / ("index.md" if path.is_dir() else "")
    name = Path("files", *(part.lstrip(".") for part in path.relative_to(ROOT).parts))  # hidden files get no page
    return name if path.suffix in (".md", ".png", ".svg") else name.with_name(f"{name.name}.md")


def block_of(path: Path) -> str:
    """Returns a page with the text of a file, or the names of the files in a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if "__pycache__" not in one.parts)
        shown = (f"[{one}]({one})" if DOCS in path.parents else f"`{one}`" for one in names)
        return f"# {name}\n\n" + "".join(f"- {one}\n" for one in shown)
    text = path.read_text(encoding="utf-8").rstrip()
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with everything outside of fenced blocks changed."""
    parts, end = [], 0
    for block in FENCED.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


# API


def public() -> dict[str, tuple[list[str], str]]:
    """Returns the modules of docs/public-api.md, with their names and their purpose."""
    found: dict[str, tuple[list[str], str]] = {}
    for module, names, purpose in ROW.findall(API_PAGE.read_text(encoding="utf-8")):
        listed, _ = found.setdefault(module, ([], purpose))
        listed += [name for name in re.findall(r"`(\w+)`", names) if name not in listed]
    return found


def api_name(module: str) -> str:
    return f"api/{module.replace('*', 'all')}.md"


def write_api(folder: Path) -> None:
    import griffe

    folder.mkdir(parents=True, exist_ok=True)
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in sorted({module.split(".")[0] for module in public()}):
        loader.load(package)
    loader.resolve_aliases(external=False)
    modules: Any = loader.modules_collection
    for module, (names, purpose) in public().items():
        lines = [f"# {module}", "", purpose, ""]
        if module.endswith("_pb2"):
            for path in protos(module):
                lines += [f"## {path.name}", "", "```protobuf", path.read_text(encoding="utf-8").rstrip(), "```", ""]
        else:
            lines += prose(docstring(modules[module]))
            for name in names:
                lines += described(modules[module][name])
        text = WITHIN.sub(r"\1", "\n".join(lines) + "\n")
        text = outside_code(
            text, lambda part: LINK.sub(lambda link: link[1] if "://" in link[1] else f"../{link[1]}", part)
        )
        (folder / Path(api_name(module)).name).write_text(text, encoding="utf-8")


def protos(module: str) -> Iterator[Path]:
    pattern = module.replace(".", "/").replace("_pb2", ".proto")
    found = sorted(PROTOS.glob(pattern))
    if not found:
        raise SystemExit(f"no {pattern} in {PROTOS.relative_to(ROOT)}")
    yield from found


def described(found: Any) -> list[str]:
    """Returns the lines of a public name: signature, docstring, public members."""
    lines = [f"## {found.name}", "", *signature(found), *prose(docstring(found))]
    if found.is_class:
        target = found.final_target if found.is_alias else found
        for name, member in [*target.members.items(), *target.inherited_members.items()]:
            text = docstring(member)
            is_shown = not name.startswith("_") or (name == "__init__" and name in target.members)
            if is_shown and is_ours(member) and (text or name in target.members):
                lines += [f"### {found.name}.{name}", "", *signature(member), *prose(text)]
    return lines


def is_ours(member: Any) -> bool:
    target = member.final_target if member.is_alias else member
    return bool(target.is_function or target.is_attribute or target.is_class)


def docstring(found: Any) -> str:
    return str(found.docstring.value) if found.docstring else ""


def signature(found: Any) -> list[str]:
    target = found.final_target if found.is_alias else found
    if target.is_function:
        start = "async def" if "async" in target.labels else "def"
        shown = f"{start} {target.name}({', '.join(map(str, parameters(target)))})"
        shown += f" -> {target.returns}" if target.returns else ""
    elif target.is_class:
        shown = f"class {target.name}" + (f"({', '.join(map(str, target.bases))})" if target.bases else "")
    else:
        shown = target.name + (f": {target.annotation}" if target.annotation else "")
        shown += f" = {target.value}" if target.value and len(str(target.value)) < 80 else ""
    return ["```python", shown, "```", ""]


def parameters(function: Any) -> Iterator[str]:
    is_keyword = False
    for one in function.parameters:
        kind = one.kind.value if one.kind else ""
        if "keyword-only" in kind and not is_keyword:
            is_keyword = True
            yield "*"
        if kind.startswith("variadic"):
            is_keyword = True
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = star + one.name + (f": {one.annotation}" if one.annotation else "")
        yield text + (f" = {one.default}" if one.default is not None and not star else "")


def prose(text: str) -> list[str]:
    """Returns a docstring as Markdown: pictures of characters as blocks of code."""
    lines: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines += (
            ["```text", textwrap.dedent(part), "```", ""] if DRAWN.search(part) else [part.replace("<", "&lt;"), ""]
        )
    return lines if text else []


# Checks


class Links(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []  # by the browser itself

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        to = given.get("href") or given.get("src")
        if to and (tag in ("script", "img", "iframe", "source") or (tag == "link" and "canonical" not in str(given))):
            self.loaded.append(to)
        if to:
            self.links.append(to)


def wrong_links(site: Path) -> Iterator[str]:
    """Yields what is wrong with the links of a built site."""
    pages = {path: Links() for path in sorted(site.rglob("*.html"))}
    for path, links in pages.items():
        links.feed(path.read_text(encoding="utf-8"))
    for path, links in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {to} from elsewhere" for to in links.loaded if urlsplit(to).netloc)
        if name.name == "404.html":
            continue  # its links start at the root of the server
        for to in links.links:
            parts = urlsplit(to)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                yield f"{name} links to {to}, which does not exist"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                yield f"{name} links to {to}, and there is no such heading"


def main(arguments: list[str]) -> int:
    Source().write()
    if "--source" in arguments:
        return 0
    shutil.copy(DOCS / "site.toml", DIST / "zensical.toml")
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = str(Path(sys.executable).parent / "zensical")
    code = subprocess.run([zensical, "build", "--clean", "--strict", "-f", "zensical.toml"], cwd=DIST).returncode
    if code:
        return code
    wrong = list(wrong_links(SITE))
    print("\n".join(wrong) or f"built {SITE.relative_to(ROOT)}: {len(list(SITE.rglob('*.html')))} pages")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
