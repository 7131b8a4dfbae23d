"""`python -m benchmarks.living` runs without an argument, and names the other proofs of the living mill."""

from __future__ import annotations

import re

import pytest

from benchmarks.living import parse
from tests.test_repo import ROOT


def test_it_needs_no_argument_and_names_the_other_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse([])
    assert (given.part, given.scenario, given.quick) == ("cycle", None, False), "every scenario, at full size"
    assert parse(["cycle", "--scenario", "poison", "--quick"]).scenario == ["poison"], "as the log has it"
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    named = re.findall(r"python -m benchmarks\.(\w+)", capsys.readouterr().out)
    assert named == ["living", "summaries", "long_episode", "credit", "day_night"]
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in named)
