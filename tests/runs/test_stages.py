"""Stages of a run: names, seeds, when it is evaluated, and a stage of one's own."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError, TrainingError
from rollmill.kinds import build
from rollmill.launch.roles import trainer
from rollmill.launch.services import Target, _form_of
from rollmill.models.config import Llama3Rope, ModelConfig, YarnRope, with_context
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import to_host
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.models.huggingface.describe import describe_model
from rollmill.runs.prepare import describe_longer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.stages import evaluations, is_trained, last_version, newest_step, phases
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.single import SINGLE
from rollmill.trajectories.ledger import Ledger
from rollmill.types import StepRecord, Version
from rollmill.weights.files.companions import keep_companions, kept_companions
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher
from tests.inference.test_follower import Line
from tests.runs.checkpoints import RL, TASKS, chat_tokenizer
from tests.runs.conftest import make_config

TWICE = """
[[stages]]
kind = "rl"
name = "polish"
steps = 3
group_size = 2

[[stages]]
kind = "midtrain"
name = "settle"
steps = 4
evaluate = true
sources = [{kind = "rollmill.demo.demonstrations:Demonstrations"}]
"""


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """The demo with two more stages."""
    file = tmp_path / "four.toml"
    file.write_text(DEMO.read_text() + TWICE)
    return file


def test_stages_are_addressed_by_name(four: Path) -> None:
    config = load_config(RunConfig, four, ["stages.polish.steps=7", "stages.rl.steps=5", "stages.0.steps=9"])
    assert [(stage.name, stage.steps) for stage in config.stages] == [
        ("midtrain", 9), ("rl", 5), ("polish", 7), ("settle", 4),
    ]  # fmt: skip
    assert config.line == "settle" and config.before(config.stage("polish")) == config.stage("rl")
    with pytest.raises(ConfigError, match=r"nothing is called 'polsh'\nhint: did you mean 'polish'"):
        load_config(RunConfig, four, ["stages.polsh.steps=7"])


def test_a_second_stage_of_a_kind_draws_other_numbers(four: Path) -> None:
    config = load_config(RunConfig, four, ["seed=5"])
    seeds = [config.seed_of(stage) for stage in config.stages]
    assert seeds[:2] == [5, 5] and len(set(seeds)) == 3


def test_evaluations_are_before_rl_after_every_rl_stage_and_where_asked(four: Path) -> None:
    config = load_config(RunConfig, four)
    assert phases(config) == [
        "midtrain", "evaluate before", "rl", "evaluate after-rl", "polish", "evaluate after-polish",
        "settle", "evaluate after",
    ]  # fmt: skip
    config = load_config(RunConfig, four, ["stages.settle.evaluate=false", "stages.rl.evaluate=false"])
    assert [each.label for each in evaluations(config)] == ["before", "after"]
    assert evaluations(config)[-1].stage == config.stage("polish")
    assert [each.label for each in evaluations(make_config("stages.rl.steps=0"))] == ["before"]


def test_how_far_a_stage_is(run: RunDirectory) -> None:
    stage = run.config.stage("rl")
    assert newest_step(run, stage) is None and not is_trained(run, stage)
    line = Line(run.home_store, run.config.model, "rl")
    line.publish()
    line.publish()
    assert newest_step(run, stage) == 1 and not is_trained(run, stage)
    successor = Line(run.home_store, run.config.model, "rl.2")  # of a run that went on on other hardware
    successor.publish()
    weights = WeightStore(Objects.open(run.home_store))
    assert last_version(weights, stage, "bf16") == Version("rl.2", 0)


def test_a_stage_is_published_when_every_form_is(make_run: Callable[..., RunDirectory]) -> None:
    """A trainer that was killed after the last version in its own form is started again."""
    run = make_run("engines=[{},{region='away',form='fp8'},{region='far',form='fp8'}]", "stages.rl.steps=1")
    assert run.config.forms == ["bf16", "fp8"]
    assert [run.config.form_of(spec) for spec in run.config.engine_specs] == ["bf16", "fp8", "fp8"]
    stage, line = run.config.stage("rl"), Line(run.home_store, run.config.model, "rl")
    line.publish()
    line.publish()
    ledger = Ledger(open_database(run.database_url), run.stage_key(stage))
    ledger.write_step(StepRecord(ledger.run, 1, "rl", (), {}, {}, 0.0))
    ledger.commit_step(1, Version("rl", 1), "digest")
    assert newest_step(run, stage) == 1 and newest_step(run, stage, "fp8") is None and not is_trained(run, stage)
    target, away = Target("version", "rl@1", Version("rl", 1), "bf16"), run.config.engine_specs[1]
    assert _form_of(run, target, away) == "bf16", "a service has what there is"
    model = Decoder(run.config.model)
    model.initialise(0)
    Publisher(WeightStore(Objects.open(run.home_store)), "rl", "fp8").publish(1, to_host(model.state_dict(), "fp8"))
    assert is_trained(run, stage) and _form_of(run, target, away) == "fp8"


OWN = """
    from rollmill import Config, RolloutSettings, Stage, StageContext

    class DpoConfig(Config):
        beta: float = 0.1

    class Dpo:
        def __init__(self, config: DpoConfig) -> None:
            self.beta = config.beta
        def objective(self, context: StageContext):
            return (context.name, self.beta)

    class Played(Dpo):
        class Settings(RolloutSettings, DpoConfig): ...
        def __init__(self, config: Settings) -> None: ...

    class Nothing: ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_stages.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "run.toml").write_text(
        DEMO.read_text() + '[[stages]]\nkind = "own_stages:Dpo"\nsteps = 2\nbeta = 0.2\n'
    )
    yield tmp_path / "run.toml"
    sys.modules.pop("own_stages", None)


