"""SWE-bench-style instances on a small git repository that is made here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollmill.environments.rewards.pytest import Pytest
from rollmill.environments.tasks.swe_bench import SweBenchConfig, SweBenchTasks
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.check_task import check_task

CALC = "def add(a, b):\n    return a - b\n\n\ndef neg(a):\n    return -a\n"
TESTS = "import unittest\nfrom calc import ops\n\n\nclass Old(unittest.TestCase):\n"
TESTS += "    def test_neg(self):\n        self.assertEqual(ops.neg(2), -2)\n"
PATCH = """diff --git a/src/calc/ops.py b/src/calc/ops.py
--- a/src/calc/ops.py
+++ b/src/calc/ops.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
BLANK
BLANK
 def neg(a):
diff --git a/src/calc/wrong.py b/src/calc/wrong.py
deleted file mode 100644
--- a/src/calc/wrong.py
+++ /dev/null
@@ -1 +0,0 @@
-raise ImportError
diff --git a/check.sh b/check.sh
old mode 100644
new mode 100755
diff --git a/bin/newest b/bin/newest
new file mode 120000
--- /dev/null
+++ b/bin/newest
@@ -0,0 +1 @@
+run
\\ No newline at end of file
""".replace("BLANK", " ")
TEST_PATCH = """diff --git a/tests/test_ops.py b/tests/test_ops.py
--- a/tests/test_ops.py
+++ b/tests/test_ops.py
@@ -5,3 +5,6 @@ from calc import ops
 class Old(unittest.TestCase):
     def test_neg(self):
         self.assertEqual(ops.neg(2), -2)
+
+    def test_add(self):
+        self.assertEqual(ops.add(20, 22), 42)
diff --git a/tests/test_gone.py b/tests/test_gone.py
new file mode 100644
--- /dev/null
+++ b/tests/test_gone.py
@@ -0,0 +1,6 @@
+import os
+
+def test_gone():
+    assert not os.path.exists("src/calc/wrong.py")
+    assert os.access("check.sh", os.X_OK) and os.access("bin/run", os.X_OK) and not os.access("setup.cfg", os.X_OK)
+    assert os.readlink("bin/newest") == "run" and os.readlink("current") == "src/calc"
"""


def git(directory: Path, *arguments: str) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", *arguments], cwd=directory, env=environment, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the repository acme/calc: tests are not exported, and its hooks and filters leave a trace."""
    root = tmp_path_factory.mktemp("clones")
    repository = root / "acme__calc"
    files = {
        "src/calc/__init__.py": "",
        "src/calc/ops.py": CALC,
        "src/calc/wrong.py": "raise ImportError\n",
        "tests/test_ops.py": TESTS,
        ".gitattributes": "tests export-ignore\n*.py filter=evil\n",
        "names/ü with space.txt": "$Format:%H$\n",
        "bin/run": "#!/bin/sh\n",
        "check.sh": "#!/bin/sh\n",
        "setup.cfg": "",
    }
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    (repository / "bin/run").chmod(0o755)
    (repository / "link").symlink_to("/etc/passwd")
    (repository / "current").symlink_to("src/calc")
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "first")
    for setting in ("filter.evil.smudge", "filter.evil.clean", "core.fsmonitor", "core.sshCommand"):
        git(repository, "config", setting, f"touch {root}/executed; cat")
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {root}/executed\n")
    hook.chmod(0o755)
    return root


def instance(clones: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": git(clones / "acme__calc", "rev-parse", "HEAD"),
        "problem_statement": "add(20, 22) is -2",
        "hints_text": "look at the sign",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(["tests/test_ops.py::Old::test_add", "tests/test_gone.py::test_gone"]),
        "PASS_TO_PASS": ["tests/test_ops.py::Old::test_neg"],
    }
    return {**given, **changes}


def load(directory: Path, clones: Path, *rows: dict[str, Any], **settings: Any) -> SweBenchTasks:
    (directory / "swe.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return SweBenchTasks(SweBenchConfig(path=str(directory / "swe.jsonl"), repositories=str(clones), **settings))  # type: ignore[arg-type]


def test_an_instance(tmp_path: Path, clones: Path) -> None:
    task = load(tmp_path, clones, instance(clones), images={"acme/calc": "own"}).get("acme__calc-1")
    assert "add(20, 22) is -2" in str(task.instruction) and "the sign" not in str(task.instruction)
    assert task.files["src/calc/ops.py"] == CALC.encode() and "link" not in task.files
    assert task.files["names/ü with space.txt"] == b"$Format:%H$\n", "nothing is substituted"
    assert "tests/test_ops.py" in task.files, "export-ignore does not count"
    assert task.executable == ["bin/run"] and task.links == {"current": "src/calc"}, "no link leaves the work directory"
    assert task.reference == {"check.sh": b"#!/bin/sh\n", "src/calc/ops.py": CALC.replace("a - b", "a + b").encode()}
    rest = ["rm -f -- src/calc/wrong.py", "chmod a+x -- check.sh", "mkdir -p -- bin", "ln -sfn -- run bin/newest"]
    assert task.reference_command == ["sh", "-c", " && ".join(rest)]
    assert set(task.grading["files"]) == {"tests/test_ops.py", "tests/test_gone.py"}
    assert task.image == "own" and task.family == "acme/calc"
    assert not (clones / "executed").exists(), "no hook and no filter runs"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_instance_is_checked_on_real_machines(tmp_path: Path, clones: Path, host: NamespaceHost) -> None:
    task = load(tmp_path, clones, instance(clones)).get("acme__calc-1")
    checked = await check_task(task, host, Pytest(), repeat=1)
    assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked


MALFORMED = {
    "no clone": ({"repo": "acme/other"}, "repo: "),
    "a path": ({"repo": "../acme/calc"}, "repo: "),
    "no commit": ({"base_commit": "f" * 40}, "base_commit: "),
    "an option": ({"base_commit": "--output=/tmp/x"}, "base_commit: "),
    "a patch that does not apply": ({"patch": PATCH.replace("a - b", "a * b")}, "patch does not apply"),
    "a test patch that is no patch": ({"test_patch": "hello\n"}, "test_patch does not apply"),
    "a patch that leaves": ({"patch": "--- a/../../x\n+++ b/../../x\n@@ -0,0 +1 @@\n+x\n"}, "patch: '../../x'"),
    "a test without a file": ({"FAIL_TO_PASS": ["test_add (calc.Old)"]}, "FAIL_TO_PASS"),
    "no tests": ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
    "tests that are no JSON": ({"FAIL_TO_PASS": "[x"}, "FAIL_TO_PASS"),
    "no issue": ({"problem_statement": ""}, "problem_statement"),
}


@pytest.mark.parametrize(("changes", "why"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_instance_is_named_and_the_rest_loads(
    tmp_path: Path, clones: Path, changes: dict[str, Any], why: str
) -> None:
    good, bad = instance(clones), instance(clones, instance_id="bad", **changes)
    tasks = load(tmp_path, clones, bad, good)
    assert list(tasks.tasks) == ["acme__calc-1"]
    assert len(tasks.problems) == 1 and f"swe.jsonl:1: {why}" in tasks.problems[0], tasks.problems
    assert not (clones / "executed").exists()
