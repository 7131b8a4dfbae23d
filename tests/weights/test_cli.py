import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.errors import ConfigError, WeightsError
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.runs.prepare import keep_tokenizer
from rollmill.runs.run import RunDirectory
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, Publisher, WeightStore
from rollmill.weights.reading.leases import Leases
from rollmill.weights.regions.anchors import AnchorBuilder
from tests.runs.checkpoints import chat_tokenizer
from tests.runs.conftest import make_config
from tests.storage.serving import new_bucket, s3_environment, s3_server, served
from tests.weights.build import delta_pack, history, make_tensors, publish_line, same, train_step
from tests.weights.commands import invoke, open_store, shown, write_events


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]


# --- log, show, verify


def test_log_lists_every_version(run: Path) -> None:
    for where in (run, run / "store", f"file://{run}/store"):
        output = shown("log", where)
        assert "rl (bf16), epoch 1" in output
        assert [row[:2] for row in rows(output)] == [
            ["0", "snapshot"], ["1", "delta"], ["2", "delta"], ["3", "both"], ["4", "delta"],
        ]  # fmt: skip
        assert all("sparse" in row or "classed" in row for row in rows(output)[1:])
    (run / "store/weights/rl/bf16/manifests/0000000004.manifest").write_bytes(b"{}")
    output = shown("log", run)
    assert ["4", "damaged"] in rows(output) and "the manifest of rl@4 (bf16) is truncated or damaged" in output


def test_log_tells_writers_and_parents_apart(run: Path) -> None:
    store = open_store(run)
    versions = history(5)
    again = Publisher(store, "rl", snapshot_every=3)  # a restarted trainer
    again.publish(5, train_step(versions[-1], 5))
    branch = Publisher(store, "branch")
    branch.publish(0, versions[2], Version("rl", 2))
    branch.publish(1, versions[4], Version("rl", 4))
    output = shown("log", run, "--line", "rl")
    assert "epoch 2" in output and output.split("digest")[0].split()[-1] == "epoch"
    assert next(row for row in rows(output) if row[0] == "5").count("2") == 1
    output = shown("log", run, "--line", "branch")
    assert "branch (bf16) from rl@2" in output
    assert [row[1] for row in rows(output)] == ["rl@2", "rl@4"]


def test_log_of_a_run_says_how_soon_regions_served(run: Path) -> None:
    write_events(run)
    output = shown("log", run, columns=140)
    assert "→ away" in output and "→ home" in output and "pause" in output
    second = next(line for line in output.splitlines() if line.split()[:2] == ["1", "delta"])
    assert "250 ms" in second and "2.0 s" in second and "4.0 ms" in second
    third = next(line for line in output.splitlines() if line.split()[:2] == ["2", "delta"])
    assert "(1.5 s)" in third, "stored in the region, not served yet"
    narrow = shown("log", run, columns=80)
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow


def test_show_says_what_a_version_is(run: Path) -> None:
    store = open_store(run)
    manifest = store.manifest(Version("rl", 1))
    output = shown("show", run, "rl@1")
    for fact in ("rl@1 (bf16)", manifest.digest, "rl@0", manifest.writer, "in 1 pack", "embed.weight", "300×64"):
        assert fact in output, fact
    told = json.loads(shown("show", run, "rl@1", "--json"))
    assert (told["line"], told["number"], told["digest"]) == ("rl", 1, manifest.digest)
    assert told["encodings"]["delta"]["base"] == "rl@0"
    assert sum(told["encodings"]["delta"]["codings"].values()) == manifest.bytes == told["bytes"]
    assert told["tensors"][0]["name"] == "embed.weight"
    assert told["tensors"][0]["changed_share_estimate"] == pytest.approx(0.02, rel=0.3)
    assert told["ratio"] == pytest.approx(told["full_bytes"] / told["bytes"])


def test_a_version_that_changed_nothing_has_no_ratio(run: Path) -> None:
    store = open_store(run)
    Publisher(store, "rl").publish(5, history(5)[4])
    assert store.manifest(Version("rl", 5)).bytes == 0
    assert next(row for row in rows(shown("log", run)) if row[0] == "5").count("unchanged") == 1
    assert "unchanged" in shown("show", run, "rl@5").split("ratio")[1].splitlines()[0]
    assert json.loads(shown("show", run, "rl@5", "--json"))["ratio"] is None
    assert "same weights" in shown("diff", run, 4, 5)


