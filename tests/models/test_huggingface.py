from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.errors import ConfigError, WeightsError
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.convert import open_checkpoint
from rollmill.models.huggingface.files import CONFIG
from rollmill.models.huggingface.served import checkpoint_tensors, served_companions, served_tensors
from rollmill.models.quantize import place
from tests.models.checkpoints import (
    LAYOUTS,
    load_checkpoint,
    make_checkpoint,
    our_logits,
    save_checkpoint,
    their_logits,
    tokens_of,
)


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(name, tmp_path)
    config, ours = load_checkpoint(tmp_path)
    expected = their_logits(theirs, tokens_of())
    assert expected.std() > 0.5, "logits near zero would agree with anything"
    torch.testing.assert_close(our_logits(ours, tokens_of()), expected, atol=2e-5, rtol=1e-4)
    assert sum(parameter.numel() for parameter in ours.parameters()) == sum(
        parameter.numel() for parameter in theirs.parameters()
    )
    assert config.max_context == 64


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["one file", "shards"])
def test_saving_loading_and_saving_again_gives_the_same_bytes(name: str, shard_bytes: int, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "theirs", torch.bfloat16)
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"a": 1}  ')
    _, model = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "first", tmp_path / "theirs", shard_bytes=shard_bytes)
    _, again = load_checkpoint(tmp_path / "first")
    save_checkpoint(again, tmp_path / "second", tmp_path / "first", shard_bytes=shard_bytes)
    first = _contents(tmp_path / "first")
    assert first == _contents(tmp_path / "second")
    assert first["tokenizer.json"] == b'{"a": 1}  '
    assert first["config.json"] == (tmp_path / "theirs" / "config.json").read_bytes()
    assert ("model.safetensors.index.json" in first) == (shard_bytes == 20_000)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe", "mixtral", "deepseek"])
def test_our_files_hold_the_tensors_of_theirs(name: str, tmp_path: Path) -> None:
    """All tensors are equal, and `transformers` computes the same logits from our files."""
    import transformers
    from safetensors.torch import load_file

    theirs = make_checkpoint(name, tmp_path / "theirs")
    _, model = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours", tmp_path / "theirs")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(their_logits(back, tokens_of()), their_logits(theirs, tokens_of()))


def test_a_dtype_can_be_chosen_and_is_saved(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path / "theirs", torch.bfloat16)
    _, model = load_checkpoint(tmp_path / "theirs", torch.float32, max_context=32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32} and model.config.max_context == 32
    save_checkpoint(model, tmp_path / "ours", tmp_path / "theirs")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "float32"
    assert load_checkpoint(tmp_path / "ours")[1].embedding.dtype == torch.float32


def test_the_gate_bias_stays_exact_in_a_bf16_model(tmp_path: Path) -> None:
    make_checkpoint("deepseek", tmp_path)
    exact = load_checkpoint(tmp_path)[1].layers[1].mlp.router.bias
    rounded = load_checkpoint(tmp_path, torch.bfloat16)[1].layers[1].mlp.router.bias
    assert rounded.dtype == torch.float32 and torch.equal(exact, rounded) and exact.abs().min() > 0


