"""Companions (config.json, tokenizer, …): stored with a line, and present wherever a version of it is."""

import os
import shutil
from pathlib import Path

import pytest

from rollmill.errors import StorageError, WeightsError
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Mirror, Publisher, WeightStore
from rollmill.weights.files import companions as companions_module
from rollmill.weights.files.companions import (
    Companion,
    Index,
    companions_of,
    index_key,
    keep_companions,
    kept_companions,
)
from rollmill.weights.format.manifest import digest_bytes, seal
from rollmill.weights.format.object_keys import manifest_key
from rollmill.weights.regions.collection import ABANDONED_SECONDS, collect, collect_companions
from rollmill.weights.regions.keeper import RegionKeeper
from tests.storage.serving import new_bucket, s3_options, s3_server, served
from tests.weights.build import history, publish_line, same
from tests.weights.commands import invoke, open_store, shown
from tests.weights.worker import killed_at

FILES = {"config.json": b'{"layers": 2}\n', "tokenizer.json": b"{}", "merges.txt": b""}


def publish_family(objects: Objects) -> list:
    """A checkpoint with companions, a line that begins from it, and its successor."""
    versions = history(4)
    keep_companions(objects, "base", FILES)
    Publisher(WeightStore(objects), "base").publish(0, versions[0])
    Publisher(WeightStore(objects), "rl").publish(0, versions[1], parent=Version("base", 0))
    successor = Publisher(WeightStore(objects), "rl.2")
    successor.publish(1, versions[2], parent=Version("rl", 0))
    successor.publish(2, versions[3])
    return versions


def make_old(path: Path) -> None:
    """Makes everything two hours old, by the store's clock."""
    for file in path.rglob("*"):
        then = file.stat().st_mtime - 2 * ABANDONED_SECONDS
        os.utime(file, (then, then))


# --- storing


def test_they_stay_with_their_line(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path)
    keep_companions(objects, "base", FILES)
    keep_companions(objects, "base", FILES)  # a repeated import
    assert kept_companions(objects, "base") == FILES and kept_companions(objects, "other") == {}
    with pytest.raises(WeightsError, match=r"config\.json' in .* already exists with other content"):
        keep_companions(objects, "base", {"config.json": b"other"})
    # a stored set never changes
    with pytest.raises(WeightsError, match=r"index' in .* already exists with other content"):
        keep_companions(objects, "base", {**FILES, "vocab.json": b"{}"})
    with pytest.raises(WeightsError, match="cannot name a line"):
        kept_companions(objects, "../base")


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path)
    for name, data in {**FILES, "model.safetensors": b"no companion"}.items():
        objects.create(f"companions/base/{name}", data)
    assert kept_companions(objects, "base") == FILES
    keep_companions(objects, "base", FILES)
    assert objects.head(index_key("base")) and kept_companions(objects, "base") == FILES


def test_damage_is_named(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path)
    keep_companions(objects, "base", FILES)
    file, index = tmp_path / "companions/base/config.json", tmp_path / index_key("base")
    file.write_bytes(b'{"layers": 3}\n')
    with pytest.raises(WeightsError, match=r"base/config\.json' in .* is damaged"):
        kept_companions(objects, "base")
    file.write_bytes(b"{")
    with pytest.raises(StorageError, match="truncated"):
        kept_companions(objects, "base")
    file.unlink()
    with pytest.raises(WeightsError, match=r"base/config\.json' is missing in .*, but the index names it"):
        kept_companions(objects, "base")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"base/index' in .* is truncated or damaged"):
        kept_companions(objects, "base")