def test_show_names_the_anchor(run: Path) -> None:
    assert AnchorBuilder(open_store(run), "rl", every=2).poll() == 4
    told = json.loads(shown("show", run, "rl@4", "--json"))
    assert told["anchors"] == [4] and told["encodings"]["anchor"]["codings"].keys() == {"raw"}
    assert "rl@4" in shown("show", run, "rl@4").split("nearest anchor")[1]


def test_text_from_a_store_is_not_markup(tmp_path: Path) -> None:
    name = "[bold red]a[/]\x1b[2J"
    store = WeightStore(Objects.open(tmp_path / "store"))
    Publisher(store, "rl").publish(0, make_tensors(shapes={name: (4, 4)}), None, {"note": "\x1b]0;x\x07[/]"})
    output = shown("show", tmp_path, 0)
    assert "[bold red]a[/]" in output and "\x1b" not in output and "\x07" not in output


def test_verify_says_what_is_wrong_and_fails(run: Path) -> None:
    assert "all 5 versions verified" in shown("verify", run)
    delta_pack(run / "store", 1).write_bytes(b"short")
    with pytest.raises(WeightsError, match="is unusable") as caught:
        invoke("export", run, "rl@2", run / "out")
    assert caught.value.hint and "weights verify" in caught.value.hint
    code, output = invoke("verify", run)
    assert code == 1
    assert "rl@1" in output and "truncated" in output and "2 of 5 versions are wrong" in output


def test_verify_reads_anchors_too(run: Path) -> None:
    assert AnchorBuilder(open_store(run), "rl", every=2).poll() == 4
    assert "all 5 versions verified" in shown("verify", run)
    anchor = open_store(run).anchor(Version("rl", 4))
    assert anchor is not None
    pack = run / f"store/weights/rl/bf16/packs/0000000004-{anchor.snapshot.packs[0].digest}"
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    code, output = invoke("verify", run)
    assert code == 1 and "the anchor of rl@4" in output


def test_over_http(run: Path) -> None:
    with served(object_app(Objects.open(run / "store"), token="secret")) as url:
        assert invoke("verify", url, "--token", "secret")[0] == 0
        assert "rl@3" in shown("show", url, "rl@3", "--token", "secret")