def test_kimi_k2_is_the_deepseek_layout(tmp_path: Path) -> None:
    theirs = make_checkpoint("deepseek", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    # as in its config.json: rope_theta separate, `type` for rope_type, both betas 1
    old = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    config |= {"model_type": "kimi_k2", "rope_theta": rope["rope_theta"], "rope_scaling": old | {"type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, model = load_checkpoint(tmp_path)
    torch.testing.assert_close(our_logits(model, tokens_of()), their_logits(theirs, tokens_of()), atol=2e-5, rtol=1e-4)


def test_the_text_model_of_kimi_k25_is_read_with_int4_experts(tmp_path: Path) -> None:
    """As its owner's files are: a nested configuration, names with a prefix, parts for images, experts as
    compressed-tensors packs them. `transformers` computes the same with the numbers that the codes mean."""
    import transformers
    from safetensors.torch import load_file, save_file

    make_checkpoint("deepseek", tmp_path, torch.bfloat16, hidden_size=48, moe_intermediate_size=24)
    tensors = {f"language_model.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    tensors["vision_tower.patch_embed.proj.weight"], exact = torch.zeros(4, 4), {}
    for name in [name for name in tensors if ".experts." in name]:
        groups = tensors.pop(name).float().unflatten(1, (-1, 8))
        scales = (groups.abs().amax(-1) / 7).bfloat16()
        codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7)
        exact[name.removeprefix("language_model.")] = (codes * scales.float().unsqueeze(-1)).flatten(1).bfloat16()
        shifted = (codes + 8).long().flatten(1)
        packed = (shifted.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
        tensors[f"{name}_packed"] = packed.where(packed < 1 << 31, packed - (1 << 32)).int()
        tensors[f"{name}_scale"] = scales
        tensors[f"{name}_shape"] = torch.tensor(shifted.shape)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    text |= {
        "model_type": "kimi_k2",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }
    tree = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(tree))

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype == torch.bfloat16 and checkpoint.layout.model.experts == 8
    with served_tensors(checkpoint) as served:  # as an import into a run, and an export of it
        saved = served_companions(checkpoint)
        layout = read_layout(json.loads(saved[CONFIG]))
        with checkpoint_tensors(layout, served) as out:
            found = {name: place(tensor, torch.device("cpu")).clone() for name, tensor in out.items()}
    assert len(exact) == 2 * 8 * 3 and all(torch.equal(found[name], tensor) for name, tensor in exact.items())
    (tmp_path / "text").mkdir()
    save_file(found, tmp_path / "text" / "model.safetensors")
    (tmp_path / "text" / "config.json").write_bytes(saved[CONFIG])
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    _, ours = load_checkpoint(tmp_path, torch.float32)
    torch.testing.assert_close(our_logits(ours, tokens_of()), their_logits(alone, tokens_of()), atol=2e-5, rtol=1e-4)

    weights["group_size"] = 5
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(WeightsError, match="no group size that fits"):
        open_checkpoint(tmp_path)
    weights["num_bits"] = 8
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(WeightsError, match="compressed-tensors' symmetric INT4"):
        open_checkpoint(tmp_path)


def test_block_wise_fp8_becomes_numbers_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint("deepseek", tmp_path, torch.bfloat16)
    tensors, exact = load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and "_proj" in name:
            rows, columns = (-(-size // 16) for size in tensor.shape)
            scales = torch.rand(rows, columns) + 0.5
            spread = scales.repeat_interleave(16, 0)[: tensor.shape[0]].repeat_interleave(16, 1)[:, : tensor.shape[1]]
            tensors[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            exact[name] = (tensors[name].float() * spread).bfloat16()
    # there is also a layer that predicts further tokens; it is not read
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantised, "num_nextn_predict_layers": 1})
    )
    _, model = load_checkpoint(tmp_path)
    assert model.embedding.dtype == torch.bfloat16
    save_checkpoint(model, tmp_path / "out", tmp_path)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert exact and all(torch.equal(saved[name], exact[name]) for name in exact)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["num_nextn_predict_layers"] == 0
    del tensors[next(iter(exact)) + "_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="scales"):
        load_checkpoint(tmp_path)


def test_a_head_that_repeats_a_tied_embedding_is_ignored_and_another_is_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path)[1].head is None
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"no place in LlamaForCausalLM, such as lm_head\.weight"):
        load_checkpoint(tmp_path)


def test_active_parameters_are_those_one_token_uses(tmp_path: Path) -> None:
    make_checkpoint("qwen3 moe", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.parameters - checkpoint.active_parameters == 3 * (6 - 2) * 3 * 32 * 20


# --- files from outside may be wrong


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards. Tests damage copies of it."""
    directory = tmp_path_factory.mktemp("whole")
    make_checkpoint("qwen3", directory / "theirs")
    _, model = load_checkpoint(directory / "theirs")
    save_checkpoint(model, directory / "shards", directory / "theirs", shard_bytes=30_000)
    return directory / "shards"


def _change_config(directory: Path, **change: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _append_number(directory: Path, number: str) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "initializer_range": {number}}}')


def _change_index(directory: Path, **change: str) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | change}))


def _shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[0]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _pickle_only(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "config with an infinite number": (lambda d: _append_number(d, "1e999"), "not valid JSON: .*not finite"),
    "config with a number that is none": (lambda d: _append_number(d, "NaN"), "not valid JSON"),
    "config without end": (lambda d: (d / "config.json").write_text(" " * (17 << 20)), "too many for such a file"),
    "missing shard": (lambda d: _shard(d).unlink(), r"lacks 1 of \d+ shards: model-00001"),
    "truncated shard": (lambda d: _truncate(_shard(d)), "truncated"),
    "empty shard": (lambda d: _shard(d).write_bytes(b""), "not a whole safetensors file"),
    "only pickles": (_pickle_only, "pickled weights only"),
    "index leaves the directory": (lambda d: _change_index(d, a="../../x.safetensors"), "not a safetensors file in"),
    "index names a pickle": (lambda d: _change_index(d, a="x.bin"), "not a safetensors file in"),
    "index invents a tensor": (lambda d: _change_index(d, a=_shard(d).name), "does not hold 'a'"),
    "unknown architecture": (lambda d: _change_config(d, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "wrong shape": (
        lambda d: _change_config(d, intermediate_size=50),
        r"has shape \[48, 32\], but \[50, 32\] by config",
    ),
    "fewer layers": (lambda d: _change_config(d, num_hidden_layers=2), "no place in Qwen3ForCausalLM"),
    "more layers": (lambda d: _change_config(d, num_hidden_layers=900), "says 900 layers"),
    "quantised": (lambda d: _change_config(d, quantization_config={"quant_method": "awq"}), "quantised .'awq'"),
    "other rope": (lambda d: _change_config(d, rope_parameters={"rope_type": "dynamic"}), "rope type 'dynamic'"),
    "partial rotation": (lambda d: _change_config(d, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "many experts": (
        lambda d: _change_config(d, architectures=["Qwen3MoeForCausalLM"], num_experts=60_000),
        "60000 experts in 3 layers",
    ),
    "other activation": (lambda d: _change_config(d, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "window": (lambda d: _change_config(d, layer_types=["sliding_attention"] * 3), "layer_types"),
    "a word for a number": (lambda d: _change_config(d, hidden_size="32"), "hidden_size is '32'"),
    "no heads": (lambda d: _change_config(d, num_attention_heads=0), "num_attention_heads is 0"),
    "odd heads": (lambda d: _change_config(d, num_key_value_heads=3), "multiple of kv_heads"),
    "endless context": (lambda d: _change_config(d, max_position_embeddings=10**15), "real model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_says_what_is_wrong(damage: str, whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    open_checkpoint(copy)  # whole until now
    break_it, says = DAMAGES[damage]
    break_it(copy)
    with pytest.raises((WeightsError, ConfigError), match=says) as caught:
        load_checkpoint(copy)
    assert str(tmp_path) in caught.value.message


def test_saving_overwrites_nothing_and_leaves_nothing_half_done(whole: Path, tmp_path: Path) -> None:
    _, model = load_checkpoint(whole)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(WeightsError, match="already exists"):
        save_checkpoint(model, tmp_path / "there", whole)
    with pytest.raises(WeightsError, match="has no config"):
        save_checkpoint(model, tmp_path / "new", tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    draft = tmp_path / ".new.partial-0123"  # left by a process that was killed an hour ago
    draft.mkdir()
    (draft / "model-00099.safetensors").write_text("half")
    os.utime(draft, (0, 0))
    save_checkpoint(model, tmp_path / "new", whole)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert not draft.exists()
    assert (tmp_path / "there" / "file").read_text() == "mine"