def test_an_index_from_another_region_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, empty = Objects.open(tmp_path), digest_bytes(b"")
    for name in ("../../secret", "model.safetensors", "rollmill.json", "/etc/passwd"):
        objects.put(index_key("base"), seal(Index(line="base", files=(Companion(name=name, bytes=0, digest=empty),))))
        with pytest.raises(WeightsError, match="names files that are not companions"):
            kept_companions(objects, "base")
    objects.put(index_key("base"), seal(Index(line="other", files=())))
    with pytest.raises(WeightsError, match="belongs to another line"):
        kept_companions(objects, "base")
    huge = Companion(name="config.json", bytes=1 << 40, digest=empty)
    objects.put(index_key("base"), seal(Index(line="base", files=(huge,))))
    with pytest.raises(WeightsError, match="have 1099511627776 bytes together"):
        kept_companions(objects, "base")
    objects.put(index_key("base"), b" " * (1 << 20))
    with pytest.raises(WeightsError, match="has 1048576 bytes, too many for an index"):
        kept_companions(objects, "base")
    monkeypatch.setattr(companions_module, "LARGEST_BYTES", 10)
    objects.put("companions/old/config.json", b"12345678901")
    for call in (lambda: kept_companions(objects, "old"), lambda: keep_companions(objects, "new", FILES)):
        with pytest.raises(WeightsError, match="bytes together, more than the allowed 10"):
            call()
    assert objects.list("companions/new") == []


def test_verify_and_gc_report_them(run: Path) -> None:
    store = open_store(run)
    keep_companions(store.objects, "rl", FILES)
    keep_companions(store.objects, "died", FILES)
    assert "all 5 versions verified" in shown("verify", run)
    (run / "store/companions/rl/tokenizer.json").write_bytes(b"[]")
    code, output = invoke("verify", run)
    assert code == 1 and "companions of rl: 'companions/rl/tokenizer.json'" in output and "is damaged" in output
    assert "died" not in shown("gc", run)
    make_old(run)
    assert "died: no version; its companions would be removed" in shown("gc", run, "--dry-run")
    assert "died" not in shown("gc", run, "--line", "rl")
    assert "died: no version; its companions were removed" in shown("gc", run)
    assert {key.split("/")[1] for key in store.objects.list("companions")} == {"rl"}


# --- in another region


