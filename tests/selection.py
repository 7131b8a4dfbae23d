"""Chooses the tests that `.ci/run` runs, so that it ends in time: python -m tests.selection FILE

Fast tests always run. Of the slow ones those run that the change can break, the nearest first: a test file reaches what
it and its helpers import, the modules and files that they name in strings, and so on. A rotating third of the others
runs too, so every test has its turn within a few commits. Kernels in the interpreter, Ray and vLLM run when their code
or contract changed, and on one commit in three otherwise. All of it is cut at LIMIT, by the seconds in durations.json.

FILE gets one chosen slow test file or group per line; tests/conftest.py reads it. `scripts/test --all` runs everything.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"  # seconds of each file's slow tests, as in `scripts/test --all`
GROUPS = {  # run by commands of their own, when a file changed that fits one of these patterns
    "kernels": (
        "*_triton.py",
        "rollmill/models/kernels/*",
        "rollmill/models/updates/*",
        "rollmill/training/optimizers/fused_adamw.py",
        "tests/kernels.py",
        "tests/models/test_hopper.py",
    ),
    "ray": ("*ray*.py", "rollmill/launch/launcher.py", "rollmill/launch/role.py"),
    "vllm": (
        "rollmill/inference/vllm/*",
        "rollmill/inference/engine.py",
        "rollmill/inference/engine_wire.py",
        "rollmill/inference/follower.py",
        "tests/inference/contract/*",
        "tests/inference/test_vllm.py",
        "constraints-vllm.txt",
    ),
}
GROUP_FILES = {"kernels": ("tests/models/test_hopper.py",)}  # slow test files that run with a group
GROUP_SECONDS = {"kernels": 210, "ray": 200, "vllm": 100}
FAST_SECONDS = 600  # the fast tests, beside which the slow ones run
LIMIT = 22 * 60  # of 25 minutes; the rest is set-up
WORKERS = 3  # that run tests side by side on two cores
UNMEASURED = 30  # seconds, of a file that durations.json does not name
EVERYWHERE = ("pyproject.toml", "constraints.txt", "tests/conftest.py")  # whatever runs depends on these
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
AGE = 6 * 3600

Graph = Mapping[str, Iterable[str]]


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def find_base(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The commit that the change begins after, and why this one."""
    if named := environment.get("ROLLMILL_TEST_BASE"):
        try:
            return git("rev-parse", "--verify", f"{named}^{{commit}}", root=root), "ROLLMILL_TEST_BASE"
        except subprocess.CalledProcessError:
            message = f"selection: ROLLMILL_TEST_BASE={named} is no commit of this clone\nhint: git fetch, or unset it"
            raise SystemExit(message) from None
    head = git("rev-parse", "HEAD", root=root)
    found = subprocess.run(["git", "merge-base", "HEAD", "origin/main"], cwd=root, capture_output=True, text=True)
    if found.returncode == 0 and found.stdout.strip() != head:
        return found.stdout.strip(), "where this branch left origin/main"
    before = int(git("show", "-s", "--format=%ct", "HEAD", root=root)) - AGE
    if old := git("rev-list", "-1", f"--before={before}", "HEAD", root=root):
        return old, "the newest commit six hours older than HEAD"
    return EMPTY_TREE, "no commit is six hours older than HEAD: everything is new"


def find_changes(base: str, root: Path = ROOT) -> set[str]:
    """Files that differ from the commit `base`, those too that are not committed yet."""
    changed = git("diff", "--name-only", "--no-renames", base, root=root).splitlines()
    new = git("ls-files", "--others", "--exclude-standard", root=root).splitlines()
    return {*changed, *new} - {DURATIONS.relative_to(ROOT).as_posix()}  # read only here


def read_graph(files: Iterable[str], root: Path = ROOT) -> dict[str, set[str]]:
    """For each Python file the files that it imports or names, of all `files` of the repository.

    A file of another kind, such as a template, belongs to the modules of its folder that name it, else to all of them.
    """
    known = set(files)
    modules = {module_name(path): path for path in known if path.endswith(".py")}
    graph = {}
    words: dict[str, set[str]] = {}
    for path in modules.values():
        tree = ast.parse((root / path).read_bytes())
        words[path] = strings(tree)
        found = {file for name in imported(tree, path) if (file := modules.get(name))}
        graph[path] = (found | named(words[path], path, modules, known) | conftests(path, known)) - {path}
    folders = defaultdict(list)
    for path in modules.values():
        folders[folder(path)].append(path)
    for path in known - set(modules.values()):
        beside = folders[folder(path)]
        owners = [module for module in beside if any(PurePosixPath(path).name in word for word in words[module])]
        for module in owners or beside:
            graph[module].add(path)
    return graph


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def folder(path: str) -> str:
    return str(PurePosixPath(path).parent)


def strings(tree: ast.AST) -> set[str]:
    """The strings of a file that are short enough to be names."""
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str) and len(value) < 200}


def imported(tree: ast.AST, path: str) -> set[str]:
    """The modules that a file imports, anywhere in it, and the packages that these are in."""
    names = set()
    package = module_name(path) if path.endswith("/__init__.py") else module_name(folder(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (start, node.module or "") if part)
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name.rsplit(".", parts)[0] for name in names for parts in range(name.count(".") + 1)}


