"""Runs the chat template of a checkpoint. It is Jinja code from outside: it can compute text, nothing else.

The environment is the one that transformers uses, so a template gives the same text. Bounds are added: on the size of
the template, of every text it makes, of all these texts together, on the steps of its loops, and on its processor time,
which is looked at before each operation that can take long. A template that exceeds one fails as one that is malformed
does.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sized, ValuesView
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Namespace
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rollmill.chat.spelling import unescaped

LARGEST_TEMPLATE = 256 << 10  # characters; the largest published ones have some ten thousand
LARGEST_TEXT = 64 << 20
LARGEST_SUM = 512 << 20  # characters that one rendering makes or reads
MOST_STEPS = 20_000_000  # nodes of loops and macros that one rendering runs
MOST_SECONDS = 3.0  # of a processor that one rendering takes
_MOST_BITS = 4096  # of an integer
_STEPS_PER_LOOK = 14  # bits; looking at the clock takes about a microsecond
_SHORT_TEXT = 1 << 16  # characters; nothing that is done with such a text takes long
_SHORTEST_ROUND = 50  # steps; so an empty loop ends early too
_LONGEST_INDENT = 16

# Those that published templates use, and their like. Others make long texts of short ones.
_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items"),
    *("join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse"),
    *("safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
_TEXT_FILTERS = frozenset(
    {"capitalize", "d", "default", "e", "escape", "float", "int", "length", "count", "lower", "replace", "safe"}
    | {"string", "title", "tojson", "trim", "upper"}
)  # the others list the characters of a text
_LIST_ELEMENT = 64  # characters that take as much memory
_COMPARISONS = ("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan")
_REFUSED_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate", "maketrans", "encode"}
)

_SIZED = (str, list, tuple, dict)
_SCALAR = (str, int, float, type(None))
_LISTS = (list, tuple)
_BUILT = (list, tuple, dict)
_NAMES_OF_DICT = frozenset(dir(dict))


class TemplateFailed(Exception):
    """The template refuses the messages, or is wrong. The text is meant for the reader."""


class ChatTemplate:
    """A compiled template. TemplateFailed if it cannot be compiled."""

    def __init__(self, source: str) -> None:
        if len(source) > LARGEST_TEMPLATE:
            raise TemplateFailed(f"it has {len(source)} characters, more than {LARGEST_TEMPLATE}")
        self.source = source
        self._environment = _Environment()
        try:
            tree = _Bounds().visit(self._environment.parse(source))
            code = self._environment.compile(tree)
            self._template = Template.from_code(self._environment, code, self._environment.make_globals(None))
        except Exception as error:  # Python's own compiler reads it too
            raise TemplateFailed(_reason(error)) from None

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """TemplateFailed for whatever goes wrong inside the template."""
        self._environment.begin(now)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                _check_size(size)
        except Exception as error:  # a template can raise anything that Python can
            raise TemplateFailed(_reason(error)) from None
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """What transformers gives to a template, and the bounds. A rendering does not yield to another one."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_plain)
        self._thread = threading.local()  # large requests are written in threads of their own
        self._safe: dict[tuple[type, str], bool] = {}
        self.begin(datetime.now())  # compiling computes constants
        filters = {name: self.filters[name] for name in _FILTERS}
        filters |= {"tojson": _to_json, "join": _check_join(filters["join"])}
        filters |= {"replace": _check_replace(filters["replace"]), "string": _check_string(filters["string"])}
        self.filters = {name: self._charged(f, lists=name not in _TEXT_FILTERS) for name, f in filters.items()}
        self.filters |= {
            "_iterated": self._iterated,
            "_step": self._step,
            "_join": _join,
            "_charge": self._charge,
            "_built": self._built,
        }
        self.tests |= {name: self._charged(self.tests[name]) for name in _COMPARISONS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._strftime
        self.concat = self._concat  # type: ignore[method-assign]  # of macros, blocks and set blocks
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

    def begin(self, now: datetime) -> None:
        self._steps, self._sum, self._now = 0, 0, now
        self._thread.began = time.thread_time()

    def _check_time(self) -> None:
        if time.thread_time() - self._thread.began > MOST_SECONDS:
            raise SecurityError(f"it takes more than {MOST_SECONDS:.0f} s of a processor")

    @pass_context
    def _step(self, context: object, _: object, count: int) -> None:
        """With a context, Jinja does not compute it once and for all when it compiles the template."""
        before, self._steps = self._steps, self._steps + count
        if self._steps > MOST_STEPS:
            raise SecurityError("it loops too often")
        if before >> _STEPS_PER_LOOK != self._steps >> _STEPS_PER_LOOK:
            self._check_time()

    def _charge(self, value: Any) -> Any:
        """Adds the length of a text or a list to the sum of this rendering."""
        if isinstance(value, _SIZED):
            length = len(value)
            if length > _SHORT_TEXT or type(value) is not str:
                self._check_time()
            self._sum += length if type(value) is str else 8 * length
            if length > LARGEST_TEXT or self._sum > LARGEST_SUM:
                raise SecurityError(f"it makes more than {LARGEST_TEXT} characters, or {LARGEST_SUM} in all")
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise SecurityError("an integer is too large")
        return value

    def _built(self, value: Any) -> Any:
        """Checks the size of a list or a mapping with all it holds: one that holds another twice doubles it."""
        self._sum += _weight(value)
        return self._charge(value)

    def _iterated(self, value: Any) -> Any:
        if isinstance(value, str):
            _check_listed(len(value))
        return self._charge(value)

    def _charged(self, function: Any, *, lists: bool = False) -> Any:
        charge = self._iterated if lists else self._charge

        @functools.wraps(function)  # with its marks for what Jinja passes to it
        def call(*args: Any, **named: Any) -> Any:
            for each in args:
                if isinstance(each, _SIZED):
                    charge(each)
            made = self._charge(function(*args, **named))
            self._sum += _LIST_ELEMENT * len(made) if isinstance(made, list) else 0
            return made

        return call

    def _concat(self, pieces: Iterable[str]) -> str:
        found = list(pieces)
        _check_size(sum(map(len, found)))
        return str(self._charge("".join(found)))

    def _strftime(self, layout: str) -> str:
        if len(layout) > 100:
            raise SecurityError("a layout of dates has more than 100 characters")
        return self._now.strftime(layout)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _NAMES_OF_DICT:
            return obj[attribute]  # what Jinja finds too, after several checks: most of a rendering is this
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja's own `format` has no bound on the width. `is_safe_attribute` refuses it."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's answer depends on the type alone, so it is asked once per type."""
        safe = self._safe.get((type(obj), attr))
        if safe is None:
            refused = isinstance(obj, int | float | bytes) or (isinstance(obj, str) and attr in _REFUSED_METHODS)
            safe = self._safe[type(obj), attr] = not refused and super().is_safe_attribute(obj, attr, value)
        return safe

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_size(_size(left) * _size(right) if hasattr(left, "__len__") or hasattr(right, "__len__") else 0)
        elif operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "**":
            raise SecurityError("** is not allowed")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("% with a text is not allowed")
        made = super().call_binop(context, operator, left, right)
        return self._built(made) if isinstance(made, _LISTS) else self._charge(made)

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        for each in args:
            self._charge(each)
        if isinstance(owner, _LISTS):
            self._charge(owner)
        if isinstance(owner, str):
            self._charge(owner)
            if name in ("split", "rsplit", "splitlines"):
                by = args[0] if args and isinstance(args[0], str) and args[0] else named.get("sep")
                _check_listed(owner.count(by) if isinstance(by, str) and by else len(owner) // 2)
            elif name == "replace":
                _check_replacement(owner, *args)
            elif name == "join" and args:
                args = (list(self._iterated(args[0])), *args[1:])
                _check_size(sum(len(owner) + _length(each) for each in args[0]))
        made = super().call(context, function, *args, **named)
        if isinstance(made, _BUILT) and name != "get":
            return self._built(made)
        return self._charge(made)


class _Bounds(NodeTransformer):
    """Counts the steps of every loop and macro, and charges what an environment cannot intercept."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._counted(node)
        node.iter = _filter("_iterated", cast(nodes.Expr, node.iter), [], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(_filter("_join", node.nodes[0], list(node.nodes[1:]), node))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Comparing with a short constant is cheap, searching is not."""
        self.generic_visit(node)
        for operand in node.ops:
            short = isinstance(operand.expr, nodes.Const) or isinstance(node.expr, nodes.Const)
            if operand.op in ("in", "notin") or not short:
                operand.expr = self._charged(operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._built(node) if node.ctx == "load" else node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        if node.name in ("varargs", "kwargs"):
            raise SecurityError(f"{node.name} is not allowed")
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > _MOST_BITS:
            raise SecurityError("an integer is too large")
        return node

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        count = max(_SHORTEST_ROUND, sum(1 for _ in node.find_all(nodes.Node)))
        self.generic_visit(node)
        step = _filter("_step", nodes.Const(0), [nodes.Const(count)], node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted

    def _charged(self, node: nodes.Expr) -> nodes.Expr:
        return _filter("_charge", node, [], node)

    def _built(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_built", node, [], node)

    visit_List = visit_Dict = _built


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote. It changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _filter(name: str, value: nodes.Expr, args: list[nodes.Expr], at: nodes.Node) -> nodes.Filter:
    made = nodes.Filter(value, name, args, [], None, None, lineno=at.lineno)
    made.set_lineno(at.lineno)
    if at.environment is not None:
        made.set_environment(at.environment)
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if indent is not None and not (isinstance(indent, int) and indent <= _LONGEST_INDENT):
        raise SecurityError(f"an indent that is not a number up to {_LONGEST_INDENT} is not allowed")
    if separators is not None and sum(map(len, separators)) > _LONGEST_INDENT:
        raise SecurityError(f"separators above {_LONGEST_INDENT} characters are not allowed")
    _weight(value, indent or 0)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return unescaped(text) if ensure_ascii else text


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(_plain(message)))


def _plain(value: Any) -> Any:
    """The value, if its text is not too large."""
    if not isinstance(value, _SCALAR):
        _weight(value)
    return value


def _weight(value: Any, indent: int = 0) -> int:
    """About the number of characters of a value with all it holds. Stops as soon as they are too many."""
    total, open_values = 0, [(value, 1)]
    while open_values:
        each, depth = open_values.pop()
        total += 16 + indent * depth
        if isinstance(each, _SCALAR):
            total += len(each) if isinstance(each, str) else 0
            _check_size(total)
            continue
        _check_size(total + 16 * len(each) if isinstance(each, Sized) else total)
        if isinstance(each, Mapping):
            open_values += [(part, depth + 1) for pair in each.items() for part in pair]
        elif isinstance(each, list | tuple | set | frozenset | ValuesView | KeysView | ItemsView):
            open_values += [(part, depth + 1) for part in each]
        elif isinstance(each, Namespace):
            raise SecurityError("a namespace has no text")
    return total


def _join(*parts: object) -> str:
    texts = [str(_plain(part)) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_join(join: Any) -> Any:
    @functools.wraps(join)
    def call(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        values = list(value)
        _check_size(_weight(values) + len(values) * len(str(_plain(d))))
        return join(eval_ctx, values, d, attribute)

    return call


def _check_replace(replace: Any) -> Any:
    @functools.wraps(replace)
    def call(eval_ctx: Any, s: str, old: str, new: str, count: int | None = None) -> Any:
        _check_replacement(_plain(s), _plain(old), _plain(new))
        return replace(eval_ctx, s, old, new, count)

    return call


def _check_string(string: Any) -> Any:
    return functools.wraps(string)(lambda value: string(_plain(value)))


def _check_replacement(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _check_size((_length(text) + 1) * max(1, _length(new)) // max(1, _length(old)))


def _check_size(size: int) -> None:
    if size > LARGEST_TEXT:
        raise SecurityError(f"it makes more than {LARGEST_TEXT} characters")


def _check_listed(count: int) -> None:
    """Of a text as a list of `count` parts."""
    _check_size(16 * count)


def _length(value: object) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else value if isinstance(value, int) else 0


def _reason(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
