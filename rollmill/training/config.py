"""How a training run optimises. No torch here, so that a run's configuration is read without loading it.

Facts that others need too (seed, steps, groups per step, group size, staleness bound) stand once, at the root of the
run's configuration, and arrive here as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.config import Config

FORM = "bf16"  # what versions are published as unless told; the trainer computes with the values of its form


class OptimizerConfig(Config):
    """AdamW or Muon on fp32 masters: linear warm-up to `lr`, then decay to `final_fraction · lr` at the last step."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw", description="muon orthogonalises the updates of layers' matrices; all else stays with AdamW"
    )
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of muon's matrices; AdamW has its betas")
    lr: float = Field(default=5e-4, ge=0)
    warmup_steps: int = Field(default=3, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "linear"
    final_fraction: float = Field(default=0.2, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices only, never on norms")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients longer than this are scaled down to it")


class TrainingConfig(Config):
    """The step loop, the same for every objective."""

    threads: int = Field(default=1, ge=1, description="part of what makes a re-run give the same bits")
    tokens_per_microbatch: int = Field(
        default=0,
        ge=0,
        description="at most this many tokens in one forward pass. 0: 8192 on a CPU, on a GPU what half of it holds, "
        "up to 32768",
    )
    recompute_every: int = Field(
        default=0,
        ge=0,
        description="activation checkpointing, memory for time: of every k-th layer only the input is kept, and the "
        "layer runs again in the backward pass. 0 keeps everything; 1 keeps least and takes a third longer, on CUDA "
        "up to twice as long where the model is small",
    )
    recompute_mlp: bool = Field(
        True,
        description="on CUDA, dense layers keep nothing of their MLP and make it again by two products: half the "
        "memory for 6 % more time on an H200, which is cheaper than recompute_every",
    )
    deterministic: bool = Field(
        True,
        description="a re-run gives the same bits, so a restart meets its own versions; without it one may have to go "
        "on in a new line. Free on CUDA where heads are 64 wide; where attention is not our own (widths besides 32, 64 "
        "and 128, latent attention) steps take up to 1.4 times as long",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        description="processes that train together, one a GPU: weights, optimizer and tokens are divided among them",
    )
    expert_parallel: int = Field(
        default=1, ge=1, description="ranks among which the experts of a layer are divided; tokens travel to them"
    )
    context_parallel: int = Field(
        default=1, ge=1, description="ranks among which each sequence is divided, where one is too long for a GPU"
    )
    checkpoint_every: int = Field(default=10, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    snapshot_every: int = Field(
        default=25, ge=1, description="a version in this many is published whole, the others as deltas"
    )
    delta_goal: Literal["fast", "small", "overwrite"] = Field(
        default="fast", description="what deltas should be: quick to make, small for a thin link, or without a base"
    )
    max_bad_steps: int = Field(
        default=3, ge=1, description="stop after this many steps in a row with gradients not finite"
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        for name in ("expert_parallel", "context_parallel"):
            if self.ranks % getattr(self, name):
                raise ValueError(f"{name} ({getattr(self, name)}) must divide ranks ({self.ranks})")
        return self

    @property
    def tokens_per_pass(self) -> int:
        """Of all ranks together, once fitted (see training.fitting)."""
        assert self.tokens_per_microbatch > 0
        return self.ranks * self.tokens_per_microbatch

    def check_model(self, experts: int) -> None:
        """ValueError if a model with so many experts a layer cannot be divided so."""
        if self.expert_parallel > 1 and (not experts or experts % self.expert_parallel):
            raise ValueError(f"expert_parallel ({self.expert_parallel}) must divide the model's {experts} experts")


ObjectiveName = Literal[
    "policy_gradient", "dppo", "ppo", "cispo", "gspo", "decoupled_ppo", "tis", "mis", "icepop"
]  # fmt: skip

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
# The dials an objective has beside the ones all have, at their usual values; training/loss.py says what each does.
DIALS: Mapping[str, Mapping[str, float | str]] = {
    "policy_gradient": {"weight_cap": 20.0},
    "dppo": {"mask_delta": 0.2, "weight_cap": 20.0, "ratio_penalty": 1e-3},
    "ppo": _CLIP,
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},  # bounded above only
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},  # a mean over a sequence moves far less than a token
    "decoupled_ppo": {**_CLIP, "weight_cap": 20.0},
    "tis": {**_CLIP, "weight_cap": 2.0, "weight_level": "token"},
    "mis": {**_CLIP, "weight_cap": 2.0, "weight_level": "token"},
    "icepop": {**_CLIP, "weight_floor": 0.5, "weight_cap": 5.0},
}
_OWN_DIALS = frozenset({"mask_delta", "weight_cap", "weight_floor", "weight_level", "clip_low", "clip_high"})


class RLConfig(Config):
    """loss = Σ over trained tokens of  −mask · advantage · weight + penalty · (log weight)²,  ÷ a constant.

    weight = π(token) / μ(token), π the policy being trained, μ what the engine sampled from. The constant is
    groups_per_step · group_size · expected_tokens: it never depends on the batch, so that a long answer is neither
    cheaper nor dearer a token than a short one.

    `objective` chooses another composition by its known name; its dials are filled in, and a dial it does not have is
    refused. The default, dppo, is the policy gradient with a group baseline, masked by movement in probability.
    """

    objective: ObjectiveName = "dppo"
    mask_delta: float | None = Field(None, gt=0, le=1, description="a token that moved further (π − μ) is left alone")
    ratio_penalty: float = Field(default=0.0, ge=0, description="factor of (log weight)²")
    weight_cap: float | None = Field(None, ge=1, description="weights count as at most this; mis and icepop mask above")
    weight_floor: float | None = Field(None, gt=0, le=1, description="icepop masks tokens of a smaller weight")
    weight_level: Literal["token", "sequence"] | None = Field(
        None, description="sequence: the weight is the product over the sequence; only for short ones"
    )
    clip_low: float | None = Field(None, gt=0, le=1, description="ratios are clipped below 1 − this")
    clip_high: float | None = Field(None, gt=0, description="ratios are clipped above 1 + this")
    veto_ratio: float | None = Field(
        None, gt=0, lt=1, description="a sequence with a token of a smaller weight is dropped; 1e-4 is usual"
    )
    veto_drift: float | None = Field(
        None, gt=0, description="a sequence of negative advantage is dropped if mean(log μ − log π) exceeds this (OPSM)"
    )
    kl_factor: float = Field(default=0.0, ge=0, description="how strongly the policy is held to `reference`")
    kl_form: Literal["k1_reward", "k2", "k3"] = Field(
        "k1_reward", description="k1 taken off the reward, or k2 or importance-weighted k3 added to the loss"
    )
    reference: str | None = Field(
        None, pattern=r"^[^@]+@\d+$", description="the published version KL is measured to, as line@number"
    )
    entropy_factor: float = Field(default=0.0, ge=0, description="how strongly entropy is rewarded")
    aggregation: Literal["constant", "token_mean", "sequence_mean"] = Field(
        "constant", description="what the sum over tokens is divided by; the means make a token's worth vary by batch"
    )
    expected_tokens: float = Field(
        default=16.0, gt=0, description="sampled tokens a trajectory, roughly; only scales the loss"
    )
    router_replay: bool = Field(True, description="train through the experts the engine chose, where it recorded them")
    replay_plausibility: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="a recorded expert scoring below this times the weakest live choice is replaced; 0 replays all",
    )
    solved_at: float = Field(default=1.0, description="a trajectory with at least this reward counts as solved")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_dials(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        usual = DIALS.get(str(values.get("objective", cls.model_fields["objective"].default)), {})
        return {**usual, **{name: value for name, value in values.items() if value is not None}}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        dials = DIALS[self.objective]
        strange = sorted(name for name in _OWN_DIALS - dials.keys() if getattr(self, name) is not None)
        if strange:
            own = ", ".join(sorted(_OWN_DIALS & dials.keys()))
            raise ValueError(f"objective {self.objective!r} has no {', '.join(strange)}; its own dials are {own}")
        if self.kl_factor > 0 and self.reference is None:
            raise ValueError("kl_factor needs a reference: the version to stay close to, for example 'main@0'")
        if self.kl_factor == 0 and self.reference is not None:
            raise ValueError("a reference does nothing with kl_factor = 0")
        if self.replay_plausibility > 0 and not self.router_replay:
            raise ValueError("replay_plausibility filters replayed routes, and router_replay is off")
        return self


class MidtrainConfig(Config):
    documents_per_step: int = Field(default=32, ge=1)
    publish_every: int = Field(
        default=100, ge=1, description="steps between published versions; the last step always is one"
    )
    balance: float = Field(default=0.01, ge=0, description="factor of the loss that spreads tokens over experts")
