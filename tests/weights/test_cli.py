import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.cli.weights import app
from rollmill.errors import WeightsError
from rollmill.storage.http import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels
from tests.storage.serving import served
from tests.weights.build import delta_pack, publish_line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    publish_line(tmp_path / "store", 5, snapshot_every=3)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_log_lists_every_version(run: Path) -> None:
    for where in (run, run / "store", f"file://{run}/store"):
        code, output = invoke("log", str(where))
        assert code == 0
        rows = [line.split() for line in output.splitlines() if "rl@" in line or "snapshot" in line]
        assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
        assert [row[1] for row in rows[1:]] == ["rl@0", "rl@1", "rl@2", "rl@3"]
    (run / "store/weights/rl/bf16/manifests/0000000004.manifest").write_bytes(b"{}")
    assert "damaged" in invoke("log", str(run))[1]


def test_verify_says_what_is_wrong_and_fails(run: Path) -> None:
    code, output = invoke("verify", str(run))
    assert code == 0 and "all 5 versions verified" in output
    delta_pack(run / "store", 1).write_bytes(b"short")
    code, output = invoke("verify", str(run))
    assert code == 1
    assert "rl@1" in output and "truncated" in output and "2 of 5 versions cannot be restored" in output


def test_over_http(run: Path) -> None:
    with served(object_app(Objects.open(run / "store"), token="secret")) as url:
        assert invoke("verify", url, "--token", "secret")[0] == 0


def test_a_channel_is_shown(run: Path) -> None:
    Channels(Objects.open(run / "store")).move("live", Version("rl", 2))
    code, output = invoke("channel", str(run), "live")
    assert code == 0 and "rl@2" in output
    with pytest.raises(WeightsError, match="no channel 'canary'") as caught:
        invoke("channel", str(run), "canary")
    assert caught.value.hint == "channels here: live"


def test_wrong_places_are_explained_and_not_made(run: Path) -> None:
    for arguments in (("log", str(run / "nowhere")), ("verify", str(run), "--line", "sft")):
        with pytest.raises(WeightsError) as caught:
            invoke(*arguments)
        assert caught.value.hint
    assert not (run / "nowhere").exists()


def test_the_module_is_light() -> None:
    heavy = "numpy", "pydantic", "rich", "obstore", "torch"
    program = f"import sys, rollmill.cli.weights; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
