"""Candidates made from a project as it is: functions whose body is removed, and mutations of the syntax tree.

Only the text of the changed node is replaced, so the rest of a file keeps its form and comments.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmill.rollouts.factory.install import Project
from rollmill.rollouts.factory.stable_tests import Suite

_LEAST_LINES = 3  # of a body that is removed
_PER_FUNCTION = 3  # bugs
_FLIPPED: dict[type[ast.AST], Callable[[], ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """What may become a task: a change of the project that takes something away from it."""

    id: str
    kind: str  # removal, bug or history
    title: str  # what to do, for the instruction
    files: Mapping[str, bytes] = field(repr=False)  # changed, over those of the project
    reference: Mapping[str, bytes] = field(repr=False)
    solution: str = field(repr=False)  # text that must not be in a training source
    tests: tuple[str, ...] = field(repr=False)  # that may notice
    deleted: tuple[str, ...] = ()  # files that only the reference has
    commit: str = ""


@dataclass(frozen=True)
class _Function:
    path: str
    name: str  # Class.method
    node: ast.FunctionDef | ast.AsyncFunctionDef
    text: str  # of the file

    @property
    def line(self) -> int:
        """The line on which its code begins, as Python counts: decorators belong to it."""
        return min([self.node.lineno, *(each.lineno for each in self.node.decorator_list)])

    @property
    def source(self) -> str:
        return ast.get_source_segment(self.text, self.node) or ""

    @property
    def body(self) -> list[ast.stmt]:
        """Without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node) is not None else self.node.body


def find_edits(project: Project, suite: Suite, kinds: Collection[str], seed: int) -> list[Candidate]:
    """Every function that a test runs, removed; and mutations of it. In an order drawn by the seed."""
    found: list[Candidate] = []
    name, files = project.source.name, project.files
    for path in sorted(project.source.files.keys() - suite.hidden):
        for function in _functions(path, files[path]) if path.endswith(".py") else ():
            tests = tuple(suite.covering(path, function.line))
            if not tests:
                continue
            edits: list[tuple[str, str, str]] = []
            if "removal" in kinds:
                edits += [("removal", f"Implement `{function.name}` in `{path}`.", text) for text in _remove(function)]
            if "bug" in kinds:
                drawn = random.Random(f"{seed} {path} {function.name}")
                title = f"Something in {name} is broken. Find the cause and repair it."
                edits += [("bug", title, text) for text in _mutate(function, drawn)]
            for kind, title, text in edits:
                number = hashlib.sha256(text.encode()).hexdigest()[:6]
                found.append(
                    Candidate(
                        f"{name}-{kind}-{function.name}-{number}",
                        kind,
                        title,
                        {path: text.encode()},
                        {path: files[path]},
                        function.source,
                        tests,
                    )
                )
    random.Random(seed).shuffle(found)
    return list({each.id: each for each in found}.values())


def _functions(path: str, data: bytes) -> Iterator[_Function]:
    """Functions and methods of a file, but none inside of other functions."""
    try:
        text = data.decode("utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return  # a file for another Python, or a template
    if "\r" in text or "\f" in text:
        return  # lines of the syntax tree would not be those of the text

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[_Function]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield _Function(path, prefix + node.name, node, text)
            elif isinstance(node, ast.If | ast.Try):
                yield from walk(node.body, prefix)

    yield from walk(tree.body, "")


def _remove(function: _Function) -> Iterator[str]:
    """The file with the function's body replaced; nothing for a body that is not worth a task."""
    body = function.body
    if not body or function.node.lineno == body[0].lineno:
        return
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    if last - first + 1 < _LEAST_LINES:
        return
    lines = function.text.split("\n")
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    yield "\n".join([*lines[: first - 1], f"{indent}raise NotImplementedError", *lines[last:]])


def _mutate(function: _Function, drawn: random.Random) -> list[str]:
    """The file with one bug each."""
    places = [(node, new) for statement in function.body for node in _walk(statement) for new in _mutations(node)]
    drawn.shuffle(places)
    found: list[str] = []
    for node, new in places:
        text = _splice(function.text, node, new)
        try:
            changed = ast.dump(ast.parse(text)) != ast.dump(ast.parse(function.text))
        except (SyntaxError, ValueError):
            continue
        if changed and text not in found:
            found.append(text)
        if len(found) == _PER_FUNCTION:
            break
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Without the parts of f-strings: Python 3.11 does not know where they are."""
    yield node
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.JoinedStr) else ():
        yield from _walk(child)


def _mutations(node: ast.AST) -> Iterator[str]:
    """Texts that may replace a node."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIPPED:
        changed.ops[0] = _FLIPPED[type(node.ops[0])]()
        yield ast.unparse(changed)
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _FLIPPED:
        changed.op = _FLIPPED[type(node.op)]()
        yield f"({ast.unparse(changed)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield str(not node.value)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
        changed.args[:2] = changed.args[1::-1]
        yield ast.unparse(changed)
    elif isinstance(node, ast.If) and not node.orelse:
        yield "pass"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"


def _splice(text: str, node: Any, new: str) -> str:
    """Columns of the syntax tree count bytes."""
    lines = text.split("\n")
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    return "\n".join([*lines[: node.lineno - 1], before + new + after, *lines[node.end_lineno :]])
