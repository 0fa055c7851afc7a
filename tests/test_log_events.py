"""Events of the log are constant texts: lines of one kind can be searched for, counted, and looked up in the docs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools import house

TREE = Path(__file__).parents[1]
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
Values = Mapping[str, list[ast.AST]]  # what is assigned to each name in sight


def _is_constant(node: ast.AST, values: Values) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_constant(node.body, values) and _is_constant(node.orelse, values)
    if isinstance(node, ast.Name) and node.id in values:
        others = {name: found for name, found in values.items() if name != node.id}
        return all(_is_constant(value, others) for value in values[node.id])
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _assigned(node: ast.AST) -> dict[str, list[ast.AST]]:
    """What is assigned to the names in `node`; a parameter may be anything, so it stands for the function."""
    found: dict[str, list[ast.AST]] = {}
    for one in ast.walk(node):
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if isinstance(one, ast.Assign):
            pairs = [(target, one.value) for target in one.targets]
        elif isinstance(one, ast.AnnAssign | ast.NamedExpr) and one.value is not None:
            pairs = [(one.target, one.value)]
        elif isinstance(one, ast.AugAssign):
            pairs = [(one.target, one)]
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            for given in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs):
                found.setdefault(given.arg, []).append(one)
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
            elif isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


def _changing(node: ast.AST, values: Values) -> Iterator[int]:
    """Yields the lines of calls whose event is no constant."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _changing(child, {**values, **_assigned(child)})
            continue
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in METHODS
            and isinstance(child.func.value, ast.Name)
            and child.func.value.id == "log"
            and not (child.args and _is_constant(child.args[0], values))
        ):
            yield child.lineno
        yield from _changing(child, values)


def changing_events(text: str) -> list[int]:
    module = ast.parse(text)
    ours = [one for one in module.body if isinstance(one, ast.Assign | ast.AnnAssign)]
    return list(_changing(module, _assigned(ast.Module(ours, []))))


def test_each_event_of_the_log_is_a_constant_text() -> None:
    found = {str(path.relative_to(TREE)): changing_events(path.read_text()) for path in house.sources(TREE)}
    assert {name: lines for name, lines in found.items() if lines} == {}, "put what changes into keywords"


def test_an_event_that_changes_is_found() -> None:
    text = 'A = "a"\ndef f(x):\n    what = A if x else "b"\n    log.info(what, x=x)\n    log.info(A)\n'
    assert changing_events(text) == []
    changing = '    log.error(f"{x} failed")\n    log.error(x)\n    log.error(x.what)\n'
    assert changing_events(text + changing) == [6, 7, 8]
    assert changing_events(text + "    what += x\n") == [4]
