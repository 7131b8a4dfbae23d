"""Rules for the whole repository: layers, light imports, sizes, examples, and documents that are true.

Every test walks the tree, so a new file, example, document or command is checked too.
"""

from __future__ import annotations

import ast
import collections
import fnmatch
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rollmill

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rollmill"
SKIPPED = {".git", ".venv", ".venv-vllm", "build", "dist", "__pycache__"}

# Imports go downwards only: a module may import from strictly lower rows, and from its own package.
LAYERS = (
    ("errors",),
    ("tls",),
    ("backoff", "strict", "keepalive", "histogram"),
    ("types", "events", "signals"),
    ("config",),
    ("reference", "kinds"),
    ("telemetry",),
    ("storage",),
    ("chat",),
    ("trajectories", "weights"),
    ("models",),
    ("inference",),
    ("gateway",),
    ("machines",),
    ("environments",),
    ("rollouts",),
    ("training",),
    ("evals",),
    ("feedback",),
    ("runs",),
    ("dashboard",),
    ("launch",),
    ("realtime",),
    ("demo",),  # a user like any other: nothing but its command imports it
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TORCH_ALLOWED = (
    "rollmill.training",
    "rollmill.models",
    "rollmill.inference.embedded",
    "rollmill.inference.vllm.plugin",  # vLLM's own processes import it
    # imported only by the processes that compute
    "rollmill.launch.roles.trainer",
    "rollmill.launch.roles.engine",
)
PLUGINS = ("rollmill.environments.harbor.environment",)  # imported by Harbor, which may not be installed
GUESTS = (  # run programs inside a machine
    "rollmill.machines.guest.warm_python",
    "rollmill.environments.rewards.apart.tester",
)


def files(pattern: str) -> list[Path]:
    found = []
    for path in sorted(ROOT.rglob(pattern)):
        parts = path.relative_to(ROOT).parts
        if parts[0] == "runs" or any(part in SKIPPED or part.endswith((".egg-info", "_cache")) for part in parts):
            continue
        if path.is_file():
            found.append(path)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = files("*.py")
DOCUMENTS = files("*.md")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """The absolute names an import statement brings in; `from a import b` may mean the module a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> str | None:
    """The second part of a module name of this package: its entry in LAYERS."""
    parts = name.split(".")
    return parts[1] if parts[0] == "rollmill" and len(parts) > 1 and not parts[1].startswith("__") else None


# --- code


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards_only(name: str) -> None:
    mine = layer(name)
    if mine is None:
        return
    assert mine in RANK, f"{mine} has no place in LAYERS yet"
    for node in ast.walk(tree(MODULES[name])):
        for target in imported(node):
            other = layer(target)
            if other is not None and other != mine:
                assert other in RANK, f"{target} is no known layer"
                assert RANK[other] < RANK[mine], f"{name} imports {target}, which is not below it"


# The folders of each package that has several, lowest first: a folder may import from those before it.
FOLDERS = {
    "rollmill.chat": ("call_families", "formats"),
    "rollmill.cli": ("weights", "experience", "environments", "serving"),
    "rollmill.environments": ("harnesses", "samplers", "tasks", "rewards", "packages", "harbor"),
    "rollmill.gateway": ("wire", "access", "watching", "sessions", "recording", "routing", "routes"),
    "rollmill.inference": ("embedded", "vllm"),
    "rollmill.launch": ("launchers", "roles"),
    "rollmill.machines": ("guest", "oci", "images", "namespace", "remote", "qemu"),
    "rollmill.models": ("kernels", "updates", "huggingface"),
    "rollmill.models.kernels": ("quantised", "attention", "heads"),
    "rollmill.runs": ("configuration", "shared", "sinks"),
    "rollmill.training": ("numerics", "parallel", "publishing", "optimizers", "rl", "pretraining", "stages"),
    "rollmill.weights": ("format", "reading", "writing", "files", "regions"),
}


# Modules named after the same thing in different places: its settings, its command, the same tool in another form.
# A new pair needs another name: whoever reads it in an import or a traceback should know which one is meant.
TWICE = frozenset(
    """
    app choice client config dispatcher engine environment files generation harbor hermes host jsonl kind launch loops
    machine ports sampler services shell streams tokenizer
    """.split()
)


def packages() -> list[str]:
    return sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


@cache
def module_imports() -> tuple[tuple[str, str], ...]:
    """(importer, imported) for all modules, wherever in a file the import stands."""
    found = set()
    for name, path in MODULES.items():
        for node in ast.walk(tree(path)):
            for target in imported(node):
                known = target if target in MODULES else target.rpartition(".")[0]
                if known in MODULES and known != name:
                    found.add((name, known))
    return tuple(sorted(found))


def circle(order: dict[str, set[str]]) -> set[str]:
    """What is left when all that imports nothing left, or that nothing left imports, is taken away again and again."""
    left = dict(order)
    while gone := [one for one in left if not left[one] & left.keys() or all(one not in left[other] for other in left)]:
        for one in gone:
            del left[one]
    return set(left)


def parts_imported(package: str) -> dict[str, set[str]]:
    """For each part of a package (a module or a folder) the parts that it imports."""
    order: dict[str, set[str]] = collections.defaultdict(set)
    for importer, target in module_imports():
        if importer.startswith(f"{package}.") and target.startswith(f"{package}."):
            mine, other = (name.removeprefix(f"{package}.").split(".")[0] for name in (importer, target))
            if mine != other:
                order[mine].add(other)
    return order


@pytest.mark.parametrize("package", packages())
def test_the_parts_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    assert not circle(parts_imported(package)), "move what both need to a part below"


def test_the_folders_of_a_package_have_an_order() -> None:
    """Also what a folder imports by way of a module beside it is below it."""
    folders: dict[str, set[str]] = collections.defaultdict(set)
    for name in packages():
        folders[name.rpartition(".")[0]].add(name.rpartition(".")[2])
    several = {package: found for package, found in folders.items() if "." in package and len(found) > 1}
    assert {package: set(order) for package, order in FOLDERS.items()} == several, (
        "FOLDERS lists the folders of every package that has several, in the order of their imports"
    )
    for package, order in FOLDERS.items():
        imports = parts_imported(package)
        for number, folder in enumerate(order):
            reached, open_parts = set(), [folder]
            while open_parts:
                new = imports[open_parts.pop()] - reached
                reached |= new
                open_parts += new
            assert not reached & set(order[number + 1 :]), f"{package}.{folder} imports what is not below it"


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == set()


@pytest.mark.parametrize("package", packages())
def test_a_folder_can_be_looked_over(package: str) -> None:
    modules = [name for name in MODULES if name.rpartition(".")[0] == package and name not in packages()]
    assert len(modules) <= 20, f"{package} has {len(modules)} modules"


def test_a_module_name_means_one_thing() -> None:
    stems = collections.Counter(name.rpartition(".")[2] for name in MODULES if name not in packages())
    assert {name for name, count in stems.items() if count > 1} <= TWICE


def test_ray_is_imported_in_one_module() -> None:
    """Everything else is handed what that module connected to: a run without Ray needs none, and tests stand in."""
    users = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(tree(path))
        for target in imported(node)
        if target.split(".")[0] == "ray"
    }
    assert users == {"rollmill.launch.launchers.ray_cluster"}


def test_every_package_has_an_init() -> None:
    for path in SOURCES:
        if path.parent != ROOT and path.parts[len(ROOT.parts)] in ("rollmill", "tests", "benchmarks"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_fit_a_reader(name: str) -> None:
    lines = MODULES[name].read_text(encoding="utf-8").count("\n")
    assert lines <= 500, f"{name} has {lines} lines"
    for node in ast.walk(tree(MODULES[name])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{name}.{node.name} has {length} lines"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_executes_data(name: str) -> None:
    for node in ast.walk(tree(MODULES[name])):
        for target in imported(node):
            allowed = name == "rollmill.environments.rewards.apart.session" and target == "marshal"  # writes, see below
            forbidden = ("pickle", "cPickle", "dill", "marshal", "shelve")
            assert allowed or target.split(".")[0] not in forbidden, f"{name}: {target}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("marshal.load", "marshal.loads"), f"{name}: {called}"
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        assert name in GUESTS or called not in ("eval", "exec", "os.system", "os.popen"), f"{name} calls {called}"
        shell = keywords.get("shell")
        assert not (isinstance(shell, ast.Constant) and shell.value), f"{name}:{node.lineno} runs a shell string"
        if called == "torch.load":
            assert "weights_only" in keywords, f"{name}:{node.lineno} could unpickle anything"


def test_no_module_is_called_utils() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "util", "helpers", "common", "misc"), path


def test_no_comment_marks_unfinished_work() -> None:
    unfinished = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    for path in [*SOURCES, *DOCUMENTS, *files("*.toml"), *files("*.js"), *files("*.css")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not unfinished.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


# --- light imports


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_run_imports_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['rollmill', 'train', 'examples/micro.toml', '--dry-run']\n"
        "from rollmill.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert "steps" in python(script)


def test_importing_is_light_and_has_no_side_effects() -> None:
    """Imports every module that may not import torch, in one process: indirect imports count too.

    The process runs in an empty directory, prints nothing and leaves nothing there.
    """
    left_out = (*TORCH_ALLOWED, *PLUGINS)
    names = [name for name in MODULES if not name.startswith(left_out) and not name.endswith("__main__")]
    names += [name for name in MODULES if name.endswith(".config")]  # configuration is read before torch is needed
    script = (
        f"import importlib, os, sys, tempfile; sys.path.insert(0, {str(ROOT)!r})\n"
        "os.chdir(tempfile.mkdtemp())\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n        sys.exit(f'{name} imports torch')\n"
        "assert os.listdir('.') == [], os.listdir('.')\n"
        "os.rmdir(os.getcwd())\n"
    )
    assert python(script) == ""


# --- configuration and packaging


@cache
def project() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


POPULATIONS = sorted((PACKAGE / "demo" / "populations").glob("*.toml"))  # simulated users: no runs
EXAMPLES = [*sorted((ROOT / "examples").rglob("*.toml")), *sorted(set(PACKAGE.rglob("*.toml")) - set(POPULATIONS))]


@pytest.mark.parametrize("path", POPULATIONS, ids=str)
def test_every_population_loads(path: Path) -> None:
    from rollmill.demo.simulated_users import load_population

    assert load_population(path.stem) == load_population(str(path))


def example_overrides(path: Path) -> list[str]:
    """What an example needs to load in an empty directory: a name, and a stand-in for its checkpoint."""
    tree = tomllib.loads(path.read_text())
    if "checkpoint" in tree:  # its shape is all that is looked at
        Path(tree["checkpoint"]).mkdir(parents=True)
        (Path(tree["checkpoint"]) / "config.json").write_text(json.dumps(SMOLLM2))
    return [] if "name" in tree else ['name="example"']


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_every_example_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.config import load_config
    from rollmill.runs.run import RunConfig

    monkeypatch.chdir(tmp_path)
    load_config(RunConfig, path, example_overrides(path))


def test_everything_in_the_package_is_shipped() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["rollmill"]
    for path in PACKAGE.rglob("*"):
        relative = path.relative_to(PACKAGE).as_posix()
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
            shipped = any(fnmatch.fnmatch(f"/{relative}", pattern.replace("**/", "*/")) for pattern in patterns)
            assert shipped, f"rollmill/{relative} matches no package-data pattern"


def test_versions_are_pinned_and_agree() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"{line!r} is not an exact, portable pin"
    assert "torch==2.13.0" in lines
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    groups = project()["project"]["optional-dependencies"].values()
    for requirement in [*project()["project"]["dependencies"], *(one for group in groups for one in group)]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None
        assert name[0] == "rollmill" or re.sub(r"[-_.]+", "-", name[0]).lower() in pinned, (
            f"{requirement} is not pinned"
        )
    assert project()["project"]["version"] == rollmill.__version__
    assert f"## {rollmill.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    "path",
    [*sorted(path for path in (ROOT / "scripts").glob("[a-z]*") if not path.suffix), ROOT / ".ci" / "run"],
    ids=lambda path: path.name,
)
def test_scripts_are_careful_and_executable(path: Path) -> None:
    text = path.read_text()
    assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    subprocess.run(["bash", "-n", str(path)], check=True)


# --- documents

TOP = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in SKIPPED)
PLACEHOLDER = re.compile(r"(^|/)([A-Z][A-Z0-9_]*|\.\.\.)(/|$)|[…<>$]")


def code_lines(text: str) -> Iterator[str]:
    """Lines of indented and fenced code, with their indentation."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line


def snippets(text: str) -> Iterator[str]:
    """All code of a document: between backticks, and the command part of code lines (two spaces begin a comment)."""
    yield from re.findall(r"`([^`\n]+)`", text)
    for line in code_lines(text):
        yield re.split(r" {2,}|\s#\s", line.strip())[0]


def expand(path: str) -> list[str]:
    """`scripts/{setup,check}` names two paths."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if braces is None:
        return [path]
    return [
        one for choice in braces[1].split(",") for one in expand(path[: braces.start()] + choice + path[braces.end() :])
    ]


def named_paths(text: str) -> Iterator[str]:
    """Words in code that are paths of this repository: below one of its directories, or files at its root."""
    for snippet in snippets(text):
        for word in snippet.split():
            word = word.strip("(),;:\"'")
            path = word.partition("::")[0].rstrip("/")
            in_tree = path.split("/")[0] in TOP and "/" in word
            at_root = re.fullmatch(r"[A-Za-z]+\.(md|toml|txt)", path) is not None and snippet == word
            if (in_tree or at_root) and not PLACEHOLDER.search(path):
                yield from expand(path)


def tree_paths(text: str) -> Iterator[str]:
    """Paths of a file tree: names that end in / or a file suffix, nested by indentation."""
    parents: list[tuple[int, str]] = []
    for line in code_lines(text):
        indent = len(line) - len(line.lstrip())
        names = re.match(r"((?:[\w.-]+(?:/[\w.-]+)*(?:/|\.py|\.md|\.toml))(?:  ?(?=[\w.-]+\.py)|))+", line.strip())
        parents = [(depth, name) for depth, name in parents if depth < indent]
        if names is None:
            continue
        prefix = "".join(name for _, name in parents)
        words = names[0].split()
        if parents or words[0].rstrip("/") in TOP:
            yield from (prefix + word for word in words)
            if words[0].endswith("/"):
                parents.append((indent, words[0]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [
        link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link and not link.startswith("mailto:")
    ]
    for link in links:
        assert (document.parent / link).exists(), f"link to {link}"
    for path in [*named_paths(text), *tree_paths(text)]:
        here = document.parent / path
        assert here.exists() or any(ROOT.glob(path.rstrip("/"))), f"{path} is named but not there"


def test_the_file_tree_is_complete() -> None:
    """ARCHITECTURE.md names every folder and root module of the package."""
    named = set(tree_paths((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    folders = {path.parent.relative_to(ROOT).as_posix() + "/" for path in PACKAGE.rglob("*") if path.is_file()}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    wanted = {path for path in folders | modules if "__pycache__" not in path}
    assert wanted - named == set()


@cache
def command_line() -> Any:
    import typer

    from rollmill.cli.main import app

    return typer.main.get_command(app)


def check_command(words: list[str]) -> None:
    """`rollmill a b --option`: a and b are commands, the option is one of theirs."""
    command = command_line()
    for word in words:
        commands = getattr(command, "commands", None)
        if word.startswith("-"):
            options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            assert word.partition("=")[0] in options | {"--help"}, f"{word} is no option of {command.name}"
        elif commands is not None:
            assert word in commands, f"{word} is no command of {command.name}"
            command = commands[word]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_named_in_documents_exist(document: Path) -> None:
    for snippet in snippets(document.read_text(encoding="utf-8")):
        words = snippet.split()
        if len(words) > 1 and words[0] in ("rollmill", ".venv/bin/rollmill") and not re.search(r"[|…]|\.\.\.", snippet):
            check_command(words[1:])
        module = re.search(r"python3? -m ((?:benchmarks|rollmill)(?:\.\w+)+)", snippet)
        if module and not module[1].rpartition(".")[2].isupper():
            assert importlib.util.find_spec(module[1]), f"python -m {module[1]} is named but not there"
        if words and words[0].startswith(("scripts/", ".ci/")):
            assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} cannot be run"


def test_paths_and_trees_in_documents_are_found() -> None:
    """The tests above would pass if their helpers found nothing."""
    sample = (
        "Text with `rollmill/types.py`, `scripts/{setup,check}`, `runs/NAME/report.html`, `tests/X/Y` and `a/b`.\n\n"
        "    scripts/test tests/cli   runs some\n"
        "    rollmill/\n      types.py  errors.py    nouns\n      storage/      objects\n    examples/   more\n"
    )
    assert list(named_paths(sample))[:3] == ["rollmill/types.py", "scripts/setup", "scripts/check"]
    assert "tests/cli" in set(named_paths(sample)) and not any("NAME" in path for path in named_paths(sample))
    assert {"rollmill/types.py", "rollmill/errors.py", "rollmill/storage/", "examples/"} <= set(tree_paths(sample))