def test_over_s3(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket on a real server, named as a user names it: all reading and writing commands."""
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    bucket = new_bucket()
    shown("export", run, "rl@1", run / "out")
    assert "base@0" in shown("import", run / "out", bucket, "--line", "base")
    shown("mirror", run, bucket, "--line", "rl", "--once")
    assert "base (bf16)" in shown("log", bucket) and "bit for bit" in shown("diff", bucket, "base@0", "base@0")
    shown("channel", "set", bucket, "live", "rl@4")
    assert "rl@4: channel live" in shown("gc", bucket, "--keep", 1)
    assert "verified" in shown("verify", bucket)
    shown("export", bucket, "base@0", run / "back")
    assert (run / "back/model.safetensors").read_bytes() == (run / "out/model.safetensors").read_bytes()


# --- which version


def test_versions_are_written_as_they_are_printed(run: Path) -> None:
    channels = Channels(Objects.open(run / "store"))
    channels.move("live", Version("rl", 2))
    for text in ("rl@2", "2", "live"):
        assert json.loads(shown("show", run, text, "--json"))["number"] == 2
    Publisher(open_store(run), "other").publish(0, make_tensors())
    with pytest.raises(WeightsError, match="could belong to any line") as caught:
        invoke("show", run, "2")
    assert caught.value.hint == "name one: other@2, rl@2"
    assert json.loads(shown("show", run, "2", "--line", "rl", "--json"))["number"] == 2


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rl@7", "rl@7 does not exist", "rl has 0 to 4"),
        ("sft@0", "sft@0 does not exist", "lines here: rl"),
        ("canary", "neither LINE@NUMBER nor a channel", "lines: rl"),
        ("rl@x", "neither LINE@NUMBER nor a channel", "channels here"),
        ("../x@1", "cannot name a line", "letters"),
    ],
)
def test_invalid_versions_are_explained(run: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        invoke("show", run, text)
    assert hint in str(caught.value.hint)


def test_wrong_places_are_explained_and_not_created(run: Path) -> None:
    for arguments in (("log", run / "nowhere"), ("verify", run, "--line", "sft"), ("log", run, "--form", "fp8")):
        with pytest.raises(WeightsError) as caught:
            invoke(*arguments)
        assert caught.value.hint
    assert not (run / "nowhere").exists()


# --- diff


def test_diff_says_what_changed_and_what_it_costs(run: Path) -> None:
    found = json.loads(shown("diff", run, "rl@1", "rl@2", "--json"))
    versions = history(3)
    old, new = (np.concatenate([one.data.view(np.uint16) for one in side.values()]) for side in versions[1:])
    assert found["total"]["changed"] == np.count_nonzero(old != new) and not found["same"]
    delta = open_store(run).manifest(Version("rl", 2)).delta
    assert delta is not None and found["wire"] == {"bytes": delta.bytes, "legs": ["delta of rl@2"]}
    output = shown("diff", run, "rl@1", "rl@2", "--top", "2")
    assert "rl@1 (bf16) → rl@2 (bf16)" in output and "on the wire" in output
    assert f"and {len(found['tensors']) - 2} more" in output
    assert f"{found['total']['changed']:,}" in output


def test_diff_across_lines_and_backwards(run: Path) -> None:
    store = open_store(run)
    tensors = {**history(3)[2]}
    Publisher(store, "copy").publish(0, tensors)
    assert "same weights, bit for bit" in shown("diff", run, "rl@2", "copy@0")
    del tensors["scale"]
    Publisher(store, "less").publish(0, tensors)
    output = shown("diff", run, "rl@2", "less@0")
    assert "removed: scale" in output
    back = json.loads(shown("diff", run, "rl@4", "rl@1", "--json"))
    assert back["wire"]["legs"] == ["snapshot of rl@0", "delta of rl@1"]


# --- export, import


MODEL = {"vocab_size": 300, "layers": 1, "width": 64}


@pytest.fixture
def real_run(tmp_path: Path) -> RunDirectory:
    chat_tokenizer(SPECIAL_TOKENS).save(tmp_path / "words.json")
    model = (f"model.{name}={value}" for name, value in MODEL.items())
    made = RunDirectory.create(tmp_path / "runs", make_config(f"tokenizer={tmp_path / 'words.json'}", *model))
    keep_tokenizer(made, Objects.open(made.home_store))
    publish_line(made.home_store, 3, line="midtrain")
    return made


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_export_import_export_is_byte_identical(real_run: RunDirectory, tmp_path: Path) -> None:
    first, second, base = tmp_path / "first", tmp_path / "second", "midtrain"
    assert f"{base}@2 (bf16)" in shown("export", real_run.path, f"{base}@2", first)
    assert "main@0 (bf16): 5 tensors" in shown("import", first, tmp_path / "elsewhere", "--line", "main")
    shown("export", tmp_path / "elsewhere", "0", second)
    before, after = files_of(first), files_of(second)
    about = [json.loads(files.pop("rollmill.json")) for files in (before, after)]
    assert before == after and before.keys() >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert [one["number"] for one in about] == [2, 0] and about[0]["digest"] == about[1]["digest"]
    config = json.loads(before["config.json"])
    assert config_from_huggingface(config, "config.json").model_dump(mode="json").items() >= MODEL.items()
    assert config["torch_dtype"] == "bfloat16"
    assert before["tokenizer.json"] == real_run.tokenizer.read_bytes()
    assert same(open_store(real_run.path).load(Version(base, 2)), history(3)[2])
    loaded = load_file(first / "model.safetensors")
    assert all(loaded[name].dtype is torch.bfloat16 for name in history(1)[0])


def test_companions_of_an_import_are_exported_with_its_descendants(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": torch.ones(4, 4, dtype=torch.bfloat16)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    shown("import", source, tmp_path / "store", "--line", "base")
    store = WeightStore(Objects.open(tmp_path / "store"))
    base = store.load(Version("base", 0))
    Publisher(store, "rl").publish(0, base, Version("base", 0))
    shown("export", tmp_path / "store", "rl@0", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_text() == '{"model_type": "llama"}'
    told = json.loads(shown("show", tmp_path / "store", "base@0", "--json"))
    assert told["metadata"]["source"] == str(source)


def test_export_replaces_nothing_without_force(run: Path) -> None:
    shown("export", run, "rl@1", run / "out")
    before = files_of(run / "out")
    with pytest.raises(WeightsError, match="not empty"):
        invoke("export", run, "rl@2", run / "out")
    assert files_of(run / "out") == before
    shown("export", run, "rl@2", run / "out", "--force")
    assert json.loads((run / "out/rollmill.json").read_text())["number"] == 2


def test_import_is_repeatable_and_refuses_a_line_in_use(run: Path) -> None:
    shown("export", run, "rl@1", run / "one")
    shown("export", run, "rl@2", run / "two")
    for _ in range(2):
        assert "base@0" in shown("import", run / "one", run, "--line", "base")
    assert open_store(run).epoch("base") == 1, "a repeated import does not take over the line"
    for directory, line in ((run / "two", "base"), (run / "one", "rl")):
        with pytest.raises(WeightsError, match="already has versions") as caught:
            invoke("import", directory, run, "--line", line)
        assert "--line" in str(caught.value.hint)
    assert open_store(run).epoch("rl") == 1


def test_import_converts_only_when_told(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 0.1]), "exact": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="w is F32 and cannot become bf16"):
        invoke("import", tmp_path, tmp_path / "store", "--line", "base")
    assert not (tmp_path / "store/weights").exists()
    assert "2 tensors with another dtype converted to bf16" in shown(
        "import", tmp_path, tmp_path / "store", "--line", "base", "--convert"
    )
    loaded = WeightStore(Objects.open(tmp_path / "store")).load(Version("base", 0))
    assert loaded["w"].data.view(np.uint16).tolist() == [0x3F80, 0x3DCD]


def test_an_export_that_was_changed_is_noticed(run: Path) -> None:
    shown("export", run, "rl@1", run / "out")
    file = run / "out/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match="are not those that"):
        invoke("import", run / "out", run, "--line", "base")
    assert "base" not in open_store(run).lines()


def test_import_makes_a_store_but_not_inside_something_else(run: Path) -> None:
    shown("export", run, "rl@1", run / "out")
    with pytest.raises(WeightsError, match="has no weights"):
        invoke("import", run / "out", run / "out", "--line", "base")


# --- channels


def test_channels_are_moved_listed_and_rolled_back(run: Path) -> None:
    for entry, number in enumerate((1, 2, 3)):
        output = shown("channel", "set", run, "live", f"rl@{number}", "--expect", entry)
        assert f"live → rl@{number} (entry {entry + 1}" in output
    assert "rl@3" in shown("channel", "list", run)
    assert "live → rl@2 (entry 4, it was rl@3)" in shown("rollback", run, "live")
    assert "live → rl@1 (entry 5, it was rl@2)" in shown("rollback", run, "live"), "not forward to rl@3 again"
    with pytest.raises(WeightsError, match="no version before that"):
        invoke("rollback", run, "live")
    assert "live → rl@4" in shown("rollback", run, "live", "--to", "rl@4")
    output = shown("channel", "history", run, "live")
    assert [row[1] for row in rows(output)] == ["rl@4", "rl@1", "rl@2", "rl@3", "rl@2", "rl@1"]
    with pytest.raises(WeightsError, match="was expected at entry 2"):
        invoke("channel", "set", run, "live", "rl@1", "--expect", 2)


def test_a_missing_channel(run: Path) -> None:
    assert "no channels" in shown("channel", "list", run)
    shown("channel", "set", run, "live", "4")
    for arguments in (("channel", "history", run, "canary"), ("rollback", run, "canary")):
        with pytest.raises(WeightsError, match="no channel 'canary'") as caught:
            invoke(*arguments)
        assert caught.value.hint == "channels here: live"


def test_a_channel_never_points_at_a_version_that_cannot_be_restored(run: Path) -> None:
    shown("channel", "set", run, "live", "rl@4")
    shown("channel", "set", run, "live", "rl@2")
    delta_pack(run / "store", 4).unlink()
    for arguments in (("channel", "set", run, "live", "rl@4"), ("rollback", run, "live", "--to", "rl@4")):
        with pytest.raises(WeightsError, match=r"rl@4 \(bf16\) cannot be restored .* is missing"):
            invoke(*arguments)
    with pytest.raises(WeightsError, match="no such version"):
        invoke("channel", "set", run, "live", "rl@9")
    # a damaged delta does not matter if the snapshot beside it is complete
    for pack in (run / "store/weights/rl/bf16/packs").glob("0000000003-*"):
        if pack.stat().st_size < 20_000:
            pack.write_bytes(b"x")
    assert "rl@3" in shown("channel", "set", run, "live", "rl@3")


# --- gc


def test_gc_reports_what_is_removed_and_what_holds_the_rest(tmp_path: Path) -> None:
    publish_line(tmp_path / "store", 10, snapshot_every=2)
    store = open_store(tmp_path)
    shown("channel", "set", tmp_path, "live", "rl@4")
    Leases(store.objects, "rl").hold("engine-away", 7, 600.0, region="away")
    shown("channel", "set", tmp_path, "old", "rl@6")
    shown("channel", "set", tmp_path, "old", "rl@9")
    output = shown("gc", tmp_path, "--keep", 2, "--dry-run")
    assert "would be removed: rl@0–3, 5" in output and "stay: rl@4, 6–9" in output
    facts = (
        "rl@9: the head",
        "rl@4: channel live",
        "rl@6: a rollback of channel old",
        "rl@7: engine-away in away holds",
    )
    for fact in facts:
        assert fact in output
    assert store.numbers("rl") == list(range(10))
    assert "removed: rl@0–3, 5" in shown("gc", tmp_path, "--keep", 2)
    assert WeightStore(store.objects).numbers("rl") == [4, 6, 7, 8, 9]
    assert "all 5 versions verified" in shown("verify", tmp_path)


def test_gc_by_budget(tmp_path: Path) -> None:
    publish_line(tmp_path / "store", 10, snapshot_every=1)
    size = sum(path.stat().st_size for path in (tmp_path / "store/weights").rglob("*") if path.is_file())
    assert "0 versions" in shown("gc", tmp_path, "--budget", size + 1000)
    output = shown("gc", tmp_path, "--budget", f"{size / 2 / 1000:.3f}kB")
    left = open_store(tmp_path).numbers("rl")
    assert 3 <= len(left) <= 5 and left[-1] == 9 and "budget" not in output
    assert "the budget is not met" in shown("gc", tmp_path, "--budget", "1B")
    assert open_store(tmp_path).numbers("rl") == [9]
    with pytest.raises(ConfigError, match="not a size"):
        invoke("gc", tmp_path, "--budget", "lots")
    Publisher(open_store(tmp_path), "other").publish(0, make_tensors())
    with pytest.raises(WeightsError, match="applies to one line"):
        invoke("gc", tmp_path, "--budget", "1GB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("200GB", 200 * 10**9), ("1.5TiB", 3 << 39), ("12", 12), ("3 kb", 3000), ("1M", 10**6), ("2gib", 2 << 30)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    from rollmill.cli.weights.upkeep import _parse_size

    assert _parse_size(text) == size


def test_piped_output_is_not_cut_to_a_screen_width(run: Path) -> None:
    write_events(run)
    command = [sys.executable, "-c", "from rollmill.cli.main import main; main()", "weights", "log", str(run)]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    output = subprocess.check_output(command, env=environment, text=True)
    assert all(column in output for column in ("pause", "digest", "when")) and "…" not in output
    assert "\x1b" not in output and max(map(len, output.splitlines())) < 140


def test_a_store_without_a_version_says_so(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert [shown(command, tmp_path) for command in ("log", "verify", "gc")] == ["no version yet\n"] * 3
