"""How a training run optimises. This module does not import torch: a configuration is read without it.

Facts that other parts need too (seed, steps, groups per step, group size, staleness bound) are at the root of the run's
configuration. Training gets them as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config import Config
from rollmill.models.config import Adapter

FORM = "bf16"  # what versions are published as unless told; the trainer computes with the values of its form


class OptimizerConfig(Config):
    """AdamW or Muon on fp32 masters: linear warm-up to `lr`, then decay to `final_fraction · lr` at the last step."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw",
        description="The optimizer. `muon` orthogonalises the updates of the layers' matrices and leaves all other "
        "parameters to AdamW.",
    )
    momentum: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Momentum of Muon's matrices; AdamW uses `betas`. Larger values average over more steps.",
    )
    lr: float = Field(
        default=5e-4,
        ge=0,
        description="Peak learning rate, reached after the warm-up. Larger learns faster and becomes unstable sooner; "
        "lower it first when rewards or losses jump. Not set, in a run that starts from a checkpoint: by its size, for "
        "RL 1e-5 at 135M parameters and 1e-6 at 7B, for documents 20 times that, at most 5e-4.",
    )
    warmup_steps: int = Field(
        default=3, ge=0, description="Steps over which the learning rate rises linearly from 0 to `lr`."
    )
    decay: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="How the learning rate falls from `lr` to `final_fraction` of it by the last step."
    )
    final_fraction: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description='Learning rate of the last step as a fraction of `lr`. Not used with `decay = "constant"`.',
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        description="AdamW's decay rates of the gradient's mean and of its square. Closer to 1 averages over more "
        "steps: steadier, and slower to follow a change.",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="AdamW's term that keeps the division by the gradient's size finite."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Pull of the weights towards 0, per step and times the learning rate. Applies to matrices only, "
        "never to norms.",
    )
    max_grad_norm: float = Field(
        default=1.0,
        gt=0,
        description="Gradients with a larger norm are scaled down to it. Smaller values bound what one unusual batch "
        "can do.",
    )
    keep_moments: bool = Field(
        False,
        description="A stage or cycle always starts from the FP32 masters of its parent's checkpoint, if that is still "
        "there. With this it also takes over the optimizer's moments: for stages that learn the same thing with the "
        "same optimizer.",
    )


ADAPTER_LR = 10  # an adapter's usual learning rate over that of all weights: it is small and moves them together


def lr_by_size(parameters: int, *, rollouts: bool) -> float:
    """The usual peak learning rate of a pretrained model: a power law through 1e-5 at 135M parameters and 1e-6 at 7B
    for RL. Documents bear 20 times that. With the rate of a small new model, RL ruins a pretrained one in three steps.
    """
    lr = (1.0 if rollouts else 20.0) * 1e-5 * (135e6 / parameters) ** (math.log(10) / math.log(7e9 / 135e6))
    return float(f"{min(5e-4, lr):.2g}")


