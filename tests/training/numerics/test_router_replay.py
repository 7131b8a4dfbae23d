"""The figures of the routers, and the detection of misaligned routes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing
from rollmill.training.config import RLConfig
from rollmill.training.diagnostics import mismatch_figures, warnings
from rollmill.training.numerics.router_replay import RouterMeasures
from rollmill.training.packed_pass import target_logprobs
from rollmill.trajectories.staleness import Pace
from rollmill.types import PolicyRef, Segment
from tests.training.world import World, make_segment, record_as


def routing(live: list[list[int]], chosen: list[list[int]], experts: int = 4) -> Routing:
    return Routing(torch.ones(len(live), experts), torch.tensor(live), torch.tensor(chosen))


def test_figures_computed_by_hand():
    measures = RouterMeasures()
    # three tokens, two layers, the last token without a record
    recorded = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 2]], [[0, 0], [0, 0]]])
    first = routing([[1, 0], [2, 3], [0, 1]], [[0, 1], [2, 1], [0, 1]])  # same set; nothing in common, one replaced
    second = routing([[2, 3], [0, 1], [0, 1]], [[2, 3], [0, 2], [0, 1]])  # same; one in common
    measures.add([first, second], Replay(recorded, torch.tensor([True, True, False])))
    figures = measures.figures()
    assert figures["router_flip_rate_by_layer"] == [0.5, 0.5] and figures["router_zero_overlap_by_layer"] == [0.5, 0.0]
    assert (figures["router_flip_rate"], figures["router_zero_overlap"]) == (0.5, 0.25)
    assert figures["router_replaced"] == 1 / 8, "one of eight recorded choices"
    assert figures["router_live_rows"] == pytest.approx(1 / 3)
    # chosen in layer 0: 0 1 2 1 0 1 → loads 2 3 1 0; in layer 1: 2 3 0 2 0 1 → 2 1 2 1
    assert figures["expert_load_by_layer"] == [3 / 1.5, 2 / 1.5] and figures["expert_load_max"] == 2.0
    assert figures["experts_dead"] is None, "six choices are too few to call an expert dead"


def test_a_dead_expert_needs_many_choices():
    measures = RouterMeasures()
    for _ in range(2):
        measures.add([routing([[0, 1], [0, 2]] * 20, [[0, 1], [0, 2]] * 20)], None)
    figures = measures.figures()
    assert figures["experts_dead"] == 0.25 and figures["router_flip_rate"] is None
    assert figures["router_live_rows"] == 1.0 and figures["expert_load_max"] == 2.0


def test_a_dense_model_has_no_figures():
    measures = RouterMeasures()
    measures.add([], None)
    assert all(value in (None, []) for value in measures.figures().values())


MODEL = ModelConfig(
    vocab_size=24,
    layers=3,
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    experts=8,
    experts_per_token=2,
    expert_width=8,
    max_context=64,
)
LENGTHS = [40] * 6


def figures_with_routes_moved(tokens: int, layers: int) -> dict[str, Any]:
    """A model against itself: routes recorded live, then replayed with the record moved by `tokens` or `layers`."""
    model = Decoder(MODEL)
    model.initialise(0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(MODEL.vocab_size, (sum(LENGTHS),), generator=generator)
    packed = inputs, packed_positions(LENGTHS), PackedAttention(LENGTHS)
    with torch.no_grad():
        engine = model(*packed)
        targets = torch.multinomial(model.logits(engine.hidden).softmax(-1), 1, generator=generator)[:, 0]
        assert engine.routes is not None
        moved = engine.routes.unflatten(0, (len(LENGTHS), -1)).roll((tokens, layers), (1, 2)).flatten(0, 1)
        replay = Replay(moved, torch.ones(len(inputs), dtype=torch.bool))
        trainer = model(*packed, replay)
        ours, theirs = (target_logprobs(model.logits(each.hidden), targets)[0] for each in (trainer, engine))
    measures = RouterMeasures()
    measures.add(trainer.routings, replay)
    return {**measures.figures(), **mismatch_figures((ours - theirs).numpy(), {})}


def test_aligned_routes_are_healthy():
    figures = figures_with_routes_moved(0, 0)
    assert figures["mismatch_k3"] == 0 and figures["router_zero_overlap"] == 0 and "router_fit" not in figures
    assert warnings(figures) == []


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ((1, 0), "off by one token: they are one token late"),
        ((-1, 0), "off by one token: they are one token early"),
        ((0, 1), "off by one layer: they are one layer late"),
        ((0, -1), "off by one layer: they are one layer early"),
    ],
)
def test_misaligned_routes_are_recognised_and_named(moved: tuple[int, int], words: str):
    """k3 is healthy up to 1e-3. Moved routes give 300 times that, and a third of the tokens share no expert."""
    figures = figures_with_routes_moved(*moved)
    assert figures["mismatch_k3"] > 0.2 and figures["router_zero_overlap"] > 0.3
    mismatch, alignment = warnings(figures)
    assert mismatch.startswith("mismatch_k3 is 0.") and "most likely because of the expert routes" in mismatch
    assert alignment.startswith("router_zero_overlap is 0.") and words in alignment


def test_random_routes_are_not_called_misaligned():
    measures = RouterMeasures()
    draw = torch.Generator().manual_seed(0)
    live, recorded = (torch.rand(200, 3, 8, generator=draw).topk(2).indices for _ in range(2))
    routings = [Routing(torch.ones(200, 8), live[:, layer], recorded[:, layer]) for layer in range(3)]
    measures.add(routings, Replay(recorded, torch.ones(200, dtype=torch.bool)))
    (text,) = warnings(measures.figures())
    assert "do not fit the tokens" in text and "moved by one token or layer they fit no better" in text


def two_turns(model: Decoder, seed: int, by: PolicyRef) -> Segment:
    """A prompt, an answer, a tool's result, an answer, as an engine with these weights would have recorded them."""
    segment = make_segment([0] * 4 + [1] * 8 + [0] * 3 + [1] * 8, seed=seed, policies=[by])
    return record_as(record_as(segment, model, 4, 12), model, 15, 23)


