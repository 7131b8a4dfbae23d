"""Harbor and Terminal-Bench directories: loaded, and checked on real machines."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.harbor import HarborReward
from rollmill.environments.task import Needs
from rollmill.environments.task_machine import create_machine
from rollmill.environments.tasks.benchmark_folder import without_canary
from rollmill.environments.tasks.harbor import HarborConfig, HarborTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost
from rollmill.machines.oci.build_image import BuildConfig
from rollmill.rollouts.check_task import check_task
from tests.machines.conftest import start_host
from tests.machines.oci.conftest import busybox, images  # noqa: F401
from tests.machines.oci.making import busybox_layer, entry, tar_of, write_layout
from tests.machines.oci.test_registry import push, registry

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


def load(root: Path, build: BuildConfig | None = None) -> HarborTasks:
    return HarborTasks(HarborConfig(path=str(root), build=build or BuildConfig()))  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large() -> AsyncIterator[NamespaceHost]:
    host = await start_host(NamespaceConfig(memory_mb=2048, disk_mb=10240))
    yield host
    await host.close()


@pytest.fixture(autouse=True)
def own_images(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("kept")
    monkeypatch.setenv("ROLLMILL_IMAGES", str(place))
    return place


def test_a_harbor_task_as_it_is(tmp_path: Path, own_images: Path) -> None:
    folder = harbor(tmp_path)
    task = load(tmp_path).get("count-words")
    assert task.instruction == "Count the words of /app/data/words.txt into /app/result.txt."
    assert task.files == {} and task.submission == () and task.timeout_s == 90.0
    assert task.family == "programming" and task.tags == {"difficulty": "easy", "category": "programming"}
    assert task.grading["timeout_s"] == 120.0 and task.grading["env"] == {"ANSWERS": "/tests/data"}
    assert task.grading["files"]["/tests/test.sh"] == TEST
    assert task.reference_command[-1] == "chmod +x /solution/solve.sh; exec /solution/solve.sh"
    assert task.needs == Needs(file=str(folder / "task.toml"), cpus=1, memory_mb=2048, network=())
    assert task.image.startswith("oci:localhost/task/count-words:")
    assert load(tmp_path).get("count-words").image == task.image
    (folder / "environment" / "words.txt").chmod(0o755)
    assert load(tmp_path).get("count-words").image != task.image, "another context is another image"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildConfig]:
    """A registry whose names are those of others, and whose images are stand-ins: Debian's busybox."""
    if not all(map(shutil.which, ("buildah", "docker-registry", "skopeo"))):
        pytest.skip("buildah, docker-registry and skopeo are not installed")
    place = tmp_path_factory.mktemp("stand-ins")
    own = [entry("usr/bin/bash", b'#!/bin/sh\nexec sh "$@"\n', mode=0o755), entry("home/agent/", uid=1000, gid=1000)]
    own += [entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")]
    layout = write_layout(place / "layout", [busybox_layer(place), tar_of(own)])
    with registry(place / "registry") as host:
        for name in ("python:3.12-slim", "ubuntu:24.04"):
            push(layout, host, f"docker.io/library/{name}")
        yield BuildConfig(mirrors={"docker.io": f"{host}/docker.io"})


SEPARATE = """artifacts = ["/app/out"]
[verifier]
environment_mode = "separate"
[environment]
network_mode = "no-network"
[environment.healthcheck]
command = "test -e /app/ready"
interval_sec = 0.1
"""


def folders_of_all_kinds(root: Path) -> None:
    changes = {"environment__Dockerfile": DOCKERFILE.replace("apt-get", "true")}
    elsewhere = "wc -w < /app/data/words.txt > /app/result.txt; echo there > /etc/deep; rm /etc/passwd\n"
    test = TEST.replace("cd /app", "cd /app; [ ! -e /etc/passwd ] && [ -e /etc/deep ] && [ ! -e /solution ] || exit 1")
    harbor(root, solution__more_sh=elsewhere + "rm -r /solution\n", tests__test_sh=test, **changes)
    apart = "#!/bin/sh\n[ ! -e /etc/deep ] && grep -q 3 out/count && r=1; echo ${r:-0} > /logs/verifier/reward.txt\n"
    solve = "#!/bin/bash\nmkdir -p /app/out; echo 3 > /app/out/count; echo > /etc/deep\n"
    harbor(
        root, "apart", task_toml=SEPARATE, solution__solve_sh=solve, tests__test_sh=apart,
        environment__Dockerfile="FROM ubuntu:24.04\nWORKDIR /app\nRUN touch ready\n",
    )  # fmt: skip
    serve = "#!/bin/bash\nmkdir -p www; echo up > www/state\nbusybox httpd -f -p 127.0.0.1:8080 -h www > log 2>&1 &\n"
    asks = "#!/bin/bash\nwget -q -O - 127.0.0.1:8080/state | grep up && r=1\necho ${r:-0} > /logs/verifier/reward.txt\n"
    base = "FROM ubuntu:24.04\nWORKDIR /app\n"
    harbor(root, "serves", environment__Dockerfile=base, solution__solve_sh=serve, tests__test_sh=asks)
    again = terminal_bench(root)
    (again / "run-tests.sh").write_text("#!/bin/bash\ngrep -qx 4 $TEST_DIR/../app/result.txt\n")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_folders_are_built_and_checked_on_real_machines(
    tmp_path: Path, large: NamespaceHost, stand_ins: BuildConfig
) -> None:
    folders_of_all_kinds(tmp_path)
    tasks = load(tmp_path, stand_ins)
    assert not tasks.problems and len(tasks.tasks) == 4
    for task in tasks.tasks.values():
        checked = await check_task(task, large, HarborReward(), repeat=2)
        assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked
        assert task.processes == (task.id == "serves") == ("left running" in checked.weak)
    for needs, why in (
        (
            Needs("t/task.toml", memory_mb=1 << 20, network=()),
            r"t/task.toml: environment.memory_mb is 1.04858e\+06, and its machine has",
        ),
        (Needs("t/task.toml", network=("a.example",)), "environment.network_mode and allowed_hosts: a.example"),
        (Needs("t/task.toml", health="exit 3"), "environment.healthcheck.command failed 1 times"),
    ):
        with pytest.raises(TaskError, match=why):
            await create_machine(large, replace(tasks.get("apart"), needs=needs))


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
    "environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\nRUN chmod 777 /app\n",
    "solution/solve.sh": '#!/bin/bash\n\necho "$GREETING" > /app/hello.txt\n',
    "tests/test.sh": """#!/bin/bash

grep -qx "$EXPECTED" /app/hello.txt

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_as_the_documentation_describes_it(
    tmp_path: Path, large: NamespaceHost, stand_ins: BuildConfig
) -> None:
    for name, toml in DOCUMENTED.items():
        write(tmp_path / name, {"task.toml": toml, **HELLO})
    tasks = load(tmp_path, stand_ins)
    assert not tasks.problems
    for task in tasks.tasks.values():
        assert task.instruction == "# Greeting\n\nCreate the file `/app/hello.txt` with the greeting."
        assert task.family == "programming" and task.timeout_s == 120.0
        checked = await check_task(task, large, HarborReward(), repeat=1)
        assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked


@pytest.mark.parametrize(
    ("written", "value", "parts"),
    [
        ("echo .25 > /logs/verifier/reward.txt", 0.25, {}),
        ("""echo '{"reward": 0.75, "style": 1}' > /logs/verifier/reward.json""", 0.75, {"reward": 0.75, "style": 1.0}),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""", 0.5, {"a": 1.0, "b": 0.0}),
        ("echo NaN > /logs/verifier/reward.txt", 0.0, {}),
        ("echo 1e308 > /logs/verifier/reward.txt", 0.0, {}),  # what cannot be stored would leave it without a reward
        ("ln -s /dev/zero /logs/verifier/reward.txt", 0.0, {}),
        ("rm -r /logs", 0.0, {}),
        ("sleep 1000", 0.0, {}),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_reward_file_decides(
    tmp_path: Path, host: NamespaceHost, busybox: str, monkeypatch: pytest.MonkeyPatch, images: Path,  # noqa: F811
    written: str, value: float, parts: dict[str, float],
) -> None:  # fmt: skip
    toml = TOML.replace("timeout_sec = 120.0", "timeout_sec = 1.0")
    harbor(tmp_path, tests__test_sh=f"#!/bin/sh\n{written}\n", task_toml=toml)
    task = replace(load(tmp_path).get("count-words"), image=busybox, needs=None)
    monkeypatch.setenv("ROLLMILL_IMAGES", str(images))
    machine = await create_machine(host, task)
    state = await machine.snapshot()
    await machine.close()
    reward = await HarborReward().grade(Episode(task, {}, host, final_state=state))
    assert (reward.value, reward.parts) == (value, parts), reward
    if value == 0.0:
        assert "no_reward" in reward.evidence


