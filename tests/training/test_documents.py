"""Stages that train on documents from files: ranks, resuming in the middle of an epoch, held-out loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill import telemetry
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.config import validate_config
from rollmill.errors import ConfigError
from rollmill.kinds import build
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.config import OptimizerConfig, TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.parallel.many_ranks import over_ranks
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.world import World
from rollmill.training.parallelism import Parallelism
from rollmill.training.pretraining.document_objective import DocumentBatch, MidtrainObjective
from rollmill.training.single import SINGLE
from rollmill.training.stage import StageContext, StageSection
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.weights.reading.weight_store import WeightStore
from tests.training.parallel.cases import CPU
from tests.training.parallel.ranks import run_ranks
from tests.training.world import MODEL

STEPS, PER_STEP = 9, 5  # 45 documents: more than two epochs of the text
CONTEXT = 32
SHAPE = MODEL.model_dump() | {"vocab_size": 300, "max_context": CONTEXT}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    Tokenizer(train_tokenizer(["def f(a):\n"], 300, SPECIAL_TOKENS)).save(folder / "tokenizer.json")
    for number in range(14):
        (folder / f"{number}.py").write_text(f"def f{number}(a):\n    return {number}\n" * (1 + 3 * (number % 3 == 0)))
    answers = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in answers))
    return folder


def make_stage(corpus: Path, kind: str = "midtrain", **settings: Any) -> Any:
    sources = [
        {"kind": "text", "path": str(corpus / "*.py"), "weight": 2, "heldout": 0.2, "name": "code", "overlap": 4},
        {"kind": "conversations", "path": str(corpus / "chats.jsonl")},
    ]
    table = {"kind": kind, "steps": STEPS, "documents_per_step": PER_STEP, "sources": sources, **settings}
    return build(StageSection._read(table))


def make_context(path: Path, corpus: Path, parallel: Parallelism = SINGLE, longest: int = CONTEXT) -> StageContext:
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    objects = Objects.open(path / "store")
    path.mkdir(exist_ok=True)
    database = open_database(f"sqlite:///{path / 'mill.db'}")
    return StageContext(
        name="midtrain",
        steps=STEPS,
        seed=3,
        model=validate_config(ModelConfig, {**SHAPE, "max_context": longest}, "test"),
        tokenizer=tokenizer,
        format=format_of(tokenizer),
        tokens_per_microbatch=64,
        ranks=parallel.ranks,
        ledger=Ledger(database, "run"),
        trajectories=TrajectoryStore(database, objects),
        weights=WeightStore(objects),
        directory=path / "stage",
    )


def batches(objective: MidtrainObjective, model: Decoder, parallel: Parallelism) -> list[Any]:
    """Tokens and targets of every micro-batch of every step, and the figures."""
    found = []
    for number in range(1, STEPS + 1):
        batch = DocumentBatch(number, 0.0)
        figures = objective.backward(model, batch, parallel=parallel)
        parts = [(part.tokens_N.tolist(), part.rows_M.tolist(), part.targets_M.tolist()) for part in batch.microbatches]
        found.append((parts, figures["documents"], figures["notes"], round(figures["loss"], 3)))
    return found


def on_rank(world: World, path: Path, corpus: Path) -> list[Any]:
    parallel = over_ranks(world, Meshes(world.size, 1, 1, CPU))
    context = make_context(path, corpus, parallel)
    model = parallel.models.make_model(context.model, "bf16", CPU)
    parallel.models.initialise(model, 1)
    read: list[int] = []
    objective = make_stage(corpus).objective(context)
    prepare = objective._reader.document

    def noted(index: int) -> Any:
        read.append(index)
        return prepare(index)

    objective._reader.document = noted
    return [batches(objective, model, parallel), read]


@pytest.mark.slow
def test_order_and_batches_do_not_depend_on_the_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    model = Decoder(validate_config(ModelConfig, SHAPE, "test"))
    model.initialise(1)
    alone = batches(make_stage(corpus).objective(make_context(tmp_path / "alone", corpus)), model, SINGLE)
    ranks = run_ranks(tmp_path / "out", 2, on_rank, tmp_path / "ranks", corpus)
    assert [found for found, _ in ranks] == [alone, alone]
    everything = list(range(STEPS * PER_STEP))
    assert sorted(ranks[0][1] + ranks[1][1]) == everything, "each document is read by one rank"
    assert max(len(read) for _, read in ranks) <= (PER_STEP // 2 + 1) * STEPS


def train(path: Path, corpus: Path, until: int) -> dict[int, str]:
    """Digests of the versions by step."""
    context = make_context(path, corpus)
    stage = make_stage(corpus, publish_every=1, heldout_every=4)
    training = TrainingConfig(checkpoint_every=4, optimizer=OptimizerConfig(lr=0.02, warmup_steps=1))
    objects = context.weights.objects
    objective = stage.objective(context)
    Trainer(training, context.model, objective, context.weights, objects, "main", steps=STEPS, seed=5).run(until)
    return {int(manifest.step or 0): manifest.digest for manifest in context.weights.versions("main")}


def test_a_resume_in_the_middle_of_an_epoch_is_exact(corpus: Path, tmp_path: Path) -> None:
    telemetry.open_events(tmp_path / "events", "trainer")
    straight = train(tmp_path / "straight", corpus, STEPS)
    events = telemetry.read_events(tmp_path / "events")
    assert len(straight) == STEPS + 1
    train(tmp_path / "stopped", corpus, 5)
    assert train(tmp_path / "stopped", corpus, STEPS) == straight
    check_events(events)


def check_events(events: list[dict[str, Any]]) -> None:
    sources = {event["source"]: event for event in events if event["kind"] == "source"}
    code, chats = sources["code"], sources["2 conversations"]
    assert code["documents"] == code["training"] + code["heldout"] and code["heldout"] > 0
    assert chats["documents"] == 20 == chats["training"]
    steps = [event for event in events if event["kind"] == "document_step"]
    drawn = [sum(step["documents"].get(name, 0) for step in steps) for name in sources]
    assert sum(drawn) == STEPS * PER_STEP and drawn[0] > drawn[1] > 0
    assert sum(step["notes"].get("part of a long document", 0) for step in steps) > 0
    losses = [event for event in events if event["kind"] == "heldout_loss"]
    assert [event["step"] for event in losses] == [0, 4, 8, STEPS] and {event["source"] for event in losses} == {"code"}
    assert losses[-1]["loss"] < losses[0]["loss"] < 7 and losses[0]["targets"] > 10


def test_sft_learns_from_answers_only(corpus: Path, tmp_path: Path) -> None:
    source = {"kind": "conversations", "path": str(corpus / "chats.jsonl")}
    context = make_context(tmp_path / "run", corpus)
    objective = make_stage(corpus, "sft", sources=[source]).objective(context)
    model = Decoder(context.model)
    model.initialise(1)
    for parts, *_ in batches(objective, model, SINGLE):
        for _, _, targets in parts:
            answers = context.tokenizer.decode(targets).split("<end>")[:-1]
            assert answers and all(answer.startswith("<text>") and answer.endswith("!") for answer in answers)


def test_an_overlap_longer_than_half_the_context_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'code' has overlap = 4, more than half of the context of 7 tokens"):
        make_stage(corpus).objective(make_context(tmp_path / "run", corpus, longest=7))
