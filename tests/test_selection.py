"""The choice of tests for a change: what it reaches, its base, turns, and the limit."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, selection

SOURCES = {
    "shop/__init__.py": "",
    "shop/__main__.py": "from shop.sell import sell",
    "shop/sell.py": "from . import till\nKINDS = {'card': 'shop.cards.plastic:Card'}",
    "shop/till.py": "PAGE = 'receipt.html'",
    "shop/other.py": "",
    "shop/receipt.html": "<p>",
    "shop/cards/__init__.py": "",
    "shop/cards/plastic.py": "class Card: ...",
    "shop/cards/rates.toml": "rate = 1",
    "tests/__init__.py": "",
    "tests/conftest.py": "from shop import sell",
    "tests/deep/__init__.py": "",
    "tests/deep/conftest.py": "from shop import other",
    "tests/deep/test_deep.py": "import pytest\nmark = pytest.mark.slow",
    "tests/test_sell.py": "import pytest\ndef test():\n    from shop import sell\nmark = pytest.mark.slow",
    "tests/test_command.py": "import pytest\nCOMMAND = ['-m', 'tests.worker']\nmark = pytest.mark.slow",
    "tests/worker.py": "import shop.till",
    "tests/test_fast.py": "",
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    selection.git("init", "-q", "-b", "main", root=tmp_path)
    commit(tmp_path, "first", "2026-01-01T00:00:00Z")
    return tmp_path


def commit(root: Path, message: str, date: str) -> str:
    selection.git("add", "--all", root=root)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(
        ["git", *who, "commit", "-q", "--allow-empty", "-m", message],
        cwd=root,
        check=True,
        env={**os.environ, "GIT_COMMITTER_DATE": date},
    )
    return selection.git("rev-parse", "HEAD", root=root)


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("shop/till.py", {"tests/test_sell.py": 2, "tests/test_command.py": 2}),
        ("shop/receipt.html", {"tests/test_sell.py": 3, "tests/test_command.py": 3}),
        ("shop/cards/plastic.py", {"tests/test_sell.py": 2}),
        ("shop/cards/rates.toml", {"tests/test_sell.py": 3}),
        ("shop/other.py", {"tests/deep/test_deep.py": 2}),
        ("tests/worker.py", {"tests/test_command.py": 1}),
        ("tests/test_sell.py", {"tests/test_sell.py": 0}),
        ("shop/__main__.py", {}),
        ("README.md", {}),
    ],
)
def test_a_test_file_reaches_what_it_imports_and_names(shop: Path, changed: str, touched: dict[str, int]) -> None:
    slow = selection.find_slow(SOURCES, shop)
    assert slow == ["tests/deep/test_deep.py", "tests/test_command.py", "tests/test_sell.py"]
    assert selection.find_touched(slow, {changed}, selection.read_graph(SOURCES, shop)) == touched


@pytest.mark.parametrize("changed", selection.EVERYWHERE)
def test_some_files_touch_every_test_but_from_afar(shop: Path, changed: str) -> None:
    slow = selection.find_slow(SOURCES, shop)
    touched = selection.find_touched(slow, {changed, "shop/till.py"}, selection.read_graph(SOURCES, shop))
    assert set(touched) == set(slow) and max(touched, key=touched.__getitem__) == "tests/deep/test_deep.py"


def test_the_command_is_a_name_of_its_package() -> None:
    files = selection.git("ls-files", "rollmill/__main__.py", "rollmill/__init__.py").splitlines()
    modules = {selection.module_name(file): file for file in files}
    assert selection.named({"rollmill"}, "tests/test_x.py", modules, set(files)) == {"rollmill/__main__.py"}


def test_the_base_is_named_or_where_the_branch_began_or_six_hours_old(shop: Path) -> None:
    first = selection.git("rev-parse", "HEAD", root=shop)
    assert selection.find_base(shop, {})[0] == selection.EMPTY_TREE
    second = commit(shop, "second", "2026-01-01T05:59:00Z")
    commit(shop, "third", "2026-01-01T11:00:00Z")
    assert selection.find_base(shop, {})[0] == first
    selection.git("update-ref", "refs/remotes/origin/main", "HEAD", root=shop)
    assert selection.find_base(shop, {})[0] == first, "HEAD is what origin/main is"
    selection.git("update-ref", "refs/remotes/origin/main", second, root=shop)
    assert selection.find_base(shop, {})[0] == second
    assert selection.find_base(shop, {"ROLLMILL_TEST_BASE": first})[0] == first
    with pytest.raises(SystemExit, match="nothing is no commit"):
        selection.find_base(shop, {"ROLLMILL_TEST_BASE": "nothing"})


def test_changes_are_those_of_commits_and_of_the_tree_with_both_names_of_what_moved(shop: Path) -> None:
    first = selection.git("rev-parse", "HEAD", root=shop)
    (shop / "shop/till.py").rename(shop / "shop/drawer.py")
    commit(shop, "second", "2026-01-02T00:00:00Z")
    (shop / "shop/sell.py").write_text("")
    (shop / "new.txt").write_text("")
    assert selection.find_changes(first, shop) == {"shop/till.py", "shop/drawer.py", "shop/sell.py", "new.txt"}
    assert selection.find_changes(selection.EMPTY_TREE, shop) >= SOURCES.keys() - {"shop/till.py"}


def test_near_tests_come_first_and_the_limit_holds() -> None:
    touched = {"far": 3, "near": 0, "long": 1}
    seconds = {"far": 50.0, "near": 50.0, "long": 90.0}
    assert selection.choose("c", touched, touched, seconds, 190) == (["near", "long", "far"], [])
    assert selection.choose("c", touched, touched, seconds, 120) == (["near", "far"], [])
    assert selection.choose("c", touched, touched, seconds, 10) == ([], [])


def test_a_third_of_the_others_has_its_turn_and_all_have_had_it_soon() -> None:
    tests = [f"test_{number}" for number in range(30)]
    seconds = dict.fromkeys(tests, 10.0)
    turns = [selection.choose(f"commit {number}", tests, {}, seconds, 1000)[1] for number in range(20)]
    assert {len(turn) for turn in turns} == {10}
    assert turns[0] == selection.choose("commit 0", reversed(tests), {}, seconds, 1000)[1]
    assert set().union(*turns) == set(tests)
    assert len(selection.choose("c", tests, {}, seconds, 60)[1]) == 2, "a third of the limit"
    touched = dict.fromkeys(tests[:15], 1)
    near, turn = selection.choose("c", tests, touched, seconds, 120)
    assert (len(near), len(turn)) == (8, 4), "nor does what is touched take it all"


def test_a_file_without_a_duration_counts_as_long() -> None:
    assert selection.choose("c", ["a", "b"], {"a": 0, "b": 1}, {}, 1.5 * selection.UNMEASURED) == (["a"], [])


def test_groups_run_when_their_code_changed_and_on_one_commit_in_three() -> None:
    commits = [str(number) for number in range(300)]
    runs = [selection.choose_groups(name, set()) for name in commits]
    for group in selection.GROUPS:
        assert 70 < sum(group in chosen for chosen in runs) < 130
    always = [selection.choose_groups(name, {"rollmill/models/kernels/heads/head_triton.py"}) for name in commits]
    assert all("kernels" in chosen for chosen in always) and not all("ray" in chosen for chosen in always)


def test_every_pattern_of_a_group_fits_a_file() -> None:
    files = selection.git("ls-files").splitlines()
    for pattern in (pattern for patterns in selection.GROUPS.values() for pattern in patterns):
        assert fnmatch.filter(files, pattern), f"{pattern} fits no file"


def test_even_everything_fits_into_the_time() -> None:
    longest = sum(selection.GROUP_SECONDS.values()) + selection.FAST_SECONDS
    assert longest < selection.LIMIT < 25 * 60
    assert selection.GROUP_SECONDS.keys() == selection.GROUPS.keys()


def test_durations_are_of_files_there_are_and_new_ones_join(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    path.write_text(json.dumps({"tests/test_repo.py": 1, "tests/gone.py": 2}))
    conftest.record({"tests/test_scale.py": 3.14159}, path)
    assert json.loads(path.read_text()) == {"tests/test_repo.py": 1, "tests/test_scale.py": 3.1}
    slow = selection.find_slow(selection.git("ls-files").splitlines())
    assert json.loads(selection.DURATIONS.read_text()).keys() <= set(slow)


def test_pytest_runs_fast_tests_and_the_chosen_slow_ones(tmp_path: Path) -> None:
    """The hooks of tests/conftest.py, in a repository of three tests."""
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "durations.json"):
        (tmp_path / "tests" / name).write_text((selection.ROOT / "tests" / name).read_text())
    slow = "import pytest\n@pytest.mark.slow\ndef test_slow(): ...\n"
    (tmp_path / "tests/test_one.py").write_text(slow)
    (tmp_path / "tests/test_two.py").write_text(slow + "def test_fast(): ...\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'kernels']\n")
    (tmp_path / "chosen").write_text("tests/test_one.py\nray\n")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "xdist", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env={
            **outside,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "ROLLMILL_TEST_SELECTION": "chosen",
            "ROLLMILL_TEST_DURATIONS": "yes",
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tests/test_one.py::test_slow" in ran.stdout and "tests/test_two.py::test_fast" in ran.stdout
    assert "tests/test_two.py::test_slow" not in ran.stdout
    assert list(json.loads((tmp_path / "tests/durations.json").read_text())) == ["tests/test_one.py"]


def test_slow_files_of_a_group_run_with_it() -> None:
    assert selection.with_files(["ray", "kernels"]) == ["ray", "kernels", "tests/models/test_hopper.py"]
    slow = selection.find_slow(selection.git("ls-files", "tests").splitlines())
    assert {name for name in selection.with_files(selection.GROUPS) if "/" in name} <= set(slow)
