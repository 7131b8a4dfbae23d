from __future__ import annotations

import json
import re
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmill.errors import ConfigError
from rollmill.kinds import build
from rollmill.models.config import Adapter
from rollmill.runs.run import SECRETS, RunDirectory
from rollmill.runs.saved import FORMAT
from rollmill.storage.database import open_database
from rollmill.training.stage import RolloutSettings
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from tests.runs.conftest import make_config
from tests.trajectories.build import start_group


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("stages.rl.steps=many", "[stages] kind = \"rl\": steps: Input should be a valid integer (got 'many')"),
        ("stages.rl.steps=1.5", "steps: "),
        ("stages.rl.group_size=0", "group_size: Input should be greater than or equal to 1"),
        ("stages.rl.group_size=1", "group_size is 1, but baseline"),
        ("stages.rl.max_stalness=1", "unknown key 'max_stalness'; did you mean 'max_staleness'?"),
        ("max_stalness=1", "unknown key 'max_stalness'; did you mean 'stages.rl.max_staleness'?"),
        ("stages.rll.steps=1", "override 'stages.rll.steps=1': nothing is called 'rll'"),
        ("stages.rl=1", "override 'stages.rl=1' names no setting of 'rl'"),
        ("steps=1", "'steps' is a setting of a stage"),
        ("midtrain.steps=1", "'midtrain' is a setting of a stage"),
        ("stages.rl.name=midtrain", "two stages are called 'midtrain': give each its own `name`"),
        ("stages.rl.name=eval-before", "a stage cannot be called 'eval-before'"),
        ('stages.rl.name="../main"', "name: String should match pattern"),
        ("rollouts.timeout=1", "unknown key 'rollouts.timeout'; did you mean 'rollouts.timeout_s'?"),
        ("model.layer=3", "did you mean 'model.layers'?"),
        ('regions=["home"]', "'regions' is replaced by [[engines]]"),
        ('engines=[{count=2},{region="home-2"}]', "two engines are called 'home-2'"),
        ("stages.rl.training.adapter.rank=7", "adapter.rank: "),
        ('engines=[{region="../away"}]', "region: String should match pattern"),
        ("engines=[{count=0}]", "count: "),
        ("engines=[{cuont=2}]", "unknown key 'cuont'; did you mean 'count'?"),
        ("trainer.ranks=2", "there is no section [trainer]"),
        ("machines.hosts=['https://a']", "unknown key 'machines'; did you mean 'machine'?"),
        ("machine.hosts=['https://a']", "'hosts' is a setting of kind = 'remote'"),
        ("scale=auto", "unknown key 'scale'; did you mean 'balance.scale'?"),
        ("engines=[{kind='vlm'}]", "[engines] kind = 'vlm' is unknown"),
        ("engines=[{form='fp9'}]", "form: Input should be 'bf16', 'fp8' or 'nvfp4'"),
        ("engines=[]", "engines: "),
        ("name=Demo Run", "name: String should match pattern"),
    ],
)
def test_a_wrong_configuration_is_named_with_its_place(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_config(override)
    assert complaint in raised.value.message
    # that a list is empty is said only if nothing was in it
    assert ("after validation" in raised.value.message) == (override == "engines=[]")


def test_several_dispatchers_cannot_listen_at_one_port() -> None:
    with pytest.raises(ConfigError, match=r"machine\.listen is the port of one dispatcher"):
        make_config("machine={kind='remote',listen='127.0.0.1:7000'}", "dispatcher.replicas=2")
    assert make_config("machine={kind='remote',listen='127.0.0.1:7000'}").dispatcher.replicas == 1


def test_exact_numerics_need_an_engine_of_the_form_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"numerics = 'exact' holds for engines of the run's form, and none serves"):
        make_config("numerics=exact", "engines=[{form='fp8'}]")
    make_config("numerics=exact", "form=fp8", "engines=[{form='fp8'}]")
    make_config("numerics=exact", "engines=[{form='fp8'},{region='away'}]")


def test_exact_numerics_need_keys_and_values_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"engine\.fp8_kv"):
        make_config("numerics=exact", "engine.fp8_kv=true")
    assert make_config("engine.fp8_kv=true").engine.fp8_kv


