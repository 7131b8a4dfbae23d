"""The losses by name: their configuration, and a run of each through the real loop."""

import copy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.config import load_config, validate_config
from rollmill.errors import ConfigError, WeightsError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_, to_host
from rollmill.training.batching import TokenRule, pack
from rollmill.training.config import DIALS, LossName, RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.rl_objective import RolloutBatch
from rollmill.training.rl.selection import trainable_sequences
from rollmill.trajectories.staleness import Pace
from rollmill.types import Segment
from rollmill.weights.writing.publisher import Publisher
from tests.training.world import MODEL, World, honest_segment, make_segment, policy, record_as

LOSSES = get_args(LossName)
MAIN = Lineage("main", {"main": 0})


# configuration


def test_every_loss_has_defaults_for_its_settings():
    assert set(LOSSES) == DIALS.keys()
    for loss in LOSSES:
        config = RLConfig(loss=loss)
        filled = config.model_dump()
        assert {name: filled[name] for name in DIALS[loss]} == DIALS[loss]
        assert RLConfig.model_validate_json(config.model_dump_json()) == config, "a run's file is read back"


def test_the_default_loss_has_not_changed():
    config = RLConfig()
    assert (config.loss, config.mask_delta, config.ratio_penalty, config.weight_cap) == ("dppo", 0.2, 1e-3, 20.0)
    assert (config.aggregation, config.expected_tokens, config.kl_factor) == ("constant", None, 0.0)
    assert (config.router_replay, config.replay_plausibility) == (True, 0.0)


