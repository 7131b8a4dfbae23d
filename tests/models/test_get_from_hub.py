"""`model get` and `weights push` against a small hub on loopback (tests/hub.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.config import load_config
from rollmill.errors import ConfigError, RollmillError, StorageError, WeightsError
from rollmill.models.huggingface.convert import open_checkpoint
from rollmill.models.huggingface.get import get_model
from rollmill.runs.run import RunConfig
from tests.hub import Hub, running_hub
from tests.runs.test_export import DEMO, export

NAME = "models/acme/tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    _, _, folder = export(load_config(RunConfig, DEMO), tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    extra = {"pytorch_model.bin": b"\x80pickle", "original/model.safetensors": b"again", "run.py": b"print()"}
    with running_hub(Hub({NAME: {**checkpoint, **extra}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 12)  # 10 MiB otherwise
        yield hub


def _refused(text: str, name: str, tmp_path: Path) -> RollmillError:
    with pytest.raises(RollmillError) as refused:
        get_model(name, tmp_path / "to", say=lambda text: None)
    assert text in str(refused.value) and refused.value.hint and "hf_secret" not in str(refused.value)
    assert not (tmp_path / "to").exists()
    return refused.value


def test_only_the_files_of_the_checkpoint_are_loaded(hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    get_model("acme/tiny", tmp_path / "to", say=lambda text: None)
    assert {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()} == checkpoint
    assert not list(tmp_path.glob(".to*")) and "Bearer hf_secret" in hub.tokens
    get_model(f"acme/tiny@{hub.commit(NAME)}", tmp_path / "again", say=lambda text: None)
    open_checkpoint(tmp_path / "again")


def test_a_download_that_breaks_is_continued(hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    """The connection is cut in the middle. The same command outlives it; if the hub is gone, the next one goes on."""
    name, size = "model.safetensors", len(checkpoint["model.safetensors"])
    hub.repositories[NAME]["LICENSE"] = bytes(2 << 20)  # what is worth continuing
    hub.cut[name] = 1
    get_model("acme/tiny", tmp_path / "once", say=lambda text: None)
    hub.cut[name], hub.away = 1, True
    _refused("acme/tiny could not be downloaded", "acme/tiny", tmp_path)
    hub.away, before = False, len(hub.seen)
    get_model("acme/tiny", tmp_path / "to", say=lambda text: None)
    ranges = [part for method, path, part in hub.seen if method == "GET" and path.endswith(name)]
    half = ranges[1]  # of what came only whole pieces are kept
    assert size // 4 < int(half.removeprefix("bytes=").removesuffix("-")) <= size // 2
    assert ranges == ["", half, "", half, half]  # the fourth was refused
    assert not any(method == "GET" and path.endswith("LICENSE") for method, path, _ in hub.seen[before:])
    for folder in ("once", "to"):
        assert (tmp_path / folder / name).read_bytes() == checkpoint[name]


def test_what_is_wrong_is_named(hub: Hub, checkpoint: dict[str, bytes], tmp_path: Path) -> None:
    assert isinstance(_refused("has no model acme/none, or it is private", "acme/none", tmp_path), StorageError)
    _refused("acme/tiny has no revision 'v2'", "acme/tiny@v2", tmp_path)
    hub.gated.add(NAME)
    assert "ask for access at http" in str(_refused("acme/tiny is gated", "acme/tiny", tmp_path))
    hub.gated.clear()
    hub.claimed["model.safetensors"] = 1 << 60
    _refused("acme/tiny needs 1152921504.6 GB more", "acme/tiny", tmp_path)
    hub.claimed.clear()
    hub.damaged.add("model.safetensors")
    _refused("model.safetensors of acme/tiny has not the hash", "acme/tiny", tmp_path)
    hub.damaged.clear()
    config = checkpoint["config.json"].replace(b"MixtralForCausalLM", b"NewForCausalLM")
    hub.repositories["models/acme/new"] = {**checkpoint, "config.json": config}
    before = len(hub.seen)
    assert isinstance(_refused("'NewForCausalLM'", "acme/new", tmp_path), ConfigError)
    assert not any("safetensors" in path for _, path, _ in hub.seen[before:])  # said before gigabytes are loaded
    hub.repositories["models/acme/old"] = {"config.json": checkpoint["config.json"], "pytorch_model.bin": b"\x80"}
    assert isinstance(_refused("only as pickles, such as pytorch_model.bin", "acme/old", tmp_path), WeightsError)
    get_model("acme/tiny", tmp_path / "to", say=lambda text: None)


def test_a_version_goes_to_a_hub_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(RunConfig, DEMO)
    _, _, out = export(config, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # this hub has none, as most mirrors
    with running_hub(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        push = ["weights", "push", str(out.parent / config.name), f"{config.stages[0].name}@0"]
        told = CliRunner().invoke(app, [*push, "acme/agent"])
        assert told.exit_code == 0 and f"{hub.url}/acme/agent/commit/" in told.output.replace("\n", ""), told.output
        files = hub.repositories["models/acme/agent"]
        assert {name: files[name] for name in files if name != ".gitattributes"} == {
            path.name: path.read_bytes() for path in out.iterdir()
        }
        assert hub.private == {"models/acme/agent"} and "Bearer hf_secret" in hub.tokens
        get_model("acme/agent", tmp_path / "again", say=lambda text: None)
        weights = "model.safetensors"
        assert (tmp_path / "again" / weights).read_bytes() == (out / weights).read_bytes()
        hub.denied = True
        told = CliRunner().invoke(app, [*push, "acme/agent"])
        assert told.exit_code != 0 and "acme/agent could not be written" in str(told.exception)
        assert "HF_TOKEN" in str(told.exception) and "hf_secret" not in str(told.exception)
    assert CliRunner().invoke(app, [*push, "agent"]).exit_code != 0
