"""The decoder, shared by trainer and engine. They differ only in where attention finds its keys and values.

Tokens are packed flat [N]: sequences end to end, without padding. Grouped-query or latent attention, rotary embedding,
RMSNorm, SwiGLU, dense or mixture of experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.errors import ConfigError, TrainingError
from rollmill.models.adapters import SCALE, LowRank, adapted, add_adapted, is_adapter
from rollmill.models.attention import Attend
from rollmill.models.config import ModelConfig
from rollmill.models.kernels.exact import fixes_order
from rollmill.models.kernels.forms import linear
from rollmill.models.kernels.fused import DenseMLP, add_mlp, norm_fork, norm_linear, rotate_heads
from rollmill.models.kernels.grouped import groups
from rollmill.models.latent import LatentProjection
from rollmill.models.moe import MLP, MixtureOfExperts, Replay, Routing
from rollmill.models.rope import angle_table, score_scale

DRAWN_ELEMENTS = 1 << 24  # drawn at once; a multiple of 16


@dataclass(frozen=True)
class DecoderOutput:
    hidden: Tensor  # [N, width], after the last norm; give the rows you need to `Decoder.logits`
    routings: list[Routing] = field(default_factory=list)  # one per mixture layer; empty for a dense model

    @property
    def routes(self) -> Tensor | None:
        """The experts used, int64 [N, moe layers, k] in top-k order."""
        return torch.stack([routing.chosen for routing in self.routings], 1) if self.routings else None


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, form: str) -> None:
        super().__init__()
        self._form, self._index, self.exact = form, index, False
        self._eps, self._score_scale = config.norm_eps, score_scale(config)
        self._heads, self._kv_heads, self._dim = config.heads, config.kv_heads, config.head_dim

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attention_norm = empty(config.width)
        self.latent = None if config.latent is None else LatentProjection(config, dtype, form)
        if config.latent is None:
            rows = (config.heads + 2 * config.kv_heads) * config.head_dim
            self.qkv = empty(rows, config.width)
            self.qkv_bias = empty(rows) if config.qkv_bias else None
            self.q_norm = empty(config.head_dim) if config.qk_norm else None
            self.k_norm = empty(config.head_dim) if config.qk_norm else None
        self.output = empty(config.width, config.heads * config.value_dim)
        self.output_bias = empty(config.width) if config.output_bias else None
        adapter = config.adapts("attention")
        self.qkv_adapter = None if adapter is None else LowRank(rows, config.width, adapter, dtype)
        self.output_adapter = None if adapter is None else LowRank(config.width, self.output.shape[1], adapter, dtype)
        self.mlp_norm = empty(config.width)
        self.mlp: nn.Module = (
            MixtureOfExperts(config, config.mixtures_before(index), dtype, form)
            if config.is_mixture(index)
            else MLP(config.width, config.mlp_width, dtype, form, config.adapts("mlp"))
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """The number of rows of q, k and v in `qkv`."""
        return self._heads * self._dim, self._kv_heads * self._dim, self._kv_heads * self._dim

    def forward(
        self, x_NW: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, replay: Replay | None, remakes: bool
    ) -> tuple[Tensor, Routing | None]:
        """`remakes`: see models.kernels.fused."""
        attended, copy_NW = self._attend(x_NW, angles, attend)
        if isinstance(self.mlp, MLP) and self.output_adapter is None and self.mlp.down_adapter is None:
            mlp = DenseMLP(self.output, self.output_bias, self.mlp_norm, self.mlp.gate_up, self.mlp.down)
            out_NW = add_mlp(
                copy_NW, x_NW, attended, mlp, self._eps, remakes=remakes, form=self._form, exact=self.exact
            )
            return out_NW, None
        output = (self.output, self.output_bias, self.output_adapter)
        x_NW = add_adapted(copy_NW, attended, *output, self._form, self.exact)
        normal_NW, x_NW = norm_fork(x_NW, self.mlp_norm, self._eps, copy=isinstance(self.mlp, MLP))
        if isinstance(self.mlp, MLP):
            return self.mlp.add_to(x_NW, normal_NW), None
        return self.mlp(normal_NW, x_NW, replay)

    def _attend(self, x_NW: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> tuple[Tensor, Tensor]:
        """Returns (the attention output, x for the residual; see `norm_fork`)."""
        if self.latent is not None:
            normal_NW, copy_NW = norm_fork(x_NW, self.attention_norm, self._eps)
            return self.latent(normal_NW, angles, self._index, attend, self._score_scale), copy_NW
        weights = (self.attention_norm, self._eps, self.qkv, self.qkv_bias)
        if self.qkv_adapter is None:
            qkv, copy_NW = norm_linear(x_NW, *weights, self._form, self.exact)
        else:
            normal_NW, copy_NW = norm_fork(x_NW, self.attention_norm, self._eps)
            qkv = adapted(normal_NW, self.qkv, self.qkv_bias, self.qkv_adapter, self._form, self.exact)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        q_NHD, k_NKD, v_NKD = rotate_heads(qkv, angles, (self._heads, self._kv_heads, self._dim), norms, self._eps)
        if self._score_scale != 1.0:
            q_NHD = q_NHD * self._score_scale
        return attend(self._index, q_NHD, k_NKD, v_NKD), copy_NW


class Decoder(nn.Module):
    _cos: Tensor
    _sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, form: str = "bf16") -> None:
        """`form` is the form the weights are served in. With a quantised form, products quantise their inputs."""
        super().__init__()
        self.config, self.form = config, form
        self.exact = False  # see `compute_exactly`
        self.recompute_every = 0  # see `_run`
        self.recompute_mlp = False  # see models.kernels.fused
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        self.layers = nn.ModuleList(Layer(config, index, dtype, form) for index in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.width, dtype=dtype))
        self.head = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        )
        if config.adapter is not None:
            self.register_buffer(SCALE, torch.tensor(config.adapter.scale))
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        self.register_buffer("_cos", None, persistent=False)
        self.register_buffer("_sin", None, persistent=False)
        self.make_angles()

    def make_angles(self) -> None:
        """Makes the table of angles on the model's device. Needed again if the model was made on the meta device."""
        self._cos, self._sin = (table.to(self.embedding.device) for table in angle_table(self.config))

    def compute_exactly(self) -> None:
        """From now on, forward passes give a token the same bits in every batch (models.kernels.exact). Attention must
        do so too (models.exact_attention). On the CPU, and on Hopper."""
        if not fixes_order(self.embedding.device):
            raise ConfigError(
                "numerics is 'exact', but on this GPU sums have no fixed order: it is not a Hopper (H100, H200), or "
                "Triton is not installed",
                hint="numerics = 'fast', or device = 'cpu'",
            )
        for module in self.modules():
            if hasattr(module, "exact"):
                module.exact = True  # type: ignore[assignment]
        self.attend_latents()

    def attend_latents(self) -> None:
        """From now on, latent attention is over the latents themselves (models.latent), as an engine caches them."""
        for module in self.modules():
            if isinstance(module, LatentProjection):
                module.absorbs = True

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can record a pass. It cannot if the pass waits for the device, as it does when experts
        are multiplied one by one."""
        mixtures = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]
        return self.embedding.is_cuda and all(groups(self.embedding, each.gate_up, each.down) for each in mixtures)

    def initialise(self, seed: int) -> None:
        """Draws random weights: the same for the same seed on every machine, with or without adapters."""
        self._draw([name for name, _ in self.named_parameters() if not is_adapter(name)], seed)
        self.begin_adapters(seed)

    def begin_adapters(self, seed: int) -> None:
        """Draws random adapters, which change nothing yet."""
        self._draw([name for name, _ in self.named_parameters() if is_adapter(name)], seed)

    @torch.no_grad()
    def _draw(self, names: Collection[str], seed: int) -> None:
        parameters = dict(self.named_parameters())
        flat = {name: parameters[name].view(-1) for name in names}
        shapes = {name: parameters[name].shape for name in names}
        for name, first, values in initial_values(shapes, self.config.layers, seed):
            flat[name][first : first + len(values)].copy_(values)

    def forward(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, replay: Replay | None = None
    ) -> DecoderOutput:
        """`attend` decides which tokens see which. `replay` forces recorded experts (see models.moe)."""
        self._check_replay(replay, tokens_N)
        replay = None if replay is None else replay.to(tokens_N.device)
        angles = (self._cos.index_select(0, positions_N), self._sin.index_select(0, positions_N))
        x_NW = nn.functional.embedding(tokens_N, self.embedding)
        routings: list[Routing] = []
        for number, layer in enumerate(self.layers):
            x_NW, routing = self._run(number, layer, x_NW, angles, attend, replay)
            if routing is not None:
                routings.append(routing)
        return DecoderOutput(norm_fork(x_NW, self.norm, self.config.norm_eps, copy=False)[0], routings)

    def _run(self, number: int, layer: nn.Module, *arguments: Any) -> Any:
        """Activation checkpointing: less memory for more time.

            recompute_every   kept between forward and backward                              time
            0                 every layer's activations                                      —
            k                 only the input of every k-th layer, which runs again in the    + 1/3k of the layers' work
                              backward pass

        k = 2 saves half of what k = 1 saves, at half the cost. On CUDA a layer keeps little even with 0 (see
        kernels.fused). A layer that is recomputed as a whole need not recompute its MLP too.
        """
        if not (self.recompute_every > 0 and torch.is_grad_enabled() and number % self.recompute_every == 0):
            return layer(*arguments, self.recompute_mlp)
        from torch.utils.checkpoint import checkpoint  # imports the compiler

        # there is no dropout, so no random state to restore
        return checkpoint(layer, *arguments, False, use_reentrant=False, preserve_rng_state=False)

    def _check_replay(self, replay: Replay | None, tokens_N: Tensor) -> None:
        expected = (tokens_N.shape[0], self.config.moe_layers, self.config.experts_per_token)
        if replay is not None and tuple(replay.routes.shape) != expected:
            raise TrainingError(
                f"cannot replay routes {tuple(replay.routes.shape)}: [tokens, moe layers, k] is {expected} here",
                hint="the trajectories were sampled by a model of another shape",
            )

    def logits(self, hidden_MW: Tensor) -> Tensor:
        """FP32 logits [M, vocab], accumulated in FP32. Rounding them to bf16 would move log-probs by 1e-2."""
        weight = self.embedding if self.head is None else self.head
        return linear(hidden_MW.float(), weight.float(), exact=self.exact)


def initial_values(shapes: Mapping[str, Sequence[int]], layers: int, seed: int) -> Iterator[tuple[str, int, Tensor]]:
    """Random weights for parameters of these shapes, drawn in FP32 on the CPU, in order of name. Yields (name, first
    element, values). Large parameters come in parts, with the values of one draw."""
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * layers) ** -0.5  # each layer adds twice to the residual stream
    for name, shape in sorted(shapes.items()):
        total = math.prod(shape)
        # torch draws sixteen numbers at once, and differently if there are fewer, so no part has fewer
        starts = range(0, max(total - 15, 1), DRAWN_ELEMENTS)
        for first, stop in itertools.pairwise((*starts, total)):
            if len(shape) == 1 or name.endswith("_adapter.b"):
                yield name, first, torch.full((stop - first,), 1.0 if name.endswith("norm") else 0.0)
                continue
            fan_in = shape[-2] if len(shape) == 3 else shape[-1]  # experts are [in, out]
            deviation = fan_in**-0.5 * (residual if name.endswith(("output", "down")) else 1.0)
            yield name, first, torch.randn(stop - first, generator=generator, dtype=torch.float32) * deviation