def test_settings_are_read_from_toml(tmp_path: Path):
    file = tmp_path / "rl.toml"
    file.write_text('loss = "icepop"\nweight_cap = 3.0\nveto_ratio = 1e-4\n')
    config = load_config(RLConfig, file)
    assert (config.weight_floor, config.weight_cap, config.veto_ratio) == (0.5, 3.0, 1e-4)
    assert load_config(RLConfig, file, ["loss=tis"]).weight_cap == 3.0


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"loss": "ppo", "mask_delta": 0.1},
            "'ppo' has no mask_delta; its own settings are clip_high, clip_low, dual_clip",
        ),
        (
            {"clip_low": 0.1, "weight_floor": 0.5},
            "'dppo' has no clip_low, weight_floor; its own settings are mask_delta",
        ),
        ({"loss": "icepop", "weight_level": "sequence"}, "'icepop' has no weight_level"),
        ({"loss": "mis", "clip_low": 0.1}, "a clip would do nothing"),
        ({"loss": "decoupled_ppo"}, "is policy_gradient: use that"),
        ({"loss": "reinforce"}, "'policy_gradient', 'dppo'"),
        ({"loss": ["ppo"]}, "'policy_gradient', 'dppo'"),
        ({"kl_factor": 0.1}, "kl_factor needs a reference"),
        ({"kl_factor": 0.1, "reference": "main"}, "reference"),
        ({"reference": "main@0"}, "does nothing with kl_factor = 0"),
        ({"replay_plausibility": 0.5, "router_replay": False}, "router_replay is off"),
        ({"replay_plausibility": 1.5}, "less than or equal to 1"),
        ({"weight_cpa": 2.0}, "did you mean 'weight_cap'"),
    ],
)
def test_invalid_combinations_are_refused(tree: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate_config(RLConfig, tree, "run.toml")


# training


def backward(
    world: World,
    config: RLConfig,
    segments: list[Segment],
    groups: list[int] | None = None,
    budget: int = 20,
    form: str | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """Gradients and figures of one step on these trajectories. Every second one is the better of its pair."""
    rule = TokenRule(MAIN, base=2, max_staleness=9)
    sequences = [
        sequence
        for index, segment in enumerate(segments)
        for sequence in trainable_sequences([segment], 0.5 - index % 2, rule, config, trajectory=index)[0]
    ]
    model = Decoder(MODEL, form=form or "bf16")
    model.initialise(0)
    if form is not None:
        round_to_form_(model.parameters(), "bf16")
        round_to_form_(model.named_parameters(), form)
    nothing: Any = None
    groups_T = np.array(groups or [0] * len(segments))
    batch = RolloutBatch(
        nothing, pack(sequences, budget), nothing, nothing, nothing, lr=0.0, wait_seconds=0, groups_T=groups_T
    )
    return model, world.objective(config).backward(model, batch)


def gradient(model: Decoder) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def segments(count: int) -> list[Segment]:
    return [make_segment([0] * (index + 2) + [1] * 4, seed=index) for index in range(count)]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_through_the_loop(tmp_path: Path, loss: Any):
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    world.add_steps(2)
    world.trainer(config=RLConfig(loss=loss, veto_ratio=1e-3, entropy_factor=1e-3)).run(2)
    digests = [digest for _, digest in world.chain()]
    assert len(set(digests)) == 3, "every step changed the weights"
    for event in (event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "step"):
        assert event["applied"] and 0 <= event["mask_fraction"] <= 1 and 0 <= event["clip_fraction"] <= 1
        assert event["veto_share"] < 1 and event["expert_load_max"] >= 1
        assert len(event["router_flip_rate_by_layer"]) == len(event["expert_load_by_layer"]) == MODEL.moe_layers


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
def test_a_mean_is_over_the_step_for_any_micro_batches(tmp_path: Path, aggregation: Any):
    world, config = World(tmp_path), RLConfig(aggregation=aggregation)
    members = [make_segment([0] + [1] * length, seed=length) for length in (2, 5, 9, 4)]  # targets from the start
    whole, figures = backward(world, config, members, budget=1000)
    parts, figures_of_parts = backward(world, config, members, budget=8)
    assert figures["loss"] == pytest.approx(figures_of_parts["loss"])
    torch.testing.assert_close(gradient(parts), gradient(whole), rtol=1e-3, atol=1e-6)


def test_with_one_update_per_step_tis_is_the_policy_gradient(tmp_path: Path):
    world = World(tmp_path)
    plain, _ = backward(world, RLConfig(loss="policy_gradient"), segments(4))
    truncated, _ = backward(world, RLConfig(loss="tis", weight_cap=20.0), segments(4))
    masked, figures = backward(world, RLConfig(loss="icepop"), segments(4))
    torch.testing.assert_close(gradient(truncated), gradient(plain), rtol=1e-4, atol=1e-7)
    assert figures["mask_fraction"] > 0 and not torch.allclose(gradient(masked), gradient(plain), rtol=1e-2)


def test_staleness_is_split_by_trajectory(tmp_path: Path):
    """Trained from version 2: the first was sampled across versions 0 and 1, the second by 0 alone."""
    policies = [policy(0), policy(1)]
    crossed = make_segment([0, 0, 1, 1, 1, 1], seed=1, policies=policies, policy_of=[0, 0, 0, 0, 1, 1])
    whole = make_segment([0, 0, 1, 1, 1, 1], seed=2, policies=policies)
    _, figures = backward(World(tmp_path), RLConfig(), [crossed, whole])
    # staleness 2 2 1 1 | 2 2 2 2, of which 1 1 1 1 | 2 2 2 2 passed after the last token
    assert (figures["staleness_mean"], figures["staleness_queue"], figures["staleness_flight"]) == (1.75, 1.5, 0.25)


# KL to a reference


def published(path: Path) -> World:
    """A world whose line has versions 0, 1 and 2."""
    world = World(path)
    world.add_steps(2)
    world.trainer().run(2)
    return world


def kl(form: str, factor: float = 0.5, reference: str = "main@2") -> RLConfig:
    return RLConfig(kl_factor=factor, kl_form=form, reference=reference, ratio_penalty=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_a_reference_that_was_imported_is_measured_in_the_form_of_the_run(tmp_path: Path, form: str):
    """A checkpoint is stored only as bf16. Here the policy was made from it, so the two are equal."""
    world, model = World(tmp_path), Decoder(MODEL)
    model.initialise(0)
    Publisher(world.weights, "base").publish(0, to_host(model.state_dict()))
    config = kl("k2", reference="base@0").model_copy(update={"router_replay": False})
    _, own = backward(world, config, segments(4), form=form)
    assert 0 <= own["reference_k3"] < 1e-9


def test_the_distance_to_the_reference_is_reported(tmp_path: Path):
    world = published(tmp_path)
    _, own = backward(world, kl("k2", reference="main@0"), segments(4))
    _, far = backward(world, kl("k2"), segments(4))
    _, without = backward(world, RLConfig(), segments(4))
    assert far["reference_k3"] > 1e-3 and far["reference_k3"] > own["reference_k3"] and "reference_k3" not in without


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_kl_in_the_loss_pulls_towards_the_reference(tmp_path: Path, form: str):
    """The KL term's gradient points away from the reference's weights, so a step against it comes closer."""
    world = published(tmp_path)
    model, by = world.version(0)
    members = [honest_segment(model, seed, by=by) for seed in range(4)]
    with_kl, _ = backward(world, kl(form), members)
    without, _ = backward(world, RLConfig(ratio_penalty=0.0), members)
    direction = gradient(with_kl) - gradient(without)
    target, _ = world.version(2)
    towards = torch.cat([p.detach().flatten() for _, p in sorted(target.named_parameters())]) - torch.cat(
        [p.detach().flatten() for _, p in sorted(with_kl.named_parameters())]
    )
    assert torch.dot(direction, towards) < 0


def test_k1_in_the_reward_moves_advantages_by_hand(tmp_path: Path):
    """Compared with the same step with advantages computed here: A − factor · (KL of the trajectory − group mean)."""
    world = published(tmp_path)
    members = segments(4)
    config, groups = kl("k1_reward"), [0, 0, 1, 1]
    found, figures = backward(world, config, members, groups)
    reference, _ = world.version(2)
    kls = []
    for member in members:
        recorded = honest_logprobs(reference, member)
        kls.append(float((member.logprobs - recorded)[member.sampled].sum()))
    means = [(kls[0] + kls[1]) / 2] * 2 + [(kls[2] + kls[3]) / 2] * 2
    rule = TokenRule(MAIN, base=2, max_staleness=9)
    sequences = []
    for index, member in enumerate(members):
        advantage = 0.5 - index % 2 - 0.5 * (kls[index] - means[index])
        sequences += trainable_sequences([member], advantage, rule, config, trajectory=index)[0]
    model = Decoder(MODEL)
    model.initialise(0)
    nothing: Any = None
    batch = RolloutBatch(nothing, pack(sequences, 20), nothing, nothing, nothing, lr=0.0, wait_seconds=0)
    expected = world.objective(RLConfig(ratio_penalty=0.0)).backward(model, batch)
    torch.testing.assert_close(gradient(found), gradient(model), rtol=1e-3, atol=1e-6)
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def honest_logprobs(model: Decoder, segment: Segment) -> np.ndarray:
    """The log-probs that this model gives, with its own choice of experts."""
    return record_as(copy.deepcopy(segment), model, 1, len(segment.tokens)).logprobs


def test_a_run_with_kl_reports_its_distance(tmp_path: Path):
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    config, pace = kl("k1_reward", reference="main@0"), Pace(1, 2, 9)
    trainer = world.trainer(pace=pace, config=config)
    trainer.run(0)
    model, by = world.version(0)
    for step in (1, 2):
        world.add_group(f"g{step}", [honest_segment(model, 10 * step + i, by=by) for i in range(2)], [1.0, 0.0])
    trainer.run(2)
    events = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "step"]
    assert events[0]["reference_max"] < 1e-5 < 1e-3 < events[1]["reference_max"], "version 0 is its own reference"


def test_a_reference_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(WeightsError, match="main@7"):
        backward(World(tmp_path), kl("k2", reference="main@7"), segments(2))
