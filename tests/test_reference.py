"""The settings as people read them: `rollmill config`, and `--dry-run`, whose output is a configuration file."""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from rollmill.cli.config import print_config
from rollmill.cli.main import app
from rollmill.config import Config, load_config
from rollmill.errors import ConfigError
from rollmill.gateway.watching.metrics import METRICS
from rollmill.reference import find_sections, sections, setting_paths, to_toml
from rollmill.runs.run import RunConfig
from scripts.reference_pages import pages, routes
from tests.test_repo import (
    DOCUMENTS,
    EXAMPLES,
    MODULES,
    ROOT,
    check_command,
    command_line,
    example_overrides,
    snippets,
    tree,
)

MICRO = next(path for path in EXAMPLES if path.name == "micro.toml")


class Square(Config):
    kind: Literal["square"] = "square"
    side: float = 1.0


class Circle(Config):
    kind: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0, description="Half its width.")


class Everything(Config):
    text: str = ""
    whole: int = 0
    number: float = 0.0
    flag: bool = False
    many: tuple[str, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()
    table: dict[str, int] = Field(default_factory=dict)
    maybe: int | None = None
    shape: Annotated[Square | Circle, Field(discriminator="kind")] = Square()
    named: dict[str, Circle] = Field(default_factory=dict)
    listed: tuple[Circle, ...] = ()
    absent: Circle | None = None


NASTY = 'quote " backslash \\ newline \n tab \t zero \0 bell \a del \x7f # = [x] \'\'\' """ é 漢 \U0001f600 \u2028 \r\n'


@pytest.mark.parametrize(
    "config",
    [
        Everything(),
        Everything(text=NASTY, many=(NASTY, "", "a,b"), table={NASTY: 1, "": 2, "a.b": 3, "plain-key_1": 4}),
        Everything(whole=-(2**63), number=1e-300, flag=True, maybe=0, pairs=((1, 2.5), (3, -0.0))),
        *(Everything(number=number) for number in (math.inf, -math.inf, 1e22, 0.1 + 0.2, -0.0)),
        Everything(shape=Circle(radius=2.0), named={"a b": Circle(radius=3.0), "c": Circle()}, absent=Circle()),
        Everything(listed=(Circle(radius=4.0), Circle(radius=5.0)), many=("x",)),
    ],
)  # fmt: skip
def test_every_type_of_value_survives_toml(config: Everything, tmp_path: Path) -> None:
    path = tmp_path / "saved.toml"
    path.write_text(to_toml(config))
    assert load_config(Everything, path) == config


def test_not_a_number_survives_toml() -> None:
    assert math.isnan(tomllib.loads(to_toml(Everything(number=math.nan)))["number"])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_printed_configuration_can_be_saved_and_run(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(RunConfig, example, example_overrides(example))
    print_config(config)
    saved = tmp_path / "saved.toml"
    saved.write_text(capsys.readouterr().out)
    assert load_config(RunConfig, saved) == config


def test_a_dry_run_prints_the_configuration_with_comments() -> None:
    done = CliRunner().invoke(app, ["train", str(MICRO), "seed=7", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.stdout)["seed"] == 7 and "# Peak learning rate" in done.stdout


def test_a_dry_run_keeps_the_database_password_to_itself() -> None:
    url = "postgresql+psycopg://me:hunter2@host/db?password=hunter2"
    done = CliRunner().invoke(app, ["train", str(MICRO), f"database={url}", "--dry-run"])
    assert 'database = "postgresql+psycopg://me@host/db"' in done.stdout and "hunter2" not in done.output


def test_settings_know_type_default_and_bounds() -> None:
    (section,) = find_sections(RunConfig, "stages.rl.training.optimizer.lr")
    (setting,) = section.settings
    assert (setting.path, setting.type, setting.default) == ("stages.rl.training.optimizer.lr", "number ≥ 0", "0.0005")
    kinds = {setting.name: setting.type for each in sections(Everything) for setting in each.settings}
    assert kinds["many"] == "list of text" and kinds["maybe"] == "integer" and kinds["flag"] == "true or false"
    assert [each.title for each in sections(Everything) if each.choice] == [
        '[shape] with kind = "square"', '[shape] with kind = "circle"',
    ]  # fmt: skip
    assert {"shape.radius", "named.NAME.radius", "absent"} <= setting_paths(Everything)


def test_sections_that_occur_twice_are_listed_once() -> None:
    same = {each.path: each.same_as for each in sections(RunConfig) if each.same_as}
    for below in ("training", "training.optimizer"):
        assert same[f"stages.rl.{below}"] == f"stages.midtrain.{below}"
    (section, *_) = find_sections(RunConfig, "stages.rl.training")
    assert section.settings[0].path.startswith("stages.rl.training.")


def test_the_command_explains_settings() -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "seed  integer; default 0" in shown()
    outline = re.findall(r"(?m)^  (\w+)  ", shown().split("sections, each")[1])
    assert len(outline) == len(set(outline)) and {"stages", "rewards", "engines", "machine", "gate"} <= set(outline)
    assert "Kinds: local, ray." in shown()
    assert "max_staleness  integer ≥ 0; default 2" in shown("stages.rl")
    assert "stages.rl.training.optimizer.lr" in shown("stages.rl") and "gateway." not in shown("stages.rl")
    assert "seed" not in shown("stages.rl.weight_cap") and "Upper bound" in shown("stages.rl.weight_cap")
    everything = shown("--all")
    assert all(setting.path in everything for each in sections(RunConfig) for setting in each.settings)


def test_an_unknown_section_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'rollout'\nhint: did you mean rollouts"):
        find_sections(RunConfig, "rollout")
    with pytest.raises(ConfigError, match=r"stages\.midtrain\.training"):
        find_sections(RunConfig, "training")
    with pytest.raises(ConfigError, match=r"training\.optimizer\.lr"):
        find_sections(RunConfig, "stages.rl.training.lr")
    with pytest.raises(ConfigError, match=r"sections: .*model, "):
        find_sections(RunConfig, "zzzzzzzz")


# --- settings named in messages and documents

SETTINGS = setting_paths(RunConfig)  # and `rollmill train --resume RUN steps=N`
HISTORY = ROOT / "docs" / "log"
CURRENT = [path for path in DOCUMENTS if HISTORY not in path.parents]
TOP = {path for path in SETTINGS if any(other.startswith(f"{path}.") for other in SETTINGS) and "." not in path}
DOTTED = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(TOP))})(?:\.[a-z_]+)+)(?![\w/(])")


FILES = (".py", ".gguf", ".safetensors", ".json", ".jsonl", ".toml")


def dotted(text: str) -> list[str]:
    """Settings named in a text. Without a sentence around it, `model.…` is a tensor, and `module:name` is code."""
    found = [] if (text.startswith("model.") or ":" in text) and " " not in text else DOTTED.findall(text)
    return [name for name in found if not name.endswith(FILES)]


def messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The texts of a module that people may read: every string but the docstrings."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def named_in_messages() -> Iterator[tuple[str, str]]:
    for name, path in MODULES.items():
        if name == "rollmill.storage.tables":  # columns
            continue
        for line, text in messages(tree(path)):
            yield from ((f"{name}:{line}", setting) for setting in dotted(text))
    for path, command in _commands(command_line(), ("rollmill",)):
        for setting in overrides(command.help or ""):
            yield " ".join(path), setting


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*path, name))


