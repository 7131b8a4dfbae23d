"""The pages of docs/reference, made from the code. `scripts/reference` writes them; a test compares them.

config.md comes from the configuration classes, cli.md from the commands, metrics.md from the tables of events and
metrics, python.md from the public classes, task-files.md from the classes that read tasks. In http.md the gateway's
routes come from its OpenAPI document, those of other servers from the calls that add them and the docstrings of their
handlers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import rollmill
from rollmill.cli.environments.task_files import task_files

PACKAGE = Path(rollmill.__file__).parent
_NOTE = "<!-- Written by scripts/reference from the code. Do not edit. -->"
_SERVERS = {
    "gateway": "Gateway",
    "inference": "Engine",
    "storage": "Store",
    "rollouts": "Proxy of `rollmill rollout`",
    "dashboard": "Dashboard",
    "machines/remote": "Machines for other hosts (`rollmill machines serve`)",
}
_METHODS = {"add_get": "GET", "add_post": "POST", "add_put": "PUT", "add_delete": "DELETE", "add_patch": "PATCH"}


def pages() -> dict[str, str]:
    """File name → text of every page."""
    makers: dict[str, Callable[[], Iterator[str]]] = {
        "config.md": _config,
        "cli.md": _commands,
        "http.md": _http,
        "metrics.md": _metrics,
        "python.md": _python,
        "task-files.md": task_files,
    }
    return {name: "\n".join([_NOTE, *make()]).rstrip() + "\n" for name, make in makers.items()}


# --- config.md


def _config() -> Iterator[str]:
    from rollmill.reference import sections
    from rollmill.runs.run import RunConfig

    yield "# Settings\n"
    yield (
        "Every key of a RUN.toml. `rollmill config SECTION` prints the same in the terminal, and\n"
        "`rollmill train RUN.toml --dry-run` prints a whole configuration with these descriptions as comments.\n"
        "Any setting can be given on the command line:\n"
        "`rollmill train RUN.toml stages.rl.training.optimizer.lr=1e-4`.\n"
        "What stands in a list is addressed by its `name`, else by its `kind`.\n"
    )
    titles: set[str] = set()
    for section in sections(RunConfig):
        if section.same_as and section.title in titles:  # of another stage
            continue
        titles.add(section.title)
        yield f"## {section.title}\n"
        yield f"{section.description}\n"
        if section.same_as:
            yield f"The same settings as `{section.same_as}`.\n"
        elif section.settings:
            rows = [
                (f"`{setting.name}`", setting.type, _code(setting.default), setting.description)
                for setting in section.settings
            ]
            yield from _table(("setting", "type", "default", "what it does"), rows)


def _code(default: str) -> str:
    return default if default in ("needed", "not set") else f"`{default}`"


# --- python.md


def _python() -> Iterator[str]:
    from rollmill.environments import part_sections as sections
    from rollmill.errors import RollmillError
    from rollmill.inference import engine_sections as engines
    from rollmill.training import stage
    from rollmill.training.pretraining import source

    yield "# Python\n"
    yield (
        "What a package of your own uses: `from rollmill import Task, TaskSet, Reward`. A RUN.toml names a class as\n"
        '`kind = "package.module:Class"`. The module is in an installed package or beside the file. The class is\n'
        "constructed with its own settings: `def __init__(self, config: MyConfig)`, where `MyConfig` derives from\n"
        "`rollmill.Config`.\n"
    )
    found = [each for module in (sections, stage, source, engines) for each in vars(module).values()]
    slots = [each.__dict__["_slot"] for each in found if "_slot" in getattr(each, "__dict__", {})]
    rows = [
        (
            f"`[{each.section}]`",
            _link(each.loaded_protocol().__name__),
            f"`{each.group}`",
            ", ".join(f"`{kind}`" for kind in each.built_in),
        )
        for each in slots
    ]
    yield from _table(("section", "its class is a", "group of entry points", "built-in kinds"), rows)
    for name in rollmill.PUBLIC:
        public = getattr(rollmill, name)
        yield f"## {name}\n"
        if issubclass(public, RollmillError) or name in ("Config", "Tokenizer"):
            yield f"{inspect.getdoc(public)}\n"
        else:
            yield f"```python\n{inspect.getsource(public).rstrip()}\n```\n"


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})" if name in rollmill.PUBLIC else f"`{name}`"


# --- cli.md


def _commands() -> Iterator[str]:
    import typer

    from rollmill.cli.main import app

    yield "# Commands\n"
    yield from _command(typer.main.get_command(app), "rollmill")


def _command(command: Any, path: str) -> Iterator[str]:
    """A command with its arguments and options, then the commands below it."""
    yield f"## {path}\n"
    below: Mapping[str, Any] = getattr(command, "commands", {})
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    if not below:
        yield f"    {' '.join([path, *map(_argument, arguments)])} [OPTIONS]\n"
    if command.help:
        text = inspect.cleandoc(command.help)
        text = re.sub(r"\x08\n((?:.+(?:\n|\Z))+)", lambda code: f"```\n{dedent(code[1]).rstrip()}\n```\n", text)
        yield text.rstrip() + "\n"
    if below:
        yield from _table(
            ("command", "what it does"),
            [(f"`{path} {name}`", _first_sentence(each.help)) for name, each in below.items() if not each.hidden],
        )
    else:
        rows = [(f"`{_argument(each)}`", each.help or "", "") for each in arguments]
        rows += [
            (_option(each), each.help or "", _option_default(each))
            for each in command.params
            if each.param_type_name == "option" and not each.hidden
        ]
        if rows:
            yield from _table(("argument or option", "meaning", "default"), rows)
    for name, each in below.items():
        if not each.hidden:
            yield from _command(each, f"{path} {name}")


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = name if argument.required else f"[{name}]"
    return f"{name}…" if argument.nargs == -1 or argument.multiple else name


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _option_default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    return "" if option.is_flag or value is None or value == "" or callable(value) else f"`{value}`"


def _first_sentence(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n\n")[0].replace("\n", " ")


# --- http.md


def _http() -> Iterator[str]:
    yield "# HTTP routes\n"
    yield (
        "What each server of a run answers. A key or token is sent as `Authorization: Bearer TOKEN`.\n"
        "Those of a run are in its `run.json`: `admin_token`, `engine_token`, `store_token`, `production_key`,\n"
        "`rollout_key`.\n"
        "An error has a JSON body that says what was wrong and what to do.\n"
    )
    found = list(routes())
    for package, title in _SERVERS.items():
        rows = [row for where, row in found if where == package]
        yield f"## {title}\n"
        yield from _table(("route", "what it does", "needs", "takes", "returns"), rows)


def routes() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(package, row) of every route. Those of the gateway come from its OpenAPI document, the others from the calls
    that add them and the docstrings of their handlers."""
    for path, operations in gateway_document()["paths"].items():
        for method, operation in operations.items():
            facts = dict(fact.split(": ", 1) for fact in operation["description"].split("\n\n"))
            told = (facts.get(name, "").removesuffix(".") for name in ("Needs", "Takes", "Returns"))
            yield "gateway", (f"`{method.upper()} {path}`", operation["summary"], *told)
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        package = next((server for server in _SERVERS if where.startswith(f"{server}/")), None)
        if package not in (None, "gateway"):  # the proxy of an episode is for its harness alone
            yield from ((package, row) for row in _routes_in(ast.parse(path.read_text(encoding="utf-8"))))