class TrainingConfig(Config):
    """The step loop, the same for every objective."""

    threads: int = Field(
        default=1,
        ge=1,
        description="CPU threads of the trainer. More are faster on idle cores; another number gives other bits, so "
        "keep it for the life of a run.",
    )
    tokens_per_microbatch: int = Field(
        default=0,
        ge=0,
        description="Most tokens in one forward pass of one rank. Larger is faster and takes more memory. 0 chooses: "
        "8192 on a CPU; on a GPU, what half of its memory holds, up to 32768.",
    )
    recompute_every: int = Field(
        default=0,
        ge=0,
        description="Activation checkpointing: every k-th layer keeps only its input and runs again in the backward "
        "pass. 0 keeps everything; 1 takes the least memory and a third more time (on CUDA up to twice the time, "
        "where the model is small).",
    )
    recompute_mlp: bool | None = Field(
        None,
        description="On CUDA, dense layers keep nothing of their MLP and compute it again: about half the memory for 6 "
        "to 25 % more time on an H200, most in wide models. Not set: only if half of the GPU's memory does not hold "
        "the MLPs of one forward pass (of 8192 tokens, if tokens_per_microbatch is 0).",
    )
    deterministic: bool = Field(
        True,
        description="A re-run gives the same bits, so a restarted trainer arrives at its own versions; without it, a "
        "restart may have to go on in a new line. Free on CUDA with heads 64 wide; with heads that are not 32, 64 "
        "or 128 wide, and with latent attention, steps take up to 1.4 times as long.",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        description="Processes that train together, one per GPU. Weights, optimizer state and tokens are sharded over "
        "them.",
    )
    hang_minutes: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Minutes that a rank waits for the others in one exchange before the trainer stops and names those "
        "that did not come. A step has many exchanges, so this is no limit for steps; raise it if one rank may be this "
        "much later than the others, such as with the reading of a checkpoint.",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks over which the experts of each layer are sharded; tokens travel to their experts. Must "
        "divide `ranks` and the number of experts.",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks over which each sequence is sharded. Use it when one sequence is too long for one GPU; "
        "must divide `ranks`.",
    )
    checkpoint_every: int = Field(
        default=10,
        ge=1,
        description="Steps between checkpoints of the trainer's full state. Smaller means fewer steps to repeat after "
        "a crash, and more writing.",
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="How many of the newest checkpoints are kept; older ones are deleted."
    )
    snapshot_every: int = Field(
        default=25,
        ge=1,
        description="Every N-th version is published whole, the others as deltas. Smaller lets a new engine catch up "
        "faster and takes more storage.",
    )
    delta_goal: Literal["fast", "small", "overwrite"] = Field(
        default="fast",
        description="What deltas are optimised for: `fast` to encode, `small` for a slow link, or `overwrite`: new "
        "values that need no base to apply.",
    )
    max_bad_steps: int = Field(
        default=3,
        ge=1,
        description="The run stops after this many steps in a row whose gradients are not finite, or whose updates "
        "went too far and were taken back in part (`max_step_drift` of RL).",
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="The optimizer and its learning-rate schedule.")
    adapter: Adapter | None = Field(
        None, description="Train an adapter (LoRA) beside weights that stay as they are. Not set: train all weights."
    )

    @model_validator(mode="after")
    def _adapter_on_one_rank(self) -> Self:
        if self.adapter is not None and self.ranks > 1:
            raise ValueError("an adapter is trained by one rank so far: leave out `ranks`, or the adapter")
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        for name in ("expert_parallel", "context_parallel"):
            if self.ranks % getattr(self, name):
                raise ValueError(f"{name} ({getattr(self, name)}) must divide ranks ({self.ranks})")
        return self

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of all ranks together, once `tokens_per_microbatch` is filled in (training/memory_estimate.py)."""
        assert self.tokens_per_microbatch > 0
        return self.ranks * self.tokens_per_microbatch

    def check_model(self, experts: int) -> None:
        """Raises ValueError if `experts` experts per layer cannot be sharded over `expert_parallel` ranks."""
        if self.expert_parallel > 1 and (not experts or experts % self.expert_parallel):
            raise ValueError(f"expert_parallel ({self.expert_parallel}) must divide the model's {experts} experts")


LossName = Literal["policy_gradient", "dppo", "ppo", "cispo", "gspo", "tis", "mis", "icepop"]

CreditName = Literal["path", "all", "decayed", "per_segment", "turns", "answers"]
BaselineName = Literal["group_mean", "leave_one_out", "population", "none"]

ALONE = ("population", "none")  # baselines for which a group may be one trajectory

# The settings that only some losses have, at their usual values; training/rl/policy_loss.py says what each does.
DIALS: Mapping[str, Mapping[str, float | str]] = {
    "policy_gradient": {"weight_cap": 20.0},
    "dppo": {"mask_delta": 0.2, "weight_cap": 20.0, "ratio_penalty": 1e-3},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},  # bounded above only
    # a mean over a sequence moves far less than a token
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0},
    "tis": {"weight_cap": 2.0, "weight_level": "token"},
    "mis": {"weight_cap": 2.0, "weight_level": "token"},
    "icepop": {"weight_floor": 0.5, "weight_cap": 5.0},
}
_OWN_DIALS = frozenset(
    {"mask_delta", "weight_cap", "weight_floor", "weight_level", "clip_low", "clip_high", "dual_clip"}
)
_CLIPS = frozenset({"clip_low", "clip_high"})


class RLConfig(Config):
    """loss = Σ over trained tokens of  −mask · advantage · weight + penalty · (log weight)²,  ÷ a constant.

    weight = π(token) / μ(token), π the policy being trained, μ what the engine sampled from. The constant is
    groups_per_step · group_size · expected_tokens. It does not depend on the batch, so a token counts the same in a
    long answer and in a short one.

    `loss` chooses another composition by its known name. Its own settings are filled in; settings it does not have are
    refused. The default, dppo, is the policy gradient with a group baseline; it masks tokens whose probability has
    moved far.
    """

    loss: LossName = Field(
        "dppo",
        description="The policy loss. It fills in the dials below that it uses and refuses those it does not "
        "have; rollmill/training/rl/policy_loss.py has the table.",
    )
    mask_delta: float | None = Field(
        None,
        gt=0,
        le=1,
        description="dppo: a token whose probability has already moved by more than this in the direction of its "
        "advantage gets no gradient. Smaller is more careful.",
    )
    ratio_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the penalty (log weight)², where weight = trained policy / sampling policy. Larger "
        "holds the policy closer to the one that sampled.",
    )
    weight_cap: float | None = Field(
        None,
        ge=1,
        description="Upper bound of a token's importance weight; mis and icepop mask tokens above it instead. Smaller "
        "is steadier with stale data and more biased.",
    )
    weight_floor: float | None = Field(
        None, gt=0, le=1, description="icepop: tokens with a smaller importance weight are masked."
    )
    weight_level: Literal["token", "sequence"] | None = Field(
        None,
        description="tis and mis: importance weights per `token`, or one per `sequence` (the product over its tokens; "
        "for short sequences only).",
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description="Ratios below 1 minus this are clipped. Smaller keeps each update smaller."
    )
    clip_high: float | None = Field(
        None, gt=0, description="Ratios above 1 plus this are clipped. Smaller keeps each update smaller."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="ppo and gspo: a token with negative advantage whose ratio is above this gets no gradient. Without "
        "it, one token that has become far likelier would outweigh the whole step.",
    )
    veto_ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="A sequence is dropped if one of its tokens has an importance weight below this; 1e-4 is usual. "
        "Not set: nothing is dropped.",
    )
    veto_drift: float | None = Field(
        None,
        gt=0,
        description="A sequence with negative advantage is dropped if its mean of log(sampling policy / trained "
        "policy) exceeds this (OPSM). Not set: nothing is dropped.",
    )
    kl_factor: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence to `reference`. Larger holds the policy closer to it; 0 turns it off.",
    )
    kl_form: Literal["k1_reward", "k2", "k3"] = Field(
        "k1_reward",
        description="How the KL divergence enters: k1 subtracted from the reward, or k2 or importance-weighted k3 "
        "added to the loss.",
    )
    reference: str | None = Field(
        None,
        pattern=r"^[^@]+@\d+$",
        description="The published version that the KL divergence is measured to, as `line@number`. Needed if "
        "`kl_factor` is above 0.",
    )
    entropy_factor: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the entropy bonus. Larger keeps the policy's choices more varied; 0 turns it off.",
    )
    aggregation: Literal["constant", "token_mean", "sequence_mean"] = Field(
        "constant",
        description="What the sum over tokens is divided by: a constant, the batch's tokens, or each trajectory's "
        "tokens (`sequence_mean`). So a trajectory weighs by its tokens, or as one sample with `sequence_mean`, "
        "also if it is a chain of summaries. With the means, the weight of one token depends on its batch.",
    )
    expected_tokens: float | None = Field(
        None,
        gt=0,
        description="Sampled tokens per trajectory, roughly; part of the constant that divides the loss. A larger "
        "value scales the loss down. Not set: the mean of the first step that trains on any, for the whole stage.",
    )
    baseline: BaselineName = Field(
        "group_mean",
        description="What a reward is compared with: the mean of its group, of the others of its group, or of the "
        "`population`: earlier trajectories of the same family. `none`: the reward is the advantage, because it was "
        "compared already, as that of real-time RL. With the last two a group may be one trajectory.",
    )
    population_window: int = Field(
        256,
        ge=8,
        description='With `baseline = "population"`: how many of the latest trajectories of a family are compared '
        "with. Fewer follow the policy faster and are noisier.",
    )
    credit: CreditName = Field(
        "path",
        description="Which tokens of a trajectory share its reward. `path`: those that led to the outcome, with "
        "summaries and used sub-agents, without abandoned retries and edits. `decayed`: the same, earlier answers "
        "less. `per_segment`: the same, and each context of a chain of summaries gets an equal share. `turns`: "
        "each answer is compared with the answers of its group at the same turn, and process rewards count "
        "(rollmill/training/rl/turn_credit.py). `answers`: what users said about single answers, as cycles store it "
        "(rollmill/training/rl/answer_credit.py). `all`: every token.",
    )
    credit_decay: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description='With `credit = "decayed"`: the advantage of an answer is multiplied by this once for every answer '
        "that came after it. Smaller values credit the last answers more.",
    )
    hint_factor: float = Field(
        default=0.0,
        ge=0,
        description="Weight of distillation from hints: where a reward names a turn that went wrong and a hint, the "
        "model that sees the hint teaches the one that does not (rollmill/training/rl/hints.py). 0 turns it off.",
    )
    max_step_drift: float = Field(
        default=0.2,
        ge=0,
        description="How far one update may move the policy: the KL divergence on a few sequences of its step. One "
        "that moves it further, or leaves few tokens with most of the weight, or changes the entropy by a factor of "
        "two, is taken back by halves before anything is published. 0 turns this off.",
    )
    router_replay: bool = Field(
        True,
        description="Train mixtures of experts through the experts that the engine chose, where it recorded them.",
    )
    replay_plausibility: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="A recorded expert is replaced if its score is below this fraction of the weakest live choice's. 0 "
        "replays every recorded expert.",
    )
    gate_bias_rate: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="How far each step moves the gate's bias of an expert towards an even load, as in mid-training. 0: "
        "biases stay frozen, so that the policy moves by its gradient alone.",
    )

    @field_validator("loss", mode="before")
    @classmethod
    def _knows_loss(cls, name: object) -> object:
        if name == "decoupled_ppo":
            raise ValueError(
                "with one update per step decoupled_ppo is policy_gradient: use that, with the same weight_cap"
            )
        return name

    @model_validator(mode="after")
    def _fill_in_dials(self) -> Self:
        # not before the validation: that would validate the rest as Python, where a list is no tuple
        for name, usual in DIALS[self.loss].items():
            if name not in self.model_fields_set or getattr(self, name) is None:
                self.__dict__[name] = usual
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        dials = DIALS[self.loss]
        strange = sorted(name for name in _OWN_DIALS - dials.keys() if getattr(self, name) is not None)
        if strange:
            own = ", ".join(sorted(_OWN_DIALS & dials.keys()))
            why = "; a step is one update, so its ratio to the policy it starts from is 1 and a clip would do nothing"
            why = why if _CLIPS & set(strange) and self.loss in ("tis", "mis", "icepop") else ""
            raise ValueError(f"loss {self.loss!r} has no {', '.join(strange)}{why}; its own settings are {own}")
        if self.kl_factor > 0 and self.reference is None:
            raise ValueError("kl_factor needs a reference: the version to stay close to, for example 'rl@0'")
        if self.kl_factor == 0 and self.reference is not None:
            raise ValueError("a reference does nothing with kl_factor = 0")
        if self.credit == "turns" and self.baseline in ALONE:
            raise ValueError('credit = "turns" compares the trajectories of a group: it needs baseline = "group_mean"')
        if self.credit == "answers" and self.baseline != "none":
            raise ValueError('credit = "answers" takes advantages that a cycle has stored: it needs baseline = "none"')
        if self.replay_plausibility > 0 and not self.router_replay:
            raise ValueError("replay_plausibility filters replayed routes, and router_replay is off")
        return self

    def check_group_size(self, size: int) -> None:
        """Raises ValueError if groups of this size have no baseline."""
        if size < 2 and self.baseline not in ALONE:
            raise ValueError(
                f"group_size is {size}, but baseline {self.baseline!r} compares the trajectories of a group; groups of "
                'one need baseline = "population" or "none"'
            )


class MidtrainConfig(Config):
    """Next-token training on documents. Also the settings of SFT."""

    documents_per_step: int = Field(
        default=32,
        ge=1,
        description="Documents in one step. More give steadier and slower steps. A long text counts as several.",
    )
    publish_every: int = Field(
        default=100, ge=1, description="Steps between published versions. The last step always publishes one."
    )
    balance: float = Field(
        default=0.01,
        ge=0,
        description="Weight of the loss that spreads tokens evenly over experts. 0 turns it off; too large costs "
        "quality.",
    )
    gate_bias_rate: float = Field(
        default=0.001,
        ge=0,
        allow_inf_nan=False,
        description="How far each step moves the gate's bias of an expert: up if it was chosen less often than the "
        "mean, else down. Only for models with `gate_bias`. 0 leaves the biases as they are.",
    )
    heldout_every: int = Field(
        default=100, ge=1, description="Steps between measurements of the loss on held-out documents."
    )
    heldout_documents: int = Field(
        default=64, ge=1, description="Most held-out documents per source that the loss is measured on."
    )
