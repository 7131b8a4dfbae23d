"""Harbor and Terminal-Bench directories: loaded, and checked on real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.script import Script
from rollmill.environments.task import WholeDiff
from rollmill.environments.tasks.harbor import HarborConfig, HarborTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.check_task import check_task

IMAGES = {"python:3.12-slim": "host-python"}
TOML = """version = "1.0"
[metadata]
difficulty = "easy"
category = "programming"
tags = ["files"]
[verifier]
timeout_sec = 120.0
env = { ANSWERS = "/tests/data" }
[agent]
timeout_sec = 90.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
allow_internet = false
"""
DOCKERFILE = """FROM python:3.12-slim AS base
# the data
WORKDIR /app
RUN apt-get update && \\
    apt-get install -y curl
COPY --chown=root words.txt ./data/
COPY ["lib", "/app/lib"]
"""
TEST = """#!/bin/bash
cd /app
grep -q "$(cat $ANSWERS/count.txt)" result.txt && test -s lib/a.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
YAML = """instruction: |-
  Write the number of words in /app/words.txt into /app/result.txt.
author_email: somebody@example.com
difficulty: medium
category: file-operations
tags: [files]
parser_name: pytest
max_agent_timeout_sec: 360.0
max_test_timeout_sec: 60.0
run_tests_in_same_shell: false
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def harbor(root: Path, name: str = "count-words", **changes: str | None) -> Path:
    files = {
        "task.toml": TOML,
        "instruction.md": "<!-- harbor-canary 1 -->\n\nCount the words of /app/data/words.txt into /app/result.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/words.txt": "one two three",
        "environment/lib/a.py": "A = 1\n",
        "solution/solve.sh": "#!/bin/bash\nbash /solution/more.sh\n",
        "solution/more.sh": "wc -w < /app/data/words.txt > /app/result.txt\n",
        "tests/test.sh": TEST,
        "tests/data/count.txt": "3\n",
    }
    for key, text in changes.items():
        files[key.replace("__", "/").replace("_sh", ".sh").replace("_toml", ".toml")] = text or ""
    write(root / name, {path: text for path, text in files.items() if text})
    return root / name


def terminal_bench(root: Path, name: str = "count-again") -> Path:
    files = {
        "task.yaml": YAML,
        "Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY words.txt .\n",
        "words.txt": "one two three four",
        "solution.sh": "wc -w < words.txt > result.txt\n",
        "run-tests.sh": "#!/bin/bash\npython3 $TEST_DIR/test_outputs.py\n",
        "tests/test_outputs.py": "assert open('/app/result.txt').read().strip() == '4'\n",
    }
    write(root / name, files)
    return root / name


def load(root: Path, images: dict[str, str] = IMAGES) -> HarborTasks:
    return HarborTasks(HarborConfig(path=str(root), images=images))  # type: ignore[arg-type]


def test_a_harbor_task(tmp_path: Path) -> None:
    harbor(tmp_path)
    task = load(tmp_path).get("count-words")
    assert task.instruction == "Count the words of /work/data/words.txt into /work/result.txt."
    assert task.files == {"data/words.txt": b"one two three", "lib/a.py": b"A = 1\n"}
    assert isinstance(task.submission, WholeDiff) and task.image == "host-python" and task.timeout_s == 90.0
    assert task.family == "programming" and task.tags == {"difficulty": "easy", "category": "programming"}
    assert task.grading["timeout_s"] == 120.0 and task.grading["env"] == {"ANSWERS": "/tmp/tests/data"}
    assert "/tmp/logs/verifier/reward.txt" in task.grading["files"]["/tmp/tests/test.sh"]
    assert task.reference_command == ["bash", "/tmp/solution/solve.sh"]


@pytest.mark.asyncio(loop_scope="module")
async def test_both_formats_are_checked_on_real_machines(tmp_path: Path, host: NamespaceHost) -> None:
    harbor(tmp_path)
    terminal_bench(tmp_path)
    tasks = load(tmp_path)
    assert not tasks.problems
    for task in tasks.tasks.values():
        checked = await check_task(task, host, Script())
        assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked


# the layout and the keys that Harbor's documentation shows, in both versions of its schema
DOCUMENTED = {
    "version 1.0": """version = "1.0"

[metadata]
author_name = "Ada"
author_email = "ada@example.com"
difficulty = "easy"
category = "programming"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0
env = { EXPECTED = "Hello, world!" }

[agent]
timeout_sec = 120.0

[solution]
env = { GREETING = "Hello, world!" }

[environment]
build_timeout_sec = 600.0
docker_image = "some-org/some-name:some-tag"
cpus = 1
memory_mb = 2048
storage_mb = 10240
""",
    "schema version 1.1": """schema_version = "1.1"

[task]
name = "acme/hello-world"
description = "A file with a greeting"
authors = [{ name = "Ada", email = "ada@example.com" }]
keywords = ["trivial", "programming"]

[metadata]
difficulty_explanation = "Trivial"
category = "programming"

[verifier]
timeout_sec = 120.0
env = { EXPECTED = "Hello, world!" }
user = "root"

[agent]
timeout_sec = 120.0
user = "agent"

[solution]
env = { GREETING = "Hello, world!" }

[environment]
build_timeout_sec = 600.0
os = "linux"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []

