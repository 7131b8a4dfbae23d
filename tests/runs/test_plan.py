"""The planner's models held against what was measured on one H200, and its choices."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError
from rollmill.models.config import Adapter, ModelConfig, with_adapter
from rollmill.models.counts import active_parameters, adapter_parameters, all_parameters
from rollmill.runs.plan import GPUS, cache_bytes, decode_seconds, delta_bytes, pass_seconds, plan, plan_trainer
from rollmill.runs.run import RunConfig
from rollmill.training.config import TrainingConfig
from tests.test_repo import ROOT

H200 = GPUS["h200"]


def dense(**settings: int | bool) -> ModelConfig:
    return ModelConfig.model_validate({"experts": 0, "max_context": 2048, **settings})


SMOLLM2 = dense(
    vocab_size=49152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1536, tie_embeddings=True
)
LLAMA_1B = dense(
    vocab_size=128256, layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, mlp_width=8192, tie_embeddings=True
)
LLAMA_8B = dense(vocab_size=128256, layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=14336)
LLAMA_8B_PART = LLAMA_8B.model_copy(update={"layers": 8})
LLAMA_8B_FEW = LLAMA_8B_PART.model_copy(update={"vocab_size": 32000})
MIXTURE = ModelConfig(
    vocab_size=49152,
    layers=16,
    width=1024,
    heads=16,
    kv_heads=4,
    head_dim=64,
    experts=32,
    experts_per_token=4,
    expert_width=512,
    max_context=2048,
)


def qwen3_30b(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        layers=layers,
        width=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        expert_width=768,
        max_context=2048,
    )


@pytest.mark.parametrize(
    ("model", "tokens", "recompute", "measured"),
    [
        (SMOLLM2, 32768, True, 89.8e-3),
        (SMOLLM2, 32768, False, 84.4e-3),
        (MIXTURE, 32768, True, 116.8e-3),
        (LLAMA_1B, 16384, True, 273.6e-3),
        (LLAMA_1B, 16384, False, 235e-3),
        (LLAMA_8B_FEW, 16384, True, 410e-3),
        (LLAMA_8B_FEW, 16384, False, 329e-3),
        (LLAMA_8B_PART, 16384, True, 478e-3),
        (LLAMA_8B_PART, 16384, False, 395e-3),
        (qwen3_30b(6), 16384, True, 162e-3),
    ],
)
def test_the_time_of_a_training_step(model: ModelConfig, tokens: int, recompute: bool, measured: float) -> None:
    assert pass_seconds(model, H200, tokens, 2048, recompute) == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("model", "recompute", "tokens", "measured"),
    [
        (SMOLLM2, True, 32768, 6.4),
        (SMOLLM2, False, 32768, 13.1),
        (SMOLLM2, True, 16384, 4.9),
        (MIXTURE, True, 32768, 24.6),
        (LLAMA_1B, True, 16384, 21.5),
        (LLAMA_1B, False, 16384, 30.4),
        (LLAMA_8B_PART, True, 16384, 43.4),
        (LLAMA_8B_PART, False, 16384, 51.4),
        (qwen3_30b(6), True, 16384, 66.6),
    ],
)
def test_the_memory_of_a_training_step(model: ModelConfig, recompute: bool, tokens: int, measured: float) -> None:
    """The measured steps had one pass each: only several passes have a sum of gradients in FP32."""
    training = TrainingConfig(recompute_mlp=recompute, tokens_per_microbatch=tokens)
    planned = plan_trainer(model, training, H200, 1, 2048)
    assert (planned.bytes - 4 * all_parameters(model)) / 2**30 == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("model", "seconds", "gib", "close"),
    [(LLAMA_1B, 0.1783, 18.2, 0.08), (LLAMA_8B, 0.9382, 71.6, 0.08), (qwen3_30b(48), 0.7166, 118.9, 0.12)],
)
def test_a_step_of_an_adapter(model: ModelConfig, seconds: float, gib: float, close: float) -> None:
    adapted = with_adapter(model, Adapter(rank=16))
    planned = plan_trainer(adapted, TrainingConfig(recompute_mlp=False, tokens_per_microbatch=16384), H200, 1, 2048)
    assert 16384 / planned.tokens_per_second == pytest.approx(seconds, rel=close)
    assert (planned.bytes - 4 * adapter_parameters(adapted)) / 2**30 == pytest.approx(gib, rel=0.08)
    assert delta_bytes(adapted, "bf16", 1e-4) < 0.02 * delta_bytes(model, "bf16", 1e-4) * 24


@pytest.mark.parametrize(
    ("model", "batch", "fp8_kv", "measured"),
    [
        (SMOLLM2, 32, False, 30_484),
        (SMOLLM2, 256, False, 156_737),
        (SMOLLM2, 1024, False, 250_964),
        (SMOLLM2, 1024, True, 284_457),
        (LLAMA_1B, 256, False, 93_077),
        (MIXTURE, 256, False, 111_683),
        (MIXTURE, 1024, False, 184_164),
    ],
)
def test_the_speed_of_an_engine(model: ModelConfig, batch: int, fp8_kv: bool, measured: float) -> None:
    """`batch` prompts of 128 tokens at once, 256 sampled tokens each."""
    prompts = batch * 128 * 2 * active_parameters(model) / H200.operations
    decoding = 256 * decode_seconds(model, H200, batch, 128 + 256 / 2, fp8_kv=fp8_kv)
    assert batch * 256 / (prompts + decoding) == pytest.approx(measured, rel=0.1)


def test_deltas_follow_the_learning_rate() -> None:
    whole = 2 * 134_515_008
    assert delta_bytes(SMOLLM2, "bf16", 1e-6) == pytest.approx(whole / 111, rel=1e-3)
    assert whole / 111 < delta_bytes(SMOLLM2, "bf16", 3e-6) < whole / 24
    embedding = 2 * 49152 * 576  # stays bf16
    assert delta_bytes(SMOLLM2, "fp8", 1e-6) == pytest.approx((embedding + (whole - embedding) / 2) / 111, rel=1e-3)
    assert delta_bytes(SMOLLM2, "bf16", 1.0) == delta_bytes(SMOLLM2, "bf16", 1e-4)
    assert cache_bytes(SMOLLM2) == 2 * cache_bytes(SMOLLM2, fp8=True) == 2 * 2 * 30 * 3 * 64


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, DEMO, overrides)


def test_one_gpu_is_shared_and_several_are_divided() -> None:
    alone = plan(config(), H200, 1)
    assert alone.shared and alone.trainer.ranks == alone.engine.engines == 1
    assert alone.step_seconds == alone.train_seconds + alone.generate_seconds
    for gpus in (2, 8, 64):
        divided = plan(config(), H200, gpus)
        assert not divided.shared and divided.trainer.ranks + divided.engine.engines * divided.engine.gpus <= gpus
        assert divided.step_seconds < alone.step_seconds


def test_a_form_saves_no_memory_of_the_device() -> None:
    plans = {form: plan(config(f"form={form}"), H200, 2) for form in ("bf16", "fp8", "nvfp4")}
    assert len({(each.engine.weight_bytes, each.engine.tokens_per_second) for each in plans.values()}) == 1
    assert plans["bf16"].delta_bytes > plans["fp8"].delta_bytes > plans["nvfp4"].delta_bytes


def test_a_model_that_does_not_fit() -> None:
    large = config().model_copy(update={"model": qwen3_30b(48)})
    with pytest.raises(ConfigError, match="1 × h200 is too little: the trainer needs at least 9 and an engine 1"):
        plan(large, H200, 1)
    planned = plan(large, H200, 16)
    assert planned.trainer.ranks >= planned.trainer.least_ranks == 9
    assert planned.trainer.bytes < H200.memory


@pytest.mark.parametrize(
    ("gpus", "model", "tokens"),
    [(1, LLAMA_1B, 4000), (8, LLAMA_8B, 8000), (64, qwen3_30b(48), 16000), (512, qwen3_30b(48), 16000)],
)
def test_the_layouts_of_the_guide(gpus: int, model: ModelConfig, tokens: int) -> None:
    guide = (ROOT / "docs" / "guides" / "many-gpus.md").read_text()
    [row] = re.findall(rf"^\| {gpus} \|.*$", guide, re.MULTILINE)
    planned = plan(config().model_copy(update={"model": model}), H200, gpus, tokens)
    layout = f"{planned.trainer.ranks} ranks and {planned.engine.engines} engines"
    assert ("trainer and engine share it" if planned.shared else layout) in row
    [seconds] = re.findall(r"takes ([\d.]+) s ", row)
    assert f"{planned.step_seconds:.{len(seconds.partition('.')[2])}f}" == seconds
    if "the same model" not in row:
        assert f"rollouts of {tokens:,} tokens" in row and f"a step of {planned.step_tokens:,.0f} tokens takes" in row
    if model.experts:
        assert f"({planned.delta_bytes / 1e9:.1f} GB at the demo's learning rate)" in guide


def test_traffic_follows_the_forms_of_a_region() -> None:
    tables = '[{region="a"},{region="b",form="fp8"},{region="c"},{region="c",form="fp8",count=2}]'
    planned = plan(config(f"engines={tables}"), H200, 8)
    bf16, fp8 = planned.delta_bytes, planned.region_bytes["b"]
    assert bf16 / 2 < fp8 < bf16  # the embedding stays bf16
    assert planned.region_bytes == pytest.approx({"a": bf16, "b": fp8, "c": bf16 + fp8})
    shown = CliRunner().invoke(app, ["plan", str(ROOT / "examples" / "micro.toml"), "--gpus", "8", f"engines={tables}"])
    assert shown.exit_code == 0 and shown.output.count("weights, per region") == 3, shown.output


def test_the_command() -> None:
    micro = str(ROOT / "examples" / "micro.toml")
    shown = CliRunner().invoke(app, ["plan", micro, "--gpus", "8"])
    assert shown.exit_code == 0, shown.output
    assert "8 × h200" in shown.output and "tokens/s" in shown.output and "per region" in shown.output
    refused = CliRunner().invoke(app, ["plan", micro, "--gpu", "abacus"])
    assert refused.exit_code != 0
