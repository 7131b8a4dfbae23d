"""What is said of a Ray cluster before a run starts there. Ray is a stand-in: no node is needed, nor Ray itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollmill.errors import ConfigError
from rollmill.kinds import build
from rollmill.launch.launchers import ray_cluster
from rollmill.launch.launchers.ray_cluster import check_room, connect
from tests.runs.conftest import make_config

REGIONS = "engines=[{count=2},{region='away'}]"


class StandInRay:
    """A cluster with `gpus` GPUs and one node per region. Nodes of `lost` regions are dead."""

    def __init__(self, gpus: int = 0, regions: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> None:
        self._gpus, self._alive, self._lost = gpus, regions, lost

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, **({"GPU": float(self._gpus)} if self._gpus else {})}

    def nodes(self) -> list[dict[str, object]]:
        unlabelled = [{"Alive": True, "Labels": {"ray.io/node-id": "a"}}]
        alive = [{"Alive": True, "Labels": {"region": region}} for region in self._alive]
        return [*unlabelled, *alive, *({"Alive": False, "Labels": {"region": region}} for region in self._lost)]

    def is_initialized(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("settings", "gpus", "needed"),
    [
        (["engines=[{count=2}]"], 2, "needs 3 GPUs (1 for the trainer), but the cluster has 2"),
        (["engines=[{count=2}]", "stages.rl.training.ranks=4"], 5, "needs 6 GPUs (4 for the trainer)"),
        (["engines=[{gpus=1}]"], 0, "needs 2 GPUs (1 for the trainer), but the cluster has 0"),
        (["device=cuda"], 0, "but the cluster has 0"),
        (["engines=[{count=2}]"], 3, None),
        (["engines=[{count=2},{region='away',gpus=0}]"], 3, None),  # those compute on CPUs
        (["engines=[{count=2}]"], 0, None),  # everything computes on CPUs
        (["engines=[{count=2}]", "device=cpu"], 1, None),
    ],
)
def test_too_few_gpus_are_said(settings: list[str], gpus: int, needed: str | None) -> None:
    config, ray = make_config(*settings), StandInRay(gpus)
    if needed is None:
        check_room(ray, config)
        return
    with pytest.raises(ConfigError) as raised:
        check_room(ray, config)
    assert needed in str(raised.value) and "add nodes, or lower `ranks`" in str(raised.value.hint)


def test_a_region_without_a_node_is_said() -> None:
    config = make_config(REGIONS, "device=cpu")
    check_room(StandInRay(regions=("away", "home")), config)
    check_room(StandInRay(), config)  # without labels all nodes are alike
    with pytest.raises(ConfigError, match="no Ray node has the label region=away") as raised:
        check_room(StandInRay(regions=("home", "far"), lost=("away",)), config)
    assert raised.value.hint == "nodes have far, home; `ray start --labels region=away` adds one"


def test_a_run_is_checked_against_the_cluster_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = ("store=s3://bucket", "database=postgresql://mill@db/mill")
    config = make_config("cluster.kind=ray", *stores, REGIONS, "device=cpu")
    monkeypatch.setitem(sys.modules, "ray", StandInRay(regions=("home",)))
    with pytest.raises(ConfigError, match="region=away"):
        build(config.cluster).check(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray") as raised:
        build(config.cluster).check(config)
    assert raised.value.hint == "pip install 'rollmill[ray]'"


@pytest.mark.parametrize(
    ("init", "complaint"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "this host is no node of that cluster"),  # as Ray's abort
        ("raise ConnectionError('Could not find any running Ray instance')", "Could not find any running Ray"),
        ("time.sleep(600)", "no answer after"),
    ],
)
def test_where_ray_would_abort_the_process_another_one_tries_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, complaint: str
) -> None:
    (tmp_path / "ray.py").write_text(f"import os, signal, time\ndef init(address, log_to_driver):\n    {init}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the process that tries
    if "sleep" in init:
        monkeypatch.setattr(ray_cluster, "PROBE_S", 0.2)
    here = SimpleNamespace(is_initialized=lambda: False, init=lambda *_, **__: pytest.fail("this process connected"))
    monkeypatch.setitem(sys.modules, "ray", here)
    with pytest.raises(ConfigError, match=complaint) as raised:
        connect("auto")
    assert "[cluster] address = 'auto' cannot be used" in str(raised.value) and "ray start" in str(raised.value.hint)
