"""Records the weights of a real RL-like run: `python -m benchmarks.weights_recordings [--out FOLDER] [--quick]`.

Two small Llama-like models, one dense and one a mixture of experts, are pre-trained briefly on the source of Python's
standard library, then trained by policy gradient: a few rollouts per step, sampled from the bf16 copy, rewarded for
matching the file they continue and for as many closing as opening brackets. After warm-up steps that fill Adam's
averages, a few steps at each learning rate are recorded, all from the same start. The masters come out of pre-training
in FP32, anywhere between two bf16 values. So from the first step on the share of changed elements is that of a long
run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.weights_codec import FOLDER, RATES, Version, write_version
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.moe import router_stats
from rollmill.training.config import OptimizerConfig, RLConfig
from rollmill.training.optimizers.learning_rate import learning_rate
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.packed_pass import target_logprobs
from rollmill.training.rl.advantage import group_advantages, has_signal
from rollmill.training.rl.policy_loss import PolicyTokens, policy_loss

DEVIATION = 0.02  # standard deviation of the initial weights, as in large models


@dataclass(frozen=True)
class Recipe:
    vocab_size: int = 4096
    width: int = 384
    layers: int = 6
    files: int = 80  # number of files of the standard library
    pretrain_steps: int = 40
    pretrain_tokens: int = 1024  # per step
    pretrain_lr: float = 1e-3
    context: int = 128
    warmup_steps: int = 24  # steps of policy gradient before anything is recorded
    groups: int = 4
    group_size: int = 4
    prompt: int = 32
    answer: int = 24
    kept_steps: int = 2
    rates: tuple[str, ...] = RATES

    def model(self, kind: str) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            layers=self.layers,
            width=self.width,
            heads=self.width // 64,
            kv_heads=max(1, self.width // 192),
            head_dim=64,
            mlp_width=self.width * 8 // 3,
            experts=8 if kind == "moe" else 0,
            experts_per_token=2,
            expert_width=self.width,
            max_context=self.context,
        )


QUICK = replace(
    Recipe(),
    vocab_size=2048,
    width=192,
    layers=4,
    files=24,
    pretrain_steps=16,
    pretrain_tokens=512,
    warmup_steps=8,
    groups=2,
    kept_steps=1,
    rates=("1e-07", "1e-06", "1e-05"),
)


@dataclass(frozen=True)
class Text:
    tokenizer: Tokenizer
    tokens: np.ndarray

    @classmethod
    def read(cls, recipe: Recipe) -> Text:
        folder = Path(sysconfig.get_path("stdlib"))
        texts = [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))[: recipe.files]]
        tokenizer = Tokenizer(train_tokenizer(texts, recipe.vocab_size, ["<end>"]))
        return cls(tokenizer, np.concatenate([tokenizer.encode(text) for text in texts]))

    def draw(self, random: np.random.Generator, count: int, length: int) -> np.ndarray:
        starts = random.integers(0, self.tokens.size - length, count)
        return np.stack([self.tokens[start : start + length] for start in starts])


class _Cache:
    """Attention for sampling: `sequences` of equal length, packed end to end, grow by one token at a time."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        q, k, v = (x.view(self._sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
        first = layer not in self._kept
        if not first:
            old_k, old_v = self._kept[layer]
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        self._kept[layer] = (k, v)
        out = scaled_dot_product_attention(q, k, v, is_causal=first, enable_gqa=True)
        return out.transpose(1, 2).reshape(q_NHD.shape[0], -1)