def test_an_adapter_is_of_its_stage_and_those_after_it_begin_with_what_it_added() -> None:
    config = make_config("stages.midtrain.training.adapter.rank=8")
    assert config.model_of("midtrain").adapter == Adapter(rank=8) == config.model_of("midtrain.2").adapter
    assert config.model_of("rl").adapter is None and config.model_of("base").adapter is None
    cycles = make_config("stages.rl.training.adapter.targets=['experts']").model_of("cycle-3")
    assert cycles.adapter is not None and cycles.adapter.targets == ("experts",)
    for given, why in (
        ("stages.rl.training.ranks=2", "an adapter is trained by one rank so far"),
        ("engines=[{kind='vllm'}]", "vLLM engines serve none yet"),
        ("stages.rl.training.adapter.targets=['mlp']", "the model has no mlp"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_config("stages.rl.training.adapter.rank=8", given)


def test_every_mistake_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        make_config("stages.rl.steps=many", "stages.rl.group_size=0", "colour=red")
    assert all(word in raised.value.message for word in ("steps", "group_size", "colour"))


def test_the_staleness_bound() -> None:
    for staleness, bound in ((2, 36), (0, 12)):
        stage = make_config(f"stages.rl.max_staleness={staleness}", "stages.rl.groups_per_step=12").stage("rl")
        assert isinstance(stage, RolloutSettings) and stage.pace(9).most_open(0) == bound


def test_a_run_directory_is_opened_as_it_was_created(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, make_config("engines=[{},{region='away'},{region='far-away'}]"))
    assert RunDirectory.open(run.path) == run
    assert len(set(run.ports.values())) == len(run.ports) == 5
    assert run.home_store == run.path / "store"
    assert run.store_path("far-away") == run.path / "regions" / "far-away" / "store"
    tokens = set(run.secrets.values())
    assert len(tokens) == len(SECRETS) == 5 and all(len(token) >= 32 for token in tokens)


def test_runs_of_one_name_have_different_ids(tmp_path: Path) -> None:
    """So runs of two people or two machines can share a database and a store."""
    runs = [RunDirectory.create(tmp_path / owner, make_config()) for owner in ("ann", "bob")]
    assert runs[0].id != runs[1].id
    assert all(re.fullmatch("small-[0-9a-f]{8}", run.id) for run in runs)
    database = open_database(f"sqlite:///{tmp_path / 'shared.db'}")
    ledgers = [Ledger(database, run.id) for run in runs]
    ids = ["one-trajectory"]
    assert start_group(ledgers[0], "group", "task", 1, pace=Pace(1, 1, 0), ids=ids, provenance={}) == 0
    assert [ledger.groups_started() for ledger in ledgers] == [1, 0]


def test_a_run_that_only_serves_is_opened_without_tasks(tmp_path: Path) -> None:
    config = make_config().model_copy(update={"tasks": None, "stages": (), "checkpoint": "gone"})
    assert RunDirectory.open(RunDirectory.create(tmp_path, config).path).config == config


def test_only_the_owner_can_read_the_keys(run: RunDirectory) -> None:
    assert stat.S_IMODE((run.path / "run.json").stat().st_mode) == 0o600
    assert [path.name for path in run.path.iterdir()] == ["run.json"]  # no draft is left behind


def test_a_second_run_of_the_name_is_refused_and_the_first_one_kept(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run[\s\S]*hint: `rollmill train --resume .*small"):
        RunDirectory.create(run.path.parent, make_config("stages.rl.steps=1"))
    assert RunDirectory.open(run.path) == run


def test_one_of_several_concurrent_creators_wins(tmp_path: Path) -> None:
    def create(seed: int) -> RunDirectory | None:
        try:
            return RunDirectory.create(tmp_path, make_config(f"seed={seed}"))
        except ConfigError:
            return None

    with ThreadPoolExecutor(8) as pool:
        made = [run for run in pool.map(create, range(8)) if run is not None]
    assert made == [RunDirectory.open(tmp_path / "small")]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory.create(tmp_path / "file", make_config())


def test_a_place_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"holds no run[\s\S]*hint: `rollmill runs`"):
            RunDirectory.open(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"config": {}}', "\udcff"])
def test_a_damaged_run_json(run: RunDirectory, content: str) -> None:
    (run.path / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"run\.json"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize(("found", "remedy"), [(None, "trajectories export"), (FORMAT + 1, "newer rollmill")])
def test_a_run_of_another_format_is_refused_and_left_as_it_is(
    run: RunDirectory, found: int | None, remedy: str
) -> None:
    file = run.path / "run.json"
    saved = json.loads(file.read_text())
    del saved["format"], saved["config"]["stages"]
    file.write_text(json.dumps({**saved, "format": found} if found else saved))
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=rf"run\.json has format {found or 0}; .*\nhint: .*{remedy}"):
        RunDirectory.open(run.path)
    assert file.read_bytes() == before and [path.name for path in run.path.iterdir()] == ["run.json"]


def test_a_run_of_another_release_names_the_setting(run: RunDirectory) -> None:
    saved = json.loads((run.path / "run.json").read_text())
    saved["config"]["stages"][1]["groups_per_stop"] = saved["config"]["stages"][1].pop("groups_per_step")
    (run.path / "run.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"run\.json.*'groups_per_stop'; did you mean 'groups_per_step'"):
        RunDirectory.open(run.path)


def test_ports_are_free(run: RunDirectory) -> None:
    for port in run.ports.values():
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_the_sampler_of_a_run_is_a_kind_with_its_own_settings(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, make_config("sampler.kind=frontier", "sampler.hardness=0"))
    assert build(RunDirectory.open(run.path).config.sampler)._config.hardness == 0.0
    assert build(make_config().sampler).name == "uniform" and "sampler" in run.code()
    with pytest.raises(ConfigError, match="hardnes"):
        make_config("sampler.kind=frontier", "sampler.hardnes=0")


def test_the_home_store_in_a_bucket(tmp_path: Path) -> None:
    """Runs may share a bucket: each has a prefix of its own."""
    first, second = (
        RunDirectory.create(tmp_path, make_config(f"name={name}", "store='s3://bucket/runs/'")) for name in "ab"
    )
    assert first.home_store == f"s3://bucket/runs/{first.id}" and first.home_store != second.home_store
    assert RunDirectory.open(first.path).home_store == first.home_store


@pytest.mark.parametrize("store", ["bucket", "s3:/bucket", "s3://", "http://host/bucket", "s3://bucket?key=1"])
def test_a_store_that_cannot_be_written_to(store: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        make_config(f"store={store!r}")
