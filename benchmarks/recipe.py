"""What the demo learns with which settings: a SIMULATION in one process, without gateway, machines or asynchrony.

    python -m benchmarks.recipe [--quick] [--seeds 0 1 2] [lr=8e-4 groups_per_step=16 …]

Real: the tasks, the demonstrations, the chat format, the decoder, the losses and the optimizer. Emulated: tools and
hidden cases (benchmarks.emulated_sessions), and staleness: the rollouts of step n are sampled with version n − 1 − lag.
Counts of tokens and rollouts carry over to the demo; seconds do not. The control spends as many tokens as RL on more
mid-training, whose ceiling is the teacher of the demonstrations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from benchmarks.emulated_sessions import MAX_CONTEXT, Episode, play
from benchmarks.output import at_least, finish
from rollmill.chat.formats.compact import CompactFormat
from rollmill.demo.demonstrations import DemonstrationStream
from rollmill.demo.micro_repos import MicroRepos, repositories, repository_of
from rollmill.demo.tokenizer import demo_tokenizer
from rollmill.models.attention import PackedAttention
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, pack
from rollmill.training.config import MidtrainConfig, OptimizerConfig, RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.loss import PolicyLoss, PolicyTokens, policy_loss, target_logprobs
from rollmill.training.numerics.router_replay import replay_of
from rollmill.training.optimizers.master_optimizer import MasterOptimizer, learning_rate
from rollmill.training.pretraining.document_objective import MidtrainObjective
from rollmill.training.pretraining.mixture import Mixture, Part
from rollmill.training.rl.advantage import group_advantages, has_signal

TOKENS_PER_MICROBATCH = 8192


@dataclass(frozen=True)
class Recipe:
    """The settings under test. The defaults are the demo's."""

    vocab_size: int = 512
    layers: int = 2
    width: int = 128
    heads: int = 4
    experts: int = 8
    expert_width: int = 128
    rope_theta: float = 500.0
    midtrain_steps: int = 300
    documents_per_step: int = 32
    midtrain_lr: float = 2e-3
    midtrain_warmup: int = 20
    midtrain_final_fraction: float = 0.05
    steps: int = 32
    groups_per_step: int = 12
    group_size: int = 8
    lr: float = 6.5e-4
    final_fraction: float = 0.2
    warmup_steps: int = 3
    beta2: float = 0.99
    lag: int = 2
    mask_delta: float = 0.2
    ratio_penalty: float = 1e-2
    weight_cap: float = 2.0
    expected_tokens: float = 24.0
    eval_tasks: int = 128
    eval_attempts: int = 4
    family_tasks: int = 64

    def with_overrides(self, overrides: Sequence[str]) -> Recipe:
        known = {field.name for field in fields(self)}
        values = dict(override.partition("=")[::2] for override in overrides)
        if unknown := set(values) - known:
            raise SystemExit(f"no such setting: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        return replace(self, **{name: json.loads(value) for name, value in values.items()})

    def model(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=vocab_size,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.width // self.heads,
            experts=self.experts,
            expert_width=self.expert_width,
            rope_theta=self.rope_theta,
            max_context=MAX_CONTEXT,
        )


QUICK = Recipe(midtrain_steps=30, steps=2, eval_tasks=16, eval_attempts=2, family_tasks=16)


@dataclass
class Student:
    """A model with its documents, its tasks and its chat format."""

    recipe: Recipe
    seed: int

    def __post_init__(self) -> None:
        tokenizer = demo_tokenizer(self.recipe.vocab_size)
        self.format = CompactFormat(tokenizer)
        self.documents = DemonstrationStream(self.format, tokenizer, self.seed)
        self.model = Decoder(self.recipe.model(tokenizer.vocab_size))
        self.model.initialise(self.seed)
        torch.manual_seed(self.seed)

    def evaluate(self) -> dict[str, float]:
        """Solve rates on held-out tasks: sampled at temperature 1, greedy, and sampled on the held-out family."""
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        recipe, rates = self.recipe, {}
        for name, split, count, attempts in (
            ("heldout", "heldout", recipe.eval_tasks, recipe.eval_attempts),
            ("greedy", "heldout", recipe.eval_tasks, 1),
            ("family", "heldout_family", recipe.family_tasks, recipe.eval_attempts),
        ):
            asked = [repository_of(task.id) for task in MicroRepos().heldout(split, count)] * attempts
            episodes = play(self.model, self.format, asked, greedy=name == "greedy")
            rates[name] = float(np.mean([episode.reward for episode in episodes]))
        torch.set_rng_state(generator_state)
        return rates

    def midtrain(self, steps: int) -> int:
        """Mid-train for `steps`. Returns the number of tokens."""
        recipe = self.recipe
        settings = OptimizerConfig(
            lr=recipe.midtrain_lr,
            warmup_steps=recipe.midtrain_warmup,
            final_fraction=recipe.midtrain_final_fraction,
            betas=(0.9, recipe.beta2),
        )
        objective = MidtrainObjective(
            MidtrainConfig(documents_per_step=recipe.documents_per_step),
            Mixture([Part("demonstrations", self.documents)], self.seed),
            max_context=MAX_CONTEXT,
            tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        )
        optimizer = MasterOptimizer(self.model, settings, "bf16")
        tokens = 0
        for step in range(1, steps + 1):
            batch = objective.next_batch(step, 0.0, Lineage("base", {"base": 0}), lambda: False)
            assert batch is not None, "only a run that is being stopped has no next batch"
            figures = objective.backward(self.model, batch)
            optimizer.update(learning_rate(settings, step, steps))
            tokens += figures["tokens"]
        return tokens

    def reinforce(self) -> list[dict[str, float]]:
        """Run all RL steps. Returns one row of figures per step."""
        recipe = self.recipe
        settings = OptimizerConfig(
            lr=recipe.lr,
            warmup_steps=recipe.warmup_steps,
            final_fraction=recipe.final_fraction,
            betas=(0.9, recipe.beta2),
        )
        optimizer = MasterOptimizer(self.model, settings, "bf16")
        sampler, versions, rows = Decoder(self.model.config), [_copy(self.model)], []
        tasks = repositories("train", self.seed)
        for step in range(1, recipe.steps + 1):
            sampler.load_state_dict(versions[0])
            asked = [each for each in islice(tasks, recipe.groups_per_step) for _ in range(recipe.group_size)]
            episodes = play(sampler, self.format, asked)
            row = learn(self.model, episodes, recipe)
            optimizer.update(learning_rate(settings, step, recipe.steps))
            versions = [*versions, _copy(self.model)][-1 - recipe.lag :]
            rows.append({"step": step, **_session_figures(episodes), **row})
            if step % 5 == 0 or step == 1:
                print("    " + "  ".join(f"{key} {value:.3g}" for key, value in rows[-1].items()), flush=True)
        return rows


def learn(model: Decoder, episodes: Sequence[Episode], recipe: Recipe) -> dict[str, float]:
    """Forward and backward over the groups that have signal."""
    sequences = []
    for start in range(0, len(episodes), recipe.group_size):
        group = episodes[start : start + recipe.group_size]
        rewards = np.array([episode.reward for episode in group])
        if has_signal(rewards):
            sequences += [_sequence(*pair) for pair in zip(group, group_advantages(rewards), strict=True)]
    results = [_policy_loss(model, batch, recipe) for batch in pack(sequences, TOKENS_PER_MICROBATCH)]
    for result in results:
        result.loss.backward()
    figures = {"signal": len(sequences) / len(episodes)}
    if results:
        weights_M = torch.cat([result.log_weights_M for result in results]).exp()
        figures["masked"] = 1 - float(torch.cat([result.kept_M for result in results]).float().mean())
        figures["ess"] = float(weights_M.sum() ** 2 / (len(weights_M) * weights_M.square().sum()))
    return figures


def _policy_loss(model: Decoder, batch: MicroBatch, recipe: Recipe) -> PolicyLoss:
    assert batch.facts is not None
    output = model(batch.tokens_N, batch.positions_N, PackedAttention(batch.lengths), replay_of(batch))
    logits_MV = model.logits(output.hidden.index_select(0, batch.rows_M))
    tokens = PolicyTokens(
        target_logprobs(logits_MV, batch.targets_M)[0],
        torch.from_numpy(batch.facts.logprobs),
        torch.from_numpy(batch.facts.advantages),
    )
    config = RLConfig(mask_delta=recipe.mask_delta, ratio_penalty=recipe.ratio_penalty, weight_cap=recipe.weight_cap)
    return policy_loss(tokens, config, recipe.groups_per_step * recipe.group_size * recipe.expected_tokens)


def _sequence(episode: Episode, advantage: float) -> PackedSequence:
    picked = np.array(episode.sampled)
    end, count = int(picked[-1]), len(picked)
    facts = SampledFacts(
        logprobs=np.array(episode.logprobs, np.float32),
        temperatures=np.ones(count, np.float32),
        advantages=np.full(count, advantage, np.float32),
        staleness=np.zeros(count, np.int64),
        trajectory=np.zeros(count, np.int64),
    )
    tokens = np.array(episode.tokens, np.int64)
    routes = np.stack(episode.routes[:end])
    return PackedSequence(tokens[:end], picked - 1, tokens[picked], routes, np.ones(end, np.bool_), facts)


def _session_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    return {
        "reward": float(np.mean([episode.reward for episode in episodes])),
        "tokens": float(np.mean([len(episode.tokens) for episode in episodes])),
        "sampled": float(np.mean([len(episode.sampled) for episode in episodes])),
        "turns": float(np.mean([episode.turns for episode in episodes])),
    }


def _copy(model: Decoder) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def run_seed(recipe: Recipe, seed: int) -> dict[str, float]:
    """Mid-train, evaluate, reinforce, evaluate; then the control: a model that is mid-trained for longer."""
    student = Student(recipe, seed)
    started = time.monotonic()
    midtrain_tokens = student.midtrain(recipe.midtrain_steps)
    before = student.evaluate()
    print(f"seed {seed}: mid-trained on {midtrain_tokens:,} tokens in {time.monotonic() - started:.0f} s: {before}")
    rows = student.reinforce()
    after = student.evaluate()
    # a training step costs about three times a forward pass, so sampled sessions count as a third more
    spent = sum(row["tokens"] for row in rows) * recipe.groups_per_step * recipe.group_size * 4 / 3
    control = Student(recipe, seed)
    control.midtrain(recipe.midtrain_steps + round(spent / midtrain_tokens * recipe.midtrain_steps))
    controlled = control.evaluate()
    print(f"seed {seed}: after RL {after}; after as many tokens of more mid-training {controlled}", flush=True)
    figures = {f"before_{name}": rate for name, rate in before.items()}
    figures |= {f"after_{name}": rate for name, rate in after.items()}
    figures |= {f"control_{name}": rate for name, rate in controlled.items()}
    last = rows[-10:]
    return figures | {
        "midtrain_tokens": midtrain_tokens,
        "rollouts": recipe.steps * recipe.groups_per_step * recipe.group_size,
        "tokens_per_session": float(np.mean([row["tokens"] for row in rows])),
        "sampled_per_session": float(np.mean([row["sampled"] for row in rows])),
        "turns_at_the_end": float(np.mean([row["turns"] for row in last])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that it runs, not what is learnt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings of the recipe to change")
    arguments = parser.parse_args()
    recipe = (QUICK if arguments.quick else Recipe()).with_overrides(arguments.overrides)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for seed in arguments.seeds:
        figures |= {f"seed_{seed}_{name}": round(value, 4) for name, value in run_seed(recipe, seed).items()}
    print(f"\n{'seed':>6}{'':>10}{'before':>10}{'after RL':>10}{'control':>10}")
    for seed in arguments.seeds:
        for name in ("heldout", "greedy", "family"):
            rates = (figures[f"seed_{seed}_{when}_{name}"] for when in ("before", "after", "control"))
            print(f"{seed:>6}{name:>10}" + "".join(f"{rate:>10.3f}" for rate in rates))
    rises = [figures[f"seed_{s}_after_heldout"] - figures[f"seed_{s}_before_heldout"] for s in arguments.seeds]
    finish("recipe", figures, {"smallest_rise": at_least(round(min(rises), 4), 0.35)})


if __name__ == "__main__":
    main()
