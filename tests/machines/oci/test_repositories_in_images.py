"""A SWE-bench-style instance whose repository is in an OCI image: nothing of it is on this host."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rollmill.environments.rewards.logged_tests import LoggedTests
from rollmill.environments.tasks.swe_bench import SweBenchConfig, SweBenchTasks
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.check_task import check_task
from tests.machines.oci.conftest import _PACKAGES
from tests.machines.oci.making import entry, fetch_packages, link, tar_of, tar_tree, unpack_packages, write_layout

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
_INSTANCES = Path(__file__).parents[2] / "environments" / "tasks" / "inflection"


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory, images: Path) -> tuple[str, dict[str, str]]:
    """An image of Debian with pytest and git, the repository in /testbed at the instance's commit; and the instance."""
    row = json.loads((_INSTANCES / "instances.jsonl").read_text().splitlines()[0])
    place = tmp_path_factory.mktemp("testbed")
    tree = unpack_packages(fetch_packages((*_PACKAGES, "git"), place / "packages", needed=True), place / "tree")
    clone = ["git", "clone", "--quiet", str(_INSTANCES / "repository.bundle"), str(tree / "testbed")]
    subprocess.run(clone, check=True)
    subprocess.run(["git", "checkout", "--quiet", row["base_commit"]], cwd=tree / "testbed", check=True)
    own = tar_of([link("usr/bin/sh", "bash"), link("usr/bin/python", "python3"), entry("etc/passwd", _ROOT)])
    layout = write_layout(place / row["instance_id"], [tar_tree(tree), own], WorkingDir="/testbed")
    return f"oci:{layout.parent}/{{instance_id}}", row


_ROOT = b"root:x:0:0:root:/root:/bin/bash\n"


async def test_an_instance_in_an_image(
    testbed: tuple[str, dict[str, str]], host: NamespaceHost, tmp_path: Path
) -> None:
    image, row = testbed
    (tmp_path / "swe.jsonl").write_text(json.dumps(row) + "\n")
    command = "python -m pytest -rA -p no:cacheprovider {test_files}"
    config = SweBenchConfig.model_validate(
        {"path": str(tmp_path / "swe.jsonl"), "image": image, "test_command": command}
    )
    (task,) = SweBenchTasks(config).tasks.values()
    checked = await check_task(task, host, LoggedTests(), repeat=2)
    assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked
