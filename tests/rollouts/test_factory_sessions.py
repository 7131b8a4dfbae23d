"""Tasks from traffic: `rollmill serve`, a product that reports what its users kept, and a repository with these
commits."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import GatewayError
from rollmill.runs.run import RunDirectory
from rollmill.signals import Signals
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState
from tests.cli.conftest import Told, rollmill  # noqa: F401
from tests.cli.test_service import served
from tests.launch.served import published_run
from tests.rollouts.test_factory import TOTAL

CHANGE = '''

def change(paid, price):
    """The coins to give back, largest first."""
    left, coins = paid - price, []
    for coin in (200, 100, 50, 20, 10, 5, 2, 1):
        coins += [coin] * (left // coin)
        left %= coin
    return coins
'''
TEST_TOTAL = "import shop\n\n\ndef test_total():\n    assert shop.total([100, 250], 50) == 175\n"
TEST_CHANGE = "import shop\n\n\ndef test_change():\n    assert shop.change(500, 320) == [100, 50, 20, 10]\n"


def git(repository: Path, *words: str) -> str:
    settings = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *settings, *words], cwd=repository, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(repository: Path, message: str, **files: str) -> str:
    for name, text in files.items():
        path = repository / (f"tests/{name}.py" if name.startswith("test_") else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(repository, "rev-parse", "HEAD")


class Product:
    """Asks as a product does, and reports what its users did."""

    def __init__(self, run: RunDirectory, url: str) -> None:
        self.url, self.key = url, run.secrets["production_key"]
        self.signals = Signals(url, self.key)

    def ask(self, text: str, consent: str, user: str = "ada") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}", "x-rollmill-consent": consent}
        body = {"model": "rollmill", "messages": [{"role": "user", "content": text}], "user": user, "max_tokens": 4}
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


def sealed(run: RunDirectory, count: int) -> TrajectoryStore:
    store = TrajectoryStore(run.database(), run.objects())
    while len(store.list(state=TrajectoryState.finished)) < count:
        time.sleep(0.1)
    return store


@pytest.mark.slow
def test_what_users_asked_for_and_kept_becomes_tasks(
    rollmill: Callable[..., Told],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    shop = tmp_path / "shop"
    shop.mkdir()
    git(shop, "init", "--quiet")
    broken = commit(shop, "prices", shop=TOTAL.replace("whole * discount", "discount"), test_total=TEST_TOTAL)
    mended = commit(shop, "mend", shop=TOTAL)
    added = commit(shop, "kept by a user", shop=TOTAL + CHANGE, test_change=TEST_CHANGE)
    git(shop, "reset", "--quiet", "--hard", mended)  # no branch has it
    secret = commit(shop, "a secret", shop=TOTAL + CHANGE + "\nOWNER = 'ada@example.com'\n", test_change=TEST_CHANGE)
    git(shop, "reset", "--quiet", "--hard", mended)
    private = 'gateway.redaction={remove=["email"]}'
    run = published_run(tmp_path / "runs", 1, "gateway.seal_idle_s=0.5", private)
    with served(tmp_path / "told", run.path) as serving:
        url = next(line.split()[1] for line in serving.told.splitlines() if line.strip().startswith("URL"))
        product = Product(run, url)
        kept = product.signals.kept
        coins = product.ask("Tell bob@example.com nothing. Write change(paid, price): the coins to give back.", "train")
        kept(coins, mended, added)
        discount = product.ask("A discount of 50 percent takes only 50 cents off.", "train", "bob")
        kept(discount, broken, mended)
        kept(product.ask("Add change, without my consent.", "store"), mended, added)
        undone = product.ask("Add change, and I undo it.", "train")
        kept(undone, mended, added)
        product.signals.reverted(undone)
        kept(product.ask("Add a secret.", "train"), mended, secret)
        kept(product.ask("Add what nobody pushed.", "train"), mended, "0" * 40)
        product.ask("Nothing was kept.", "train")
        with pytest.raises(GatewayError, match=r"label: 'main..HEAD' names no change that was kept"):
            kept(coins, "main", "HEAD")
        store = sealed(run, 7)
    out = tmp_path / "out"
    command = ("tasks", "make", shop, "--out", out, "--from-sessions", run.path, "--runs", 2, "--repeat", 1, "--json")
    found = json.loads(rollmill(*command).out)
    assert found["decided"] == {
        "session": {
            "": 2,
            "without consent to training": 1,
            "the user took it back": 1,
            "what was asked or kept has something that `[gateway.redaction]` removes": 1,
            "the repository does not have its commits": 1,
        }
    }
    tasks = {task["grading"]["FAIL_TO_PASS"][0]: task for task in map(json.loads, (out / "made.jsonl").open())}
    by_change, by_suite = tasks["tests/test_change.py::test_change"], tasks["tests/test_total.py::test_total"]
    assert by_change["reference"] == {"shop.py": TOTAL + CHANGE}
    assert "Tell [email] nothing. Write change(paid, price)" in by_change["instruction"]
    assert "A discount of 50 percent" in by_suite["instruction"], "the user changed no test: the suite has one"
    assert by_suite["tags"]["version"] == mended and by_suite["reference"] == {"shop.py": TOTAL}
    assert "example.com" not in (out / "made.jsonl").read_text() and "ada" not in (out / "made.jsonl").read_text()
    assert rollmill("tasks", "check", out / "run.toml", "--repeat", 1).code == 0
    # a user who is forgotten takes the task along
    store.delete(by_change["id"].partition("-session-")[2].rpartition("-")[0])
    assert json.loads(rollmill(*command).out)["decided"]["session"][""] == 1
    assert [json.loads(line)["id"] for line in (out / "made.jsonl").open()] == [by_suite["id"]]
    told = rollmill(*command[:2], "toolz", *command[3:])
    assert told.code != 0