def named(words: Iterable[str], path: str, modules: Mapping[str, str], known: set[str]) -> set[str]:
    """Files that the strings of a file name: "rollmill" or "package.module:Class", a path, a neighbour."""
    found = set()
    for word in words:
        name = word.partition(":")[0]
        if name == "rollmill":  # the command
            name = "rollmill.__main__"
        candidates = (modules.get(name) if "." in name else None, word, f"{folder(path)}/{word}")
        found |= {file for file in candidates if file in known}
    return found


def conftests(path: str, known: set[str]) -> set[str]:
    """The files with the fixtures that a test file may use, apart from the one that all have."""
    found = {str(parent / "conftest.py") for parent in PurePosixPath(path).parents}
    return found & known - set(EVERYWHERE)


def distances(start: str, graph: Graph) -> dict[str, int]:
    """How many imports each file is away from `start`."""
    found, edge = {start: 0}, [start]
    while edge:
        following = {file for path in edge for file in graph.get(path, ())} - found.keys()
        found.update(dict.fromkeys(following, found[edge[0]] + 1))
        edge = list(following)
    return found


def find_touched(tests: Iterable[str], changes: set[str], graph: Graph) -> dict[str, int]:
    """Of the test files those that reach a changed file, and how near it is."""
    everywhere = bool(changes & set(EVERYWHERE))
    touched = {}
    for test in tests:
        near = [distance for file, distance in distances(test, graph).items() if file in changes]
        if near or everywhere:
            touched[test] = min(near, default=len(graph))
    return touched


def draw(commit: str, name: str) -> int:
    """A number that looks random, but is the same for the same commit."""
    return int(hashlib.sha256(f"{commit} {name}".encode()).hexdigest(), 16)


def choose_groups(commit: str, changes: set[str]) -> dict[str, str]:
    """The groups to run, and why."""
    chosen = {}
    for group, patterns in GROUPS.items():
        touched = sorted(file for file in changes if any(fnmatch.fnmatch(file, pattern) for pattern in patterns))
        if touched:
            chosen[group] = f"{touched[0]} changed"
        elif draw(commit, group) % 3 == 0:
            chosen[group] = "the turn of this commit"
    return chosen


def with_files(groups: Iterable[str]) -> list[str]:
    """The groups, and the slow test files that run with them and only then."""
    return [name for group in groups for name in (group, *GROUP_FILES.get(group, ()))]


def choose(
    commit: str, tests: Iterable[str], touched: Mapping[str, int], seconds: Mapping[str, float], limit: float
) -> tuple[list[str], list[str]]:
    """The touched files that run, nearest first, and those whose turn it is: together at most `limit` seconds."""
    rest = sorted(set(tests) - set(touched), key=lambda test: draw(commit, test))
    third = min(sum(_seconds(test, seconds) for test in rest), limit) / 3
    near = sorted(touched, key=lambda test: (touched[test], draw(commit, test)))
    chosen = fill(near, seconds, limit - third)
    used = sum(_seconds(test, seconds) for test in chosen)
    return chosen, fill(rest, seconds, min(third, limit - used))


def fill(tests: Iterable[str], seconds: Mapping[str, float], limit: float) -> list[str]:
    """The first tests that fit: one that is too long is left out, and shorter ones after it may still run."""
    chosen = []
    for test in tests:
        if _seconds(test, seconds) <= limit:
            chosen.append(test)
            limit -= _seconds(test, seconds)
    return chosen


def _seconds(test: str, seconds: Mapping[str, float]) -> float:
    return seconds.get(test, UNMEASURED)


def find_slow(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files that have slow tests."""
    tests = [file for file in files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file)]
    return sorted(file for file in tests if "mark.slow" in (root / file).read_text(encoding="utf-8"))


def main(target: str) -> None:
    files = [file for file in git("ls-files").splitlines() if (ROOT / file).is_file()]
    commit = git("rev-parse", "HEAD")
    base, why = find_base()
    changes = find_changes(base)
    slow = sorted(set(find_slow(files)) - set(with_files(GROUPS)))
    touched = find_touched(slow, changes, read_graph(files))
    groups = choose_groups(commit, changes)
    seconds = json.loads(DURATIONS.read_text())
    limit = (LIMIT - FAST_SECONDS - sum(GROUP_SECONDS[group] for group in groups)) * WORKERS
    near, turn = choose(commit, slow, touched, seconds, limit)
    print(f"selection: the change begins after {base[:12]}, {why}; {len(changes)} files differ")
    print(f"selection: {len(near)} of {len(touched)} slow test files that reach them, nearest first:")
    print("".join(f"  {touched[test]:3} imports away  {test}\n" for test in near), end="")
    print(f"selection: {len(turn)} of {len(slow) - len(touched)} other slow test files, whose turn it is:")
    print("".join(f"  {test}\n" for test in turn), end="")
    for group in GROUPS:
        print(f"selection: {group}: {groups.get(group, 'not on this commit')}")
    total = sum(_seconds(test, seconds) for test in (*near, *turn))
    print(f"selection: {len(near) + len(turn)} of {len(slow)} slow test files, {total:.0f} s of at most {limit} s")
    Path(target).write_text("".join(f"{line}\n" for line in (*near, *turn, *with_files(groups))))


if __name__ == "__main__":
    main(sys.argv[1])