class Trainer:
    """One model through pre-training and policy gradient. The model holds bf16 values, its optimizer the masters."""

    def __init__(self, recipe: Recipe, kind: str, text: Text, device: str) -> None:
        self.recipe, self.text, self.device = recipe, text, device
        self.model = Decoder(recipe.model(kind)).to(device)
        self.model.initialise(0)
        _scale_to(self.model, DEVIATION, (2 * recipe.layers) ** -0.5)
        self.random = np.random.default_rng(0)
        self.generator = torch.Generator(device).manual_seed(0)
        self.optimizer = MasterOptimizer(self.model, OptimizerConfig(), "bf16")

    def pretrain(self) -> float:
        """Returns the last loss, in nats per token."""
        recipe = self.recipe
        settings = OptimizerConfig(lr=recipe.pretrain_lr, warmup_steps=5, decay="cosine", final_fraction=0.1)
        self.optimizer = MasterOptimizer(self.model, settings, "bf16")
        loss = torch.zeros(())
        for step in range(1, recipe.pretrain_steps + 1):
            rows = self.text.draw(self.random, recipe.pretrain_tokens // recipe.context, recipe.context + 1)
            tokens = torch.from_numpy(rows[:, :-1].copy()).to(self.device)
            targets = torch.from_numpy(rows[:, 1:].copy()).to(self.device).flatten()
            lengths = [recipe.context] * len(rows)
            output = self.model(
                tokens.flatten(), packed_positions(lengths, self.device), PackedAttention(lengths, self.device)
            )
            loss = cross_entropy(self.model.logits(output.hidden), targets)
            balance = router_stats(output.routings).balance if output.routings else 0.0
            (loss + 0.01 * balance).backward()
            self.optimizer.update(learning_rate(settings, step, recipe.pretrain_steps))
        return float(loss.detach())

    def begin_policy_gradient(self) -> None:
        """Starts a new optimizer on the masters of pre-training. Unrecorded steps fill its averages."""
        masters = self.optimizer.state()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(masters[f"master.{name}"])
        self.optimizer = MasterOptimizer(self.model, OptimizerConfig(betas=(0.9, 0.999), max_grad_norm=1.0), "bf16")
        for _ in range(self.recipe.warmup_steps):
            self.step(1e-6)

    def step(self, rate: float) -> float:
        """One step of policy gradient. Returns the mean reward. Groups without signal are drawn again."""
        recipe = self.recipe
        for _ in range(10):
            sequences, logprobs, rewards = self.roll_out()
            grouped = rewards.reshape(recipe.groups, recipe.group_size)
            kept = np.repeat([has_signal(group) for group in grouped], recipe.group_size)
            if kept.any():
                break
        else:
            raise RuntimeError("no group of rollouts carries a signal: the model has not learnt anything")
        advantages = np.concatenate([group_advantages(group) for group in grouped])[kept]
        self._backward(sequences[kept], logprobs[torch.from_numpy(kept)], advantages)
        update = self.optimizer.update(rate)
        assert update.applied, "a gradient was not finite"
        return float(rewards.mean())

    @torch.inference_mode()
    def roll_out(self) -> tuple[np.ndarray, Tensor, np.ndarray]:
        """Returns tokens [R, prompt + answer], log-probs of the answers [R, answer], rewards [R]."""
        recipe = self.recipe
        rows = self.text.draw(self.random, recipe.groups, recipe.prompt + recipe.answer)
        rows = np.repeat(rows, recipe.group_size, 0)
        count = len(rows)
        cache, tokens = _Cache(count), torch.from_numpy(rows[:, : recipe.prompt].copy()).to(self.device)
        sampled, logprobs, position = [], [], 0
        for _ in range(recipe.answer):
            length = tokens.shape[1]
            positions = torch.arange(position, position + length, device=self.device).repeat(count)
            hidden = self.model(tokens.flatten(), positions, cache).hidden.view(count, length, -1)[:, -1]
            scores = torch.log_softmax(self.model.logits(hidden), -1)
            tokens = torch.multinomial(scores.exp(), 1, generator=self.generator)
            sampled.append(tokens)
            logprobs.append(scores.gather(1, tokens))
            position += length
        answers = torch.cat(sampled, 1).cpu().numpy()
        prompts, reference = rows[:, : recipe.prompt], rows[:, recipe.prompt :]
        rewards = (answers == reference).mean(1)
        for index, answer in enumerate(answers):
            rewards[index] += 0.5 * balanced(self.text.tokenizer.decode(answer.tolist()))
        return np.concatenate([prompts, answers], 1), torch.cat(logprobs, 1).cpu(), rewards

    def _backward(self, sequences: np.ndarray, logprobs: Tensor, advantages: np.ndarray) -> None:
        recipe = self.recipe
        tokens = torch.from_numpy(sequences[:, :-1].copy()).to(self.device)
        targets = torch.from_numpy(sequences[:, recipe.prompt :].copy()).to(self.device)
        lengths = [tokens.shape[1]] * len(tokens)
        output = self.model(
            tokens.flatten(), packed_positions(lengths, self.device), PackedAttention(lengths, self.device)
        )
        hidden = output.hidden.view(len(tokens), tokens.shape[1], -1)[:, recipe.prompt - 1 :]
        now, _ = target_logprobs(self.model.logits(hidden.reshape(-1, hidden.shape[-1])), targets.flatten())
        advantages_M = torch.from_numpy(advantages).float().to(self.device).repeat_interleave(recipe.answer)
        sampled = PolicyTokens(now, logprobs.to(self.device).flatten(), advantages_M)
        divisor = float(recipe.groups * recipe.group_size * recipe.answer)
        policy_loss(sampled, RLConfig(), divisor).loss.backward()

    def version(self) -> Version:
        """The served bytes. Parameters hold values that are exact in bf16."""
        return {
            name: parameter.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
            for name, parameter in self.model.named_parameters()
        }


def balanced(text: str) -> bool:
    return all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]", "{}"))


@torch.no_grad()
def _scale_to(model: nn.Module, deviation: float, residual: float) -> None:
    """Large models start with one deviation for all matrices, and less for those that add to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            factor = residual if name.endswith(("output", "down")) else 1.0
            parameter.mul_(factor * deviation / parameter.std())


def record(folder: Path, recipe: Recipe, kind: str, text: Text, device: str) -> dict[str, int]:
    """Records one model: files under FOLDER/KIND. Returns the number of recorded steps per learning rate."""
    began = time.perf_counter()
    trainer = Trainer(recipe, kind, text, device)
    loss = trainer.pretrain()
    trainer.begin_policy_gradient()
    start, start_state = trainer.version(), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    write_version(folder / kind / "start.safetensors", start)
    for rate in recipe.rates:
        trainer.optimizer.load(start_state)
        for number in range(1, recipe.kept_steps + 1):
            trainer.step(float(rate))
            write_version(folder / kind / f"{rate}.{number}.safetensors", trainer.version())
    print(f"{kind}: loss {loss:.2f}, {time.perf_counter() - began:.0f} s", flush=True)
    return dict.fromkeys(recipe.rates, recipe.kept_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: .recordings/full or .recordings/quick")
    parser.add_argument("--quick", action="store_true", help="smaller models, three learning rates")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.quick else 2)  # small products do not gain from more
    recipe = QUICK if arguments.quick else Recipe()
    folder = arguments.out or FOLDER / ("quick" if arguments.quick else "full")
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Text.read(recipe)
    models = {kind: record(making, recipe, kind, text, device) for kind in ("dense", "moe")}
    (making / "recording.json").write_text(json.dumps(models, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)  # an interrupted recording has another name


if __name__ == "__main__":
    main()