def test_a_region_has_them_under_the_line_it_copies(tmp_path: Path) -> None:
    """In the home store they belong to a line two lines before the copied one."""
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    versions = publish_family(home)
    with served(object_app(home)) as url:
        assert Mirror(Objects.open(url), away).copy("rl.2").versions[-1] == Version("rl.2", 2)
    assert kept_companions(away, "rl.2") == FILES
    assert {key.split("/")[1] for key in away.list("companions")} == {"rl.2"} == set(WeightStore(away).lines())
    shutil.rmtree(tmp_path / "home")
    shown("export", tmp_path / "away", "rl.2@2", tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES
    assert same(WeightStore(away).load(Version("rl.2", 2)), versions[3])


def test_a_region_that_was_copied_before_gets_them_with_the_next_version(tmp_path: Path) -> None:
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publish_family(home)
    Mirror(home, away).copy("rl.2", number=1)
    shutil.rmtree(tmp_path / "away" / "companions")
    Mirror(home, away).copy("rl.2")
    assert kept_companions(away, "rl.2") == FILES


def test_between_buckets_and_a_store_that_fails_in_between() -> None:
    home = Objects.open(new_bucket(), options=s3_options(s3_server()))
    away = Objects.open(new_bucket(), options=s3_options(s3_server()))
    versions = publish_family(home)
    keeper, create = RegionKeeper(home, away, "rl", anchor_every=0, collect_seconds=0), away.create

    def fail_at_manifests(key: str, data: bytes) -> None:
        if key.endswith(".manifest"):
            raise StorageError(f"{key!r}: 503")
        create(key, data)

    away.create = fail_at_manifests  # type: ignore[method-assign]
    assert keeper.step().versions == () and keeper.problem and "503" in keeper.problem
    assert kept_companions(away, "rl.2") == FILES  # they are copied first, and nothing uses them yet
    assert not WeightStore(away).begun("rl.2")
    away.create = create  # type: ignore[method-assign]
    again = RegionKeeper(home, away, "rl", anchor_every=0, collect_seconds=0)
    assert again.step().versions == (Version("rl.2", 1), Version("rl.2", 2)) and again.problem is None
    assert companions_of(WeightStore(away), WeightStore(away).manifest(Version("rl.2", 2))) == FILES
    assert same(WeightStore(away).load(Version("rl.2", 2)), versions[3])


@pytest.mark.slow
def test_a_copy_killed_at_every_call_of_its_store(tmp_path: Path) -> None:
    """kill -9 before and after each call: no version without companions, no index without its files; safe to repeat."""
    publish_family(home := Objects.open(tmp_path / "home"))
    seen = set()
    step = 0
    while killed_at(path := tmp_path / str(step), step, lambda away: Mirror(home, away).copy("rl.2")):
        away = WeightStore(Objects.open(path))
        sealed = away.objects.head(index_key("rl.2")) is not None
        seen.add((len(away.objects.list("companions")), sealed, len(away.numbers("rl.2"))))
        assert not sealed or kept_companions(away.objects, "rl.2") == FILES
        assert sealed or away.numbers("rl.2") == []
        Mirror(home, away.objects).copy("rl.2")
        assert kept_companions(away.objects, "rl.2") == FILES and away.numbers("rl.2") == [1, 2]
        assert all(ok for _, ok, _ in away.verify("rl.2"))
        shutil.rmtree(path)
        step += 1
    assert seen == {
        (0, False, 0),
        (1, False, 0),
        (2, False, 0),
        (3, False, 0),
        (4, True, 0),
        (4, True, 1),
        (4, True, 2),
    }


def test_a_new_region_waits_until_home_is_repaired(tmp_path: Path) -> None:
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publish_family(home)
    file = tmp_path / "home/companions/base/config.json"
    file.write_bytes(b"{")
    with pytest.raises(StorageError, match="truncated"):
        Mirror(home, away).copy("rl.2")
    assert WeightStore(away).numbers("rl.2") == [] and away.list("companions") == []
    file.write_bytes(FILES["config.json"])
    assert len(Mirror(home, away).copy("rl.2").versions) == 2
    assert kept_companions(away, "rl.2") == FILES


# --- collecting


def test_companions_of_lines_without_versions_are_removed_after_an_hour(tmp_path: Path) -> None:
    store = WeightStore(Objects.open(tmp_path))
    publish_line(tmp_path, 6, snapshot_every=2)
    for line in ("rl", "died", "coming", "fresh"):
        keep_companions(store.objects, line, FILES)
    store.objects.delete(index_key("died"))
    make_old(tmp_path)
    store.objects.put(f"weights/coming/bf16/packs/{0:010d}-{'ab' * 32}", b"on its way")
    store.objects.put("companions/fresh/config.json", FILES["config.json"])
    collect(store, "rl", keep=1)
    expected = {"died": sum(map(len, FILES.values()))}
    assert collect_companions(store, dry_run=True) == expected and store.objects.list("companions/died") != []
    assert collect_companions(store) == expected and collect_companions(store) == {}
    assert store.objects.list("companions/died") == []
    assert all(kept_companions(store.objects, line) == FILES for line in ("rl", "coming", "fresh"))


def test_a_region_removes_old_companions_too(tmp_path: Path) -> None:
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publish_family(home)
    keep_companions(away, "left", FILES)
    keep_companions(away, "rl.2", FILES)  # a copy was killed here long ago
    make_old(tmp_path / "away")
    keeper = RegionKeeper(home, away, "rl", anchor_every=0, collect_seconds=0)
    keeper.step()
    assert keeper.problem is None and away.list("companions/left") == []
    assert kept_companions(away, "rl.2") == FILES


def test_an_import_that_takes_hours_writes_them_again(tmp_path: Path) -> None:
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publish_family(home)
    mirror, create = Mirror(home, away), away.create

    def fail_at_manifests(key: str, data: bytes) -> None:
        if key == manifest_key(Version("rl.2", 1), "bf16"):
            raise StorageError(f"{key!r}: no space left")
        create(key, data)

    away.create = fail_at_manifests  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="no space left"):
        mirror.copy("rl.2")
    make_old(tmp_path / "away")
    assert collect_companions(WeightStore(away)).keys() == {"rl.2"}
    away.create = create  # type: ignore[method-assign]
    assert len(mirror.copy("rl.2").versions) == 2 and kept_companions(away, "rl.2") == FILES
