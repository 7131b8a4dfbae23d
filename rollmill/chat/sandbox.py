"""Runs the chat template of a checkpoint. It is Jinja code from outside: it can compute text, nothing else.

The environment is the one that transformers uses, so a template gives the same text. Bounds are added: on the size of
the template, of every text it makes, and on the number of loop rounds. A template that exceeds one fails as one that
is malformed does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rollmill.chat.spelling import unescaped

LARGEST_TEMPLATE = 256 << 10  # characters; the largest published ones have some ten thousand
LARGEST_TEXT = 64 << 20
MOST_ROUNDS = 1_000_000  # of all loops of one rendering

# They make long texts of short ones. No published template uses them.
_REFUSED_FILTERS = ("center", "format", "indent", "wordwrap", "urlize", "xmlattr", "filesizeformat", "pprint", "random")
_REFUSED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"})

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
        except (TemplateError, RecursionError, ValueError, SyntaxError) as error:
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

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._rounds = 0
        self._safe: dict[tuple[type, str], bool] = {}
        self._now = datetime.now()
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        replace = self.filters["replace"]
        self.filters["tojson"] = _to_json
        self.filters["replace"] = lambda *args, **named: _check_replace(args[1:]) and replace(*args, **named)
        self.filters["replace"].__dict__.update(vars(replace))  # what Jinja passes to it
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda layout: self._now.strftime(layout)
        self.filters["_round"] = self._round
        self.filters["_join"] = _join
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

    def begin(self, now: datetime) -> None:
        self._rounds, self._now = 0, now

    @pass_context
    def _round(self, context: object, _: object) -> None:
        """With a context, Jinja does not compute it once and for all when it compiles the template."""
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            raise SecurityError(f"it loops more than {MOST_ROUNDS} times")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _NAMES_OF_DICT:
            return obj[attribute]  # what Jinja finds too, after several checks: most of a rendering is this
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's answer depends on the type alone, so it is asked once per type."""
        safe = self._safe.get((type(obj), attr))
        if safe is None:
            safe = self._safe[type(obj), attr] = super().is_safe_attribute(obj, attr, value)
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
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            if function.__name__ in _REFUSED_METHODS:
                raise SecurityError(f"the method {function.__name__} is not allowed")
            if function.__name__ == "replace":
                _check_replace((owner, *args))
            elif function.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_size(sum(len(owner) + _length(each) for each in args[0]))
        return super().call(context, function, *args, **named)


class _Bounds(NodeTransformer):
    """Counts the rounds of every loop and every macro call, and checks the size of texts that `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_join", node.nodes[0], list(node.nodes[1:]), node)

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter("_round", nodes.Const(0), [], node), lineno=node.lineno))
        return node


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
    if isinstance(indent, int) and indent > 16:
        raise SecurityError("an indent above 16 is not allowed")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return unescaped(text) if ensure_ascii else text


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _join(*parts: object) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_replace(args: tuple[Any, ...]) -> bool:
    """`args`: the text, what to replace, the replacement."""
    if len(args) >= 3:
        _check_size((_length(args[0]) + 1) * max(1, _length(args[2])) // max(1, _length(args[1])))
    return True


def _check_size(size: int) -> None:
    if size > LARGEST_TEXT:
        raise SecurityError(f"it makes more than {LARGEST_TEXT} characters")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else value if isinstance(value, int) else 0


def _reason(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
