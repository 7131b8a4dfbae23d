"""What the process of an environment's package is given. Its interpreter is a script that answers with its variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollmill.environments.packages.package_process import PackageConfig, PackageProcess
from rollmill.errors import TaskError

TELLS = f"""#!{sys.executable}
import json, os, sys
sys.stdin.readline()
print(json.dumps({{"id": json.loads(sys.stdin.readline())["id"], "is": dict(os.environ)}}), flush=True)
"""


def test_keys_of_other_parts_stay_with_the_dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "python").write_text(TELLS)
    program.chmod(0o755)
    for name in ("JUDGE_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")

    def variables(*names: str) -> dict[str, str]:
        config = PackageConfig(python=str(program), variables=names)
        answer: dict[str, str] = PackageProcess("verifiers game", config, "verifiers_program.py", {}).ask_alone({})
        return answer

    found = variables()
    assert "secret" not in found.values()
    assert found["HTTPS_PROXY"] == "http://proxy:3128"
    assert found["PATH"].startswith(str(tmp_path)), "its programs come first"
    found = variables("SEARCH_KEY")
    assert [name for name, value in found.items() if value == "secret"] == ["SEARCH_KEY"]
    with pytest.raises(TaskError, match="verifiers game: NOT_SET in `variables` is not set"):
        variables("NOT_SET")