[environment.env]
EDITOR = "vi"
""",
}
HELLO = {
    "instruction.md": "# Greeting\n\nCreate the file `/app/hello.txt` with the greeting.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\n",
    "solution/solve.sh": '#!/bin/bash\n\necho "$GREETING" > /app/hello.txt\n',
    "tests/test.sh": """#!/bin/bash

python3 /tests/test_outputs.py

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/test_outputs.py": 'import os\n\nassert open("/app/hello.txt").read().strip() == os.environ["EXPECTED"]\n',
}


@pytest.mark.parametrize("toml", DOCUMENTED.values(), ids=DOCUMENTED)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_as_the_documentation_describes_it(tmp_path: Path, host: NamespaceHost, toml: str) -> None:
    write(tmp_path / "hello-world", {"task.toml": toml, **HELLO})
    tasks = load(tmp_path, {"ubuntu:24.04": "host-python"})
    assert not tasks.problems
    task = tasks.get("hello-world")
    assert task.instruction == "# Greeting\n\nCreate the file `/work/hello.txt` with the greeting."
    assert task.family == "programming" and task.timeout_s == 120.0
    checked = await check_task(task, host, Script())
    assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked


@pytest.mark.parametrize(
    ("written", "value", "parts"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", 0.5, {}),
        ("echo .25 > /logs/verifier/reward.txt", 0.25, {}),
        ("""echo '{"reward": 0.75, "style": 1}' > /logs/verifier/reward.json""", 0.75, {"reward": 0.75, "style": 1.0}),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""", 0.5, {"a": 1.0, "b": 0.0}),
        ("echo NaN > /logs/verifier/reward.txt", 0.0, {}),
        ("echo 1e308 > /logs/verifier/reward.txt", 0.0, {}),  # what cannot be stored would leave it without a reward
        ("""echo '{"a": 1.7e308, "b": 1.7e308}' > /logs/verifier/reward.json""", 0.0, {}),
        ("echo '[1]' > /logs/verifier/reward.txt", 0.0, {}),
        ("ln -s /dev/zero /logs/verifier/reward.txt", 0.0, {}),
        ("rm -r /logs", 0.0, {}),
        ("sleep 1000", 0.0, {}),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_reward_file_decides(
    tmp_path: Path, host: NamespaceHost, written: str, value: float, parts: dict[str, float]
) -> None:
    toml = TOML.replace("timeout_sec = 120.0", "timeout_sec = 1.0")
    harbor(tmp_path, tests__test_sh=f"#!/bin/bash\n{written}\n", task_toml=toml)
    task = load(tmp_path).get("count-words")
    reward = await Script().grade(Episode(task, {}, host))
    assert (reward.value, reward.parts) == (value, parts), reward
    if value == 0.0:
        assert "no_reward" in reward.evidence


MALFORMED = {
    "an unmapped image": ({"environment__Dockerfile": "FROM ubuntu:24.04\n"}, "'ubuntu:24.04', which is mapped to no"),
    "files elsewhere": (
        {"environment__Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY words.txt /etc/words\n"},
        "copies files to /etc/words",
    ),
    "a missing file": (
        {"environment__Dockerfile": "FROM python:3.12-slim\nCOPY nothing /app/\n"},
        "there is no 'nothing' to copy",
    ),
    "no tests": ({"tests__test_sh": None}, "tests/test.sh: there is none"),
    "no TOML": ({"task_toml": "[verifier\n"}, "task.toml: not valid TOML"),
    "a wrong limit": ({"task_toml": "[verifier]\ntimeout_sec = -1\n"}, "verifier.timeout_sec"),
    "no environment": ({"environment__Dockerfile": None}, "docker-compose"),
}


@pytest.mark.parametrize(("changes", "why"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_task_is_named_and_the_rest_loads(tmp_path: Path, changes: dict[str, str | None], why: str) -> None:
    harbor(tmp_path)
    harbor(tmp_path, "broken", **changes)
    (tmp_path / "empty").mkdir()
    tasks = load(tmp_path)
    assert list(tasks.tasks) == ["count-words"]
    assert f"{tmp_path}/broken: " in tasks.problems[0] and why in tasks.problems[0], tasks.problems
    assert "it has no task.toml and no task.yaml" in tasks.problems[1]


def test_an_image_of_its_own_and_a_prebuilt_image(tmp_path: Path) -> None:
    odd = "FROM ubuntu:24.04\nWORKDIR /srv/app\nCOPY words.txt /etc/words\nCOPY . .\n"
    harbor(tmp_path, environment__Dockerfile=odd)
    task = load(tmp_path, {"count-words": "own"}).get("count-words")
    assert task.image == "own" and set(task.files) == {"words.txt", "lib/a.py"}
    other = harbor(tmp_path, "prebuilt", environment__Dockerfile=None)
    (other / "environment" / "words.txt").unlink()
    (other / "task.toml").write_text(TOML + 'docker_image = "acme/words:1"\n')
    task = load(tmp_path, {**IMAGES, "acme/words:1": "words", "count-words": "own"}).get("prebuilt")
    assert task.image == "words" and task.files == {}


def test_a_directory_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no task"):
        load(tmp_path)
    with pytest.raises(TaskError, match="cannot be read"):
        load(tmp_path / "absent")
    assert issubclass(HarborConfig, TaskFileConfig)
