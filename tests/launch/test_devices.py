"""Which GPUs each role gets. Only names are given out: no GPU is needed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rollmill.errors import ConfigError, RollmillError
from rollmill.kinds import search_also
from rollmill.launch.devices import VARIABLE, give_out, present_gpus
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.runs.preflight import check_here
from tests.launch.served import published_run
from tests.runs.conftest import make_config


def given(engines: str, gpus: int, *overrides: str) -> dict[str, list[str]]:
    return give_out(make_config(f"engines={engines}", *overrides), [str(number) for number in range(gpus)])


def test_everything_shares_the_only_gpu() -> None:
    assert given("[{count=2}]", 1) == {"trainer": ["0"], "engine-home": ["0"], "engine-home-2": ["0"]}


def test_engines_get_what_the_ranks_leave() -> None:
    roles = given("[{count=2},{region='away'}]", 4, "stages.rl.training.ranks=2")
    assert roles == {
        "trainer": ["0", "1"],
        "engine-home": ["2"],
        "engine-home-2": ["3"],
        "engine-away": ["2"],  # there are too few for one each
    }


def test_engines_with_gpus_share_them_with_nobody() -> None:
    roles = given("[{},{region='away',gpus=1,count=2},{region='far',gpus=0}]", 4)
    assert roles == {"trainer": ["0"], "engine-away": ["1"], "engine-away-2": ["2"], "engine-home": ["3"]}


def test_too_few_gpus_are_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "GPU-a,GPU-b")
    assert present_gpus() == ["GPU-a", "GPU-b"]
    with pytest.raises(ConfigError, match=r"needs 3 GPUs \(1 for trainer, 1 for engine-home, 1 for engine-home-2\)"):
        check_here(make_config("engines=[{gpus=1,count=2}]"))
    monkeypatch.setenv(VARIABLE, "")
    assert present_gpus() == []
    with pytest.raises(ConfigError, match="this host has 0"):
        check_here(make_config("engines=[{gpus=1}]"))
    check_here(make_config("engines=[{count=2}]"))  # nobody asks for a GPU


def test_labels_of_nodes_need_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"\[\[engines\]\] has `labels`, but \[cluster\] kind = \"local\""):
        check_here(make_config("engines=[{},{region='away',labels={disk='fast'}}]"))


SEEN = """
import os
from pathlib import Path
from rollmill.errors import ConfigError

class Seen:
    '''A kind of engine that writes down which GPUs its process has, and serves nothing.'''

    def open(self, context):
        (Path(os.environ["SEEN"]) / context.name).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
        raise ConfigError("that was all")
"""


def test_what_is_given_out_reaches_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modules", "seen"):
        (tmp_path / name).mkdir()
    (tmp_path / "modules" / "seen_gpus.py").write_text(SEEN)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a run with modules of its own adds their directory
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv(VARIABLE, "GPU-a,GPU-b,GPU-c")
    search_also(tmp_path / "modules")
    engines = "engines=[{kind='seen_gpus:Seen',count=2,gpus=1}]"
    run = published_run(tmp_path, 1, engines, "device=auto", f"modules={tmp_path / 'modules'}")
    launcher, deadline = LocalLauncher(run), time.monotonic() + 240  # against hangs only
    try:
        for spec in run.config.engine_specs:
            launcher.start(spec.role, "line", "rl", "bf16", service=True)
        with pytest.raises(RollmillError, match="that was all"):
            while True:
                if len(list((tmp_path / "seen").iterdir())) == 2 or time.monotonic() > deadline:
                    launcher.watch()
                time.sleep(0.02)
    finally:
        launcher.stop()
    seen = {file.name: file.read_text() for file in (tmp_path / "seen").iterdir()}
    assert seen == {"engine-home": "GPU-b", "engine-home-2": "GPU-c"}  # the first one is the trainer's


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["engines=[{gpus=2}]"], "gpus is 2, but an embedded engine computes on one"),
        (["engines=[{gpus=1}]", "device=cpu"], r"a table of \[\[engines\]\] has `gpus`, but `device` is 'cpu'"),
    ],
)
def test_contradictions(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_config(*overrides)


def scaled(engines: str, gpus: int, held: dict[str, list[str]]) -> dict[str, list[str]]:
    return give_out(make_config(f"engines={engines}"), [str(number) for number in range(gpus)], held=held)


def test_a_new_engine_gets_no_gpu_that_another_one_uses() -> None:
    held = {"engine-home": ["1"], "engine-away": ["2"]}
    roles = scaled("[{gpus=1,count=2},{region='away',gpus=1}]", 4, held)
    assert roles == {"trainer": ["0"], "engine-home": ["1"], "engine-away": ["2"], "engine-home-2": ["3"]}
    # one that was stopped leaves its GPU to a new one
    roles = scaled("[{gpus=1},{region='away',gpus=1,count=2}]", 4, {"engine-home": ["3"], "engine-away": ["2"]})
    assert roles == {"trainer": ["0"], "engine-home": ["3"], "engine-away": ["2"], "engine-away-2": ["1"]}


def test_an_engine_that_shares_stays_unless_another_one_needs_its_gpu_for_itself() -> None:
    held = {"engine-home": ["1"]}
    assert scaled("[{},{region='away',gpus=1}]", 3, held) == {
        "trainer": ["0"],
        "engine-home": ["1"],
        "engine-away": ["2"],
    }
    held |= {"engine-away": ["2"]}
    assert scaled("[{},{region='away',gpus=1,count=2}]", 3, held) == {
        "trainer": ["0"],
        "engine-home": ["0"],
        "engine-away": ["2"],
        "engine-away-2": ["1"],
    }