def step_event(path: Path, config: RLConfig, shift: int, start: int = 0) -> tuple[dict[str, Any], list[str]]:
    """One step on recorded trajectories whose routes from `start` on are moved by `shift` tokens. Returns the event and
    the warnings."""
    telemetry.open_events(path / "events", "trainer")
    world = World(path)
    trainer = world.trainer(pace=Pace(1, 8, 0), config=config)
    trainer.run(0)
    model, current = world.version(0)
    members = [two_turns(model, seed, current) for seed in range(8)]
    for segment in members:
        assert segment.routes is not None
        segment.routes[start:-1] = np.roll(segment.routes[start:-1], shift, 0)
    world.add_group("a", members, [1.0, 0.0] * 4)
    trainer.run(1)
    events = list(telemetry.read_events(path / "events"))
    (step,) = [event for event in events if event["kind"] == "step"]
    return step, [event["text"] for event in events if event["kind"] == "warning"]


def test_a_run_with_misaligned_routes_warns(tmp_path: Path):
    healthy, silent = step_event(tmp_path / "healthy", RLConfig(), 0)
    moved, texts = step_event(tmp_path / "moved", RLConfig(), 1)
    assert healthy["router_flip_rate"] == 0
    assert healthy["router_zero_overlap_by_layer"] == [0, 0] and not any("router" in text for text in silent)
    assert moved["mismatch_k3"] > 1e3 * healthy["mismatch_k3"] and min(moved["router_zero_overlap_by_layer"]) > 0.01
    assert any("off by one token" in text for text in texts)


def test_a_second_turn_appended_one_row_off_is_found(tmp_path: Path):
    """The first turn is aligned, so most choices agree. The others still show by how much they are off."""
    moved, texts = step_event(tmp_path, RLConfig(), 1, start=12)
    assert 0.01 < moved["router_zero_overlap"] < 0.2
    assert any("off by one token: they are one token late" in text for text in texts)


def test_the_filter_reports_what_it_replaced(tmp_path: Path):
    """Correct routes are all kept. Some misaligned ones are replaced, and the record still counts as misaligned."""
    config = RLConfig(replay_plausibility=0.9)
    honest, _ = step_event(tmp_path / "honest", config, 0)
    moved, texts = step_event(tmp_path / "moved", config, 1)
    plain, _ = step_event(tmp_path / "plain", RLConfig(), 1)
    assert honest["router_replaced"] == 0.0 and plain["router_replaced"] == 0.0
    assert moved["router_replaced"] > 0.1 and any(text.startswith("router_replaced") for text in texts)
    assert moved["router_zero_overlap"] > 0.01
    assert moved["drift_k3"] < plain["drift_k3"], "the filter protects the trained log-probs"
