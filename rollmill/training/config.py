"""How a training run optimises. No torch here, so that a run's configuration is read without loading it.

Facts that others need too (seed, steps, groups per step, group size, staleness bound) stand once, at the root of the
run's configuration, and arrive here as arguments.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config import Config

FORM = "bf16"  # what versions are published as; the trainer computes with the values of this form


class OptimizerConfig(Config):
    """AdamW on fp32 masters: linear warm-up to `lr`, then decay to `final_fraction · lr` at the last step."""

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
    tokens_per_microbatch: int = Field(default=8192, ge=1, description="at most this many tokens in one forward pass")
    checkpoint_every: int = Field(default=10, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    snapshot_every: int = Field(
        default=25, ge=1, description="a version in this many is published whole, the others as deltas"
    )
    max_bad_steps: int = Field(
        default=3, ge=1, description="stop after this many steps in a row with gradients not finite"
    )
    optimizer: OptimizerConfig = OptimizerConfig()


class RLConfig(Config):
    """loss = Σ over trained tokens of  −mask · advantage · weight + penalty · (log weight)²,  ÷ a constant.

    weight = π(token) / μ(token), π the policy being trained, μ what the engine sampled from. The constant is
    groups_per_step · group_size · expected_tokens: it never depends on the batch, so that a long answer is neither
    cheaper nor dearer a token than a short one.
    """

    mask_delta: float = Field(0.2, gt=0, le=1, description="a token that moved further (π − μ) is left alone")
    ratio_penalty: float = Field(default=1e-3, ge=0, description="factor of (log weight)²")
    weight_cap: float = Field(default=20.0, ge=1, description="weights count as at most this in the gradient")
    expected_tokens: float = Field(
        default=16.0, gt=0, description="sampled tokens a trajectory, roughly; only scales the loss"
    )
    router_replay: bool = Field(True, description="train through the experts the engine chose, where it recorded them")
    solved_at: float = Field(default=1.0, description="a trajectory with at least this reward counts as solved")


class MidtrainConfig(Config):
    documents_per_step: int = Field(default=32, ge=1)
    publish_every: int = Field(
        default=100, ge=1, description="steps between published versions; the last step always is one"
    )
    balance: float = Field(default=0.01, ge=0, description="factor of the loss that spreads tokens over experts")