def _routes_in(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    from rollmill.gateway.openapi import read_docstring

    handlers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        method = _METHODS.get(node.func.attr)
        if method and ast.unparse(node.func.value).endswith("router"):
            place = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", ast.literal_eval(node.args[0]))  # without its pattern
            handler = handlers[ast.unparse(node.args[1]).rpartition(".")[2]]
            yield f"`{method} {place}`", *read_docstring(ast.get_docstring(handler) or "")


@functools.cache
def gateway_document() -> dict[str, Any]:
    """The OpenAPI document of a gateway with all routes, which does not run."""
    from rollmill.chat.formats.choice import format_of
    from rollmill.demo.tokenizer import demo_tokenizer
    from rollmill.gateway.app import make_app
    from rollmill.gateway.config import GatewayConfig
    from rollmill.gateway.gateway_parts import GatewayInputs
    from rollmill.gateway.openapi import document
    from rollmill.gateway.routing.fleet import Fleet
    from rollmill.storage.database import open_database
    from rollmill.storage.objects import Objects
    from rollmill.trajectories.trajectory_store import TrajectoryStore

    tokenizer = demo_tokenizer(512)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        database, objects = open_database(f"sqlite:///{directory}/mill.db"), Objects.open(directory / "store")
        stores = TrajectoryStore(database, objects), objects, directory / "gateway"
        fleet = Fleet(database, "run", "token")
        given = GatewayInputs(GatewayConfig(), format_of(tokenizer), tokenizer, *stores, "admin", fleet=fleet)
        return document(make_app(given))


# --- metrics.md


def _metrics() -> Iterator[str]:
    from rollmill.events import EVENTS
    from rollmill.gateway.watching.metrics import METRICS as GATEWAY
    from rollmill.gateway.watching.metrics import kind_of
    from rollmill.inference.engine import METRICS as ENGINE

    yield "# Events and metrics\n"
    yield (
        "Events are JSON lines in `runs/NAME/events/PROCESS.jsonl`. Every event also has `at` (seconds since the\n"
        "epoch), `process` and `kind`. Metrics are Prometheus text at `/metrics` of the gateway and of each engine.\n"
    )
    for kind, event in EVENTS.items():
        yield f"## Event `{kind}`\n"
        yield f"{event.meaning}\n"
        yield from _table(("field", "meaning"), [(f"`{name}`", meaning) for name, meaning in event.fields.items()])
    for title, prefix, metrics in (("gateway", "rollmill_gateway_", GATEWAY), ("engine", "rollmill_engine_", ENGINE)):
        yield f"## Metrics of the {title}\n"
        rows = [(f"`{prefix}{name}`", kind_of(name), meaning) for name, meaning in metrics.items()]
        yield from _table(("name", "type", "meaning; labels in braces"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (directory / file).write_text(text, encoding="utf-8")