def test_a_canary_is_no_part_of_an_instruction_that_speaks_of_one() -> None:
    asked = "Write `canary test` to /app/canary.txt."
    for above in ("", "<!-- harbor-canary 1 -->\n", "# BENCHMARK DATA SHOULD NEVER APPEAR\n# canary GUID 1\n\n"):
        assert without_canary(f"{above}{asked}\n") == asked


MALFORMED = {
    "no tests": ({"tests__test_sh": None}, "tests/test.sh: there is none"),
    "no TOML": ({"task_toml": "[verifier\n"}, "task.toml: not valid TOML"),
    "a wrong limit": ({"task_toml": "[verifier]\ntimeout_sec = -1\n"}, "verifier.timeout_sec"),
    "no environment": ({"environment__Dockerfile": None}, "or `docker_image` in [environment]"),
    "several containers": ({"environment__docker-compose.yaml": "services:\n"}, "environment/docker-compose.yaml: it"),
    "a GPU": ({"task_toml": "[environment]\ngpus = 1\n"}, "task.toml: environment.gpus asks for"),
    "a secret": ({"task_toml": "[environment.env]\nKEY = '${KEY}'\n"}, "environment.env asks for ${KEY} of this host"),
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


def test_a_directory_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no task"):
        load(tmp_path)
    with pytest.raises(TaskError, match="cannot be read"):
        load(tmp_path / "absent")
    assert issubclass(HarborConfig, TaskFileConfig)