def overrides(text: str) -> Iterator[str]:
    """`key.path` of every `key.path=value` after `rollmill train`."""
    for line in re.findall(r"rollmill train[^\n`]*", text):
        yield from re.findall(r"(?<= )([a-z_.]+)=", line)


def test_settings_named_in_messages_and_help_exist() -> None:
    others = {"key.path", "steps", "ranks", "chat.completion", "chat.completion.chunk"}  # the last two are of OpenAI
    for where, setting in named_in_messages():
        assert setting in SETTINGS | others, f"{where} names the setting {setting}, which does not exist"


@pytest.mark.parametrize("document", [*CURRENT, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_named_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    code = "\n".join(snippets(text))
    names = {path.rpartition(".")[2] for path in SETTINGS}
    for setting in [*dotted(code), *overrides(text)]:
        assert setting in SETTINGS | {"key.path", "steps", "ranks"}, f"{setting} is no setting"
    # of reward and harness classes, and of the chat templates of a model
    others = {"wants_final_state", "wants_machine", "resumable", "enable_thinking"}
    others |= {"environment_mode"}  # of Harbor's task.toml
    for setting in re.findall(r"`([a-z_.]+) = [^`]+`", text):
        assert setting in SETTINGS or setting in names | others, f"{setting} is no setting"


def test_settings_in_texts_are_found() -> None:
    text = (
        "stages.lr, not rollmill.training.loss, training/loss.py or model.gguf, gateway.port, stages.rl.training.ranks."
    )
    assert dotted(text) == ["stages.lr", "gateway.port", "stages.rl.training.ranks"]
    assert list(overrides("rollmill train a.toml steps=3 stages.x=1")) == ["steps", "stages.x"]


# --- help


COMMANDS = {
    path: command
    for path, command in _commands(command_line(), ("rollmill",))
    if not getattr(command, "commands", None)
}


def _unfolded(text: str) -> list[str]:
    """Lines, those joined that a backslash continues."""
    return [line.strip() for line in re.sub(r" \\\n\s*", " ", text).splitlines()]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_teaches_by_example(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path[1:], "--help"], env={"COLUMNS": "120"})
    shown = _unfolded(done.stdout)
    examples = [line for line in _unfolded(COMMANDS[path].help) if line.startswith("rollmill ")]
    assert any(f"{line} ".startswith(f"{' '.join(path)} ") for line in examples), "its docstring has no example"
    for example in examples:
        assert example in shown, "an example stands on a line of its own"
        check_command(example.split()[1:])


# --- docs/reference


def test_the_pages_are_up_to_date() -> None:
    for name, text in pages().items():
        path = ROOT / "docs" / "reference" / name
        assert path.exists() and path.read_text(encoding="utf-8") == text, (
            f"docs/reference/{name}: run scripts/reference"
        )


def test_every_route_says_who_may_call_it_and_what_comes_back() -> None:
    found = list(routes())
    servers = {"gateway", "inference", "storage", "rollouts", "dashboard", "machines/remote"}
    assert {package for package, _ in found} == servers
    for package, (route, summary, needs, _, returns) in found:
        assert summary and needs and returns, (
            f"{package} {route}: its handler's docstring needs `Needs:` and `Returns:`"
        )


def test_every_gateway_metric_is_declared() -> None:
    for name, path in MODULES.items():
        if name.startswith("rollmill.gateway."):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("metrics.count"):
                    metric = ast.literal_eval(node.args[0])
                    assert metric in METRICS, f"{name}: declare {metric!r} in rollmill/gateway/watching/metrics.py"