def test_a_stage_of_ones_own(own: Path, tmp_path: Path) -> None:
    config = load_config(RunConfig, own)
    stage = config.stages[-1]
    assert (stage.name, stage.steps, build(stage).beta) == ("dpo", 2, 0.2)
    run = RunDirectory.create(tmp_path / "runs", config)
    assert RunDirectory.open(run.path).config == config and "stages.dpo" in run.code()
    assert [each.label for each in evaluations(config)] == ["before", "after"]  # it plays nothing
    played = load_config(RunConfig, own, ["stages.dpo.kind=own_stages:Played"])
    assert evaluations(played)[-1].stage.name == "played"
    with pytest.raises(ConfigError, match=r"Nothing is no Stage: it has no `objective`"):
        load_config(RunConfig, own, ["stages.dpo.kind=own_stages:Nothing"])
    with pytest.raises(ConfigError, match=r"unknown key 'bta'; did you mean 'beta'"):
        load_config(RunConfig, own, ["stages.dpo.bta=1.0"])
    chat_tokenizer(SPECIAL_TOKENS).save(run.tokenizer)
    weights = WeightStore(Objects.open(run.home_store))
    training = stage.training.model_copy(update={"tokens_per_microbatch": 64})
    with pytest.raises(TrainingError, match=r"the objective of stage 'dpo', tuple, is no Objective"):
        trainer._objective(run, stage, weights, training, SINGLE)  # before the first step


def test_paths_in_sources_begin_at_the_file(tmp_path: Path) -> None:
    text = DEMO.read_text().replace(
        'kind = "rollmill.demo.demonstrations:Demonstrations"', 'kind = "text"\npath = "notes/*.txt"'
    )
    (tmp_path / "run.toml").write_text(text)
    config = load_config(RunConfig, tmp_path / "run.toml", ["tokenizer=words.json"])
    assert config.stages[0].model_dump()["sources"][0]["path"] == str(tmp_path / "notes/*.txt")
    assert config.tokenizer == str(tmp_path / "words.json")


# --- longer contexts


def test_a_stage_lengthens_the_context_and_the_next_ones_keep_it(four: Path) -> None:
    config = load_config(RunConfig, four, ["stages.rl.max_context=384"])
    assert [config.model_of(stage.name).max_context for stage in config.stages] == [192, 384, 384, 384]
    assert config.model_of("midtrain") == config.model_of("unknown") == config.model
    scaling = config.model_of("rl.2").rope_scaling
    assert isinstance(scaling, YarnRope) and (scaling.factor, scaling.original_context) == (2.0, 192)
    assert scaling.angle_scale == pytest.approx(0.1 * math.log(2) + 1)
    assert config.model_of("polish") == config.model_of("rl") and config.model_of("rl") != config.model


def test_nothing_is_stretched_within_the_context_of_the_checkpoint(tmp_path: Path) -> None:
    described = describe_model(ModelConfig(vocab_size=300, max_context=512))
    (tmp_path / "config.json").write_text(json.dumps(described))
    settings = ["name=small", RL, TASKS, f"checkpoint={tmp_path}", "model.max_context=128"]
    config = load_config(RunConfig, None, [*settings, "stages.rl.max_context=512"])
    assert config.model_of("rl") == config.model.model_copy(update={"max_context": 512})
    longer = load_config(RunConfig, None, [*settings, "stages.rl.max_context=1024"]).model_of("rl")
    assert longer.rope_scaling is not None and longer.rope_scaling.factor == 2.0


def test_a_scaling_that_is_there_is_stretched_further() -> None:
    llama = Llama3Rope(type="llama3", factor=8.0, original_context=8192)
    model = ModelConfig(vocab_size=300, max_context=65536, rope_scaling=llama)
    longer = with_context(model, 131072, made_for=65536)
    assert longer.rope_scaling == llama.model_copy(update={"factor": 16.0})
    yarn = with_context(with_context(ModelConfig(vocab_size=300, max_context=512), 1024, 512), 2048, 1024)
    assert yarn == with_context(ModelConfig(vocab_size=300, max_context=512), 2048, 512)
    scaled = YarnRope(type="yarn", factor=2, original_context=9, score_scale=2)
    deepseek = model.model_copy(update={"rope_scaling": scaled})
    with pytest.raises(ValueError, match="cannot be lengthened"):
        with_context(deepseek, 131072, made_for=65536)


@pytest.mark.parametrize("newer", [False, True], ids=["rope_scaling", "rope_parameters"])
def test_a_longer_line_leaves_with_a_config_of_its_own(run: RunDirectory, newer: bool) -> None:
    weights = WeightStore(Objects.open(run.home_store))
    described = describe_model(run.config.model)
    if newer:
        described["rope_parameters"] = {"rope_type": "default", "rope_theta": described.pop("rope_theta")}
    keep_companions(weights.objects, "midtrain", {"config.json": json.dumps(described).encode()})
    Line(run.home_store, run.config.model, "midtrain").publish()
    parent = Version("midtrain", 0)
    describe_longer(weights, parent, "rl", run.config.model)
    assert kept_companions(weights.objects, "rl") == {}  # nothing has changed
    longer = with_context(run.config.model, 384, 192)
    for _ in range(2):  # an interrupted start is repeated
        describe_longer(weights, parent, "rl", longer)
    kept = json.loads(kept_companions(weights.objects, "rl")["config.json"])
    found = config_from_huggingface(kept)
    assert (found.max_context, found.rope_scaling, found.rope_theta) == (384, longer.rope_scaling, 500.0)
