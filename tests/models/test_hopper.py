"""Every Triton kernel compiles for the GPUs it was written for. This needs Triton, but no device.

The code that launches kernels runs on the CPU, and each launch is replaced by a compilation with its types. Other tests
check what kernels compute; the interpreter does not check layouts, registers or instructions.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from typing import Any

import numpy as np
import pytest
import torch

import rollmill.inference.embedded
import rollmill.models.kernels
from rollmill.inference.embedded.scheduler import Work
from rollmill.models import triton as triton_support
from rollmill.models.attention import packed_positions
from rollmill.models.config import LatentAttention
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.attention.varlen import VarlenAttention
from rollmill.models.kernels.heads.head import head_logprobs, head_next_token
from rollmill.models.packed_attention import packed_attention
from rollmill.models.updates.delta import audit, difference_streams, prepare
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.weights.reading.patches import Patch
from tests.inference import test_device
from tests.kernels import INTERPRETED
from tests.models import test_delta_kernels, test_fused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        INTERPRETED or importlib.util.find_spec("triton") is None, reason="Triton is not installed, or only interprets"
    ),
]
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
    torch.uint32: "u32", torch.uint16: "u16", torch.uint64: "u64",
}  # fmt: skip

DIALS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
SHARED_BYTES = 232448  # of a program on Hopper


def type_of(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class Compiler:
    """Compiles each launch, once per combination of types and sizes."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()
        self.early: list[tuple[str, str]] = []  # names and PTX of kernels that start early
        self._done: set[Any] = set()

    def launch(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        dials = {name: options.pop(name) for name in DIALS if name in options}
        given = kernel.signature.bind(*arguments, **options)
        given.apply_defaults()
        constexprs = {each.name for each in kernel.params if each.is_constexpr}
        constants = {name: value for name, value in given.arguments.items() if name in constexprs or value is None}
        types = {name: "constexpr" if name in constants else type_of(value) for name, value in given.arguments.items()}
        self.kernels.add(kernel)
        key = (kernel, str(types), str(constants), str(dials))
        if key not in self._done:
            source = ASTSource(kernel, types, constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dials)
            assert compiled.metadata.shared <= SHARED_BYTES, (kernel.fn.__name__, constants, dials)
            self._done.add(key)
            if dials.get("launch_pdl"):
                self.early.append((kernel.fn.__name__, compiled.asm["ptx"]))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    from triton.runtime.jit import JITFunction

    from rollmill.inference.embedded.kernels import decode_attention_triton
    from rollmill.models.kernels import small_batch_triton

    found = Compiler()
    for module in (small_batch_triton, decode_attention_triton):
        monkeypatch.setattr(module, "starts_early", lambda device: True)
    monkeypatch.setattr(triton_support, "interpreted", True)  # so that the CPU takes the paths with kernels
    # nothing is computed: outputs of kernels read as zeros
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *given, **options: found.launch(kernel, *given, **options))
    return found


def decoders() -> None:
    for variant in test_fused.VARIANTS:
        for form in ("bf16", "fp8", "nvfp4") if variant in ("dense", "mixture") else ("bf16",):
            model = Decoder(test_fused.decoder(variant).config, torch.bfloat16, form)
            model.initialise(0)
            for model.recompute_mlp in (False, True):
                test_fused.run(model)


def attention() -> None:
    for dim in (32, 64, 128):
        rows = torch.zeros(70, 15, dim, dtype=torch.bfloat16, requires_grad=True)
        VarlenAttention([69, 1], "cpu")(0, *rows.split((9, 3, 3), 1)).sum().backward()


def joined_products() -> None:
    from rollmill.models.kernels import swiglu_triton

    x, weight, grad = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4096, 64), (256, 64), (4096, 128)))
    swiglu_triton.swiglu_product(x, weight)
    for rows in (1, 70, 1000):
        swiglu_triton.swiglu_product(x[:rows], weight, exact=True)
    swiglu_triton.swiglu_product_backward(x, weight, grad)


def mixtures() -> None:
    from rollmill.models.kernels.quantised import fp8_grouped_triton

    x, gate_up, down = (torch.zeros(shape).bfloat16() for shape in ((16, 128), (4, 128, 256), (4, 128, 128)))
    ends = torch.zeros(4, dtype=torch.int32)
    fp8_grouped_triton.through_experts(x, torch.zeros(16, 2, dtype=torch.int64), ends, gate_up, down)


def gradients_in_codes() -> None:
    from rollmill.models.kernels import fused_triton
    from rollmill.models.kernels.quantised import fp8_backward_triton

    grad = torch.zeros(130, 256).bfloat16()
    for width in (2048, 4096):
        rows = torch.zeros(8, width).bfloat16()
        fused_triton.norm_codes(rows, rows[0], 1e-5, rows.clone())
    fp8_backward_triton.both_ways(grad, 512)
    fp8_backward_triton.along_tokens(grad, 512)
    columns = fp8_backward_triton.empty(256, 512, grad.device)
    fp8_backward_triton.both_ways_into(grad, torch.zeros(130), columns, 0, 512, 512)


def exact() -> None:
    from rollmill.models.kernels import exact_triton

    x, weight = torch.zeros(130, 576).bfloat16(), torch.zeros(576, 576).bfloat16()
    for tile in exact_triton.TILES:
        exact_triton.product(x, weight.t(), tile=tile)
        exact_triton.product(x, weight.t(), x.clone(), add=True, tile=tile)
        if exact_triton.fits(tile, x.float()):
            exact_triton.product(x, weight.t(), dtype=torch.float32, tile=tile)
    exact_triton.product(x, weight, dtype=torch.float32)
    for dim in (64, 128, 256):
        rows = torch.zeros(70, 15, dim, dtype=torch.bfloat16)
        packed_attention([69, 1], "cpu", torch.bfloat16, exact=True)(0, *rows.split((9, 3, 3), 1))
    model = Decoder(test_fused.decoder("mixture").config, torch.bfloat16)
    model.initialise(0)
    model.compute_exactly()
    test_fused.run(model)


def heads() -> None:
    for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 2048), (torch.float32, 64)):
        hidden, weight = (torch.zeros(rows, width, dtype=dtype, requires_grad=True) for rows in (9, 96))
        targets = torch.zeros(9, dtype=torch.int64)
        logprobs, entropies = head_logprobs(hidden, weight, targets, torch.ones(9))
        logprobs.sum().backward(retain_graph=True)
        (logprobs.sum() + entropies.sum()).backward()
        head_next_token(hidden, weight, targets, torch.ones(9)).backward()


def optimizers() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = Decoder(test_fused.decoder("dense").config, dtype)
        model.initialise(0)
        optimizer = MasterOptimizer(model, OptimizerConfig(), "bf16")
        for times in (1, 2):
            for _ in range(times):
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                if times > 1:
                    optimizer.accumulate()
            optimizer.update(1e-3)


def quantisers() -> None:
    for form in ("fp8", "nvfp4"):
        for dtype in (torch.bfloat16, torch.float32):
            round_to_form_([("layers.0.qkv", torch.ones(256, 128, dtype=dtype))], form)


def updates() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        old, new = torch.zeros(40_000).to(dtype), torch.ones(40_000).to(dtype)
        difference_streams(old, new)
        audit(old)
    served, parameters = {"a": np.zeros(5000, np.uint16)}, {"a": torch.zeros(5000, dtype=torch.bfloat16)}
    change = Patch(0, np.zeros(1, np.uint32), np.ones(1, np.uint16))
    prepare(parameters, {"a": [change]}, test_delta_kernels.host(served), {"a": 0})


def engines() -> None:
    from rollmill.inference.embedded.device_runner import DeviceRunner

    # the sizes of `decoders`, for which all but the engine's own kernels are compiled already
    sizes = {name: test_fused.BASE[name] for name in ("width", "mlp_width")}
    mixture = sizes | test_fused.VARIANTS["mixture"] | {"qk_norm": False}
    for name, shape in test_device.SHAPES.items():
        # in FP32 one mixture and one dense model reach every kernel
        for dtype in (torch.bfloat16, torch.float32) if name in ("odd", "smollm2") else (torch.bfloat16,):
            model = Decoder(shape.model_copy(update=mixture if shape.experts else sizes), dtype)
            model.initialise(0)
            for fp8 in (False, True) if name in ("smollm2", "latent") else (False,):
                runner = DeviceRunner(model, test_device.cache_of(model, fp8=fp8), 256)
                test_device.in_chunks(test_device.Steps(runner))


def exact_steps() -> None:
    from rollmill.inference.embedded.decode_pass import decode_pass
    from rollmill.inference.embedded.plans import make_plan

    (one,) = test_device.make_generations([30])
    for name, dim in (("smollm2", 64), ("smollm2", 128), ("normed", 32)):
        sizes = {"experts": 0, "layers": 1, "head_dim": dim}
        model = Decoder(test_device.SHAPES[name].model_copy(update=sizes), torch.bfloat16)
        model.initialise(0)
        model.compute_exactly()
        cache = test_device.cache_of(model)
        decode_pass(model, cache, make_plan(cache, [Work(one, 29, 1)]))


def latents() -> None:
    """DeepSeek-V2-Lite's and DeepSeek-V3's, of an engine and of a trainer."""
    from rollmill.inference.embedded.kernels.paged_triton import TritonAttention, tile_positions
    from rollmill.inference.embedded.plans import make_plan

    latent = LatentAttention(kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
    for heads, exact in ((16, False), (16, True), (128, False)):
        sizes = {"heads": heads, "kv_heads": heads, "head_dim": 192, "latent": latent, "experts": 0, "layers": 1}
        model = Decoder(test_device.TINY.model_copy(update=sizes), torch.bfloat16)
        model.initialise(0)
        model.attend_latents()
        if exact:
            model.compute_exactly()
            attend = packed_attention([69, 1], "cpu", torch.bfloat16, exact=True)
            model(torch.zeros(70, dtype=torch.long), packed_positions([69, 1]), attend)
        cache, (one,) = test_device.cache_of(model), test_device.make_generations([30])
        for count in (1, 30):
            plan, positions = make_plan(cache, [Work(one, 0, count)]), min(count, tile_positions(cache.group))
            model(plan.tokens_N, plan.positions_N, TritonAttention(cache, plan, positions, exact))


def launched(module: Any) -> set[Any]:
    """The kernels of a module that no other kernel calls."""
    from triton.runtime.jit import JITFunction

    kernels = {name: each for name, each in vars(module).items() if isinstance(each, JITFunction)}
    called = {name for each in kernels.values() for name in each.fn.__code__.co_names}
    return {each for name, each in kernels.items() if name not in called}


def small_batches() -> None:
    """Decode steps of one to four sequences of a dense model."""
    from rollmill.inference.embedded.device_runner import DeviceRunner

    model = Decoder(test_device.SHAPES["smollm2"], torch.bfloat16)
    model.initialise(0)
    runner = DeviceRunner(model, test_device.cache_of(model), 256)
    for rows in (1, 2, 4):
        runner.launch([None] * rows, [0] * rows, 1)


def test_kernels_that_start_early_load_nothing_that_may_be_old(compiler: Compiler) -> None:
    """In the instructions: what is loaded after the wait does not come from the multiprocessor's cache, which may hold
    what was at that address before; and the next kernel starts only after the wait."""
    small_batches()
    assert {name for name, _ in compiler.early} == {"_multiply", "_attend_one"}
    for name, ptx in compiler.early:
        body = ptx.split("\n")
        waits = [number for number, line in enumerate(body) if "griddepcontrol.wait" in line]
        signals = [number for number, line in enumerate(body) if "griddepcontrol.launch_dependents" in line]
        branches = [number for number, line in enumerate(body) if re.search(r"\b(bra|ret)\b", line)]
        assert len(waits) == len(signals) == 1 and waits < signals < branches, name
        before, after = body[: waits[0]], body[waits[0] :]
        assert not any(re.search(r"\b(st|red|atom)\.global", line) for line in before), name
        loads = [line.strip() for line in after if re.search(r"ld\.global|cp\.async\.c", line)]
        assert loads and all(re.search(r"ld\.global\.cg|cp\.async\.cg", line) for line in loads), (name, loads)


@pytest.mark.parametrize("width", [128, 512, 4096])
def test_a_norm_sums_in_the_same_order_whatever_it_writes(width: int) -> None:
    """The order follows the layout of the rows, which the compiler chooses by all loads and stores of the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rollmill.models.kernels.fused_triton import _norm_forward, _tile

    layouts = set()
    for codes in (False, True):
        tile = _tile(width, 4096)
        dials = {"num_warps": tile.pop("num_warps")}
        constants = {"COPY": True, "CODES": codes, **tile}
        types = {each.name: "constexpr" if each.name in constants else "i32" for each in _norm_forward.params}
        types |= dict.fromkeys(("x_ptr", "weight_ptr", "copy_ptr"), "*bf16") | {"eps": "fp32"}
        types |= {"out_ptr": "*fp8e4nv" if codes else "*bf16", "code_scale_ptr": "*fp32", "scale_ptr": "*fp32"}
        aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 4, 5, 7, 8)}
        source = ASTSource(_norm_forward, types, constants, aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dials).asm["ttgir"]
        [layout] = re.findall(r'"tt.reduce".*?\}\) : \(tensor<\w+xf32, (#\w+)>\)', code, re.DOTALL)[:1]
        layouts.add(re.search(rf"^{layout} = (.*)$", code, re.MULTILINE)[1])  # type: ignore[index]
    assert len(layouts) == 1, layouts


@pytest.mark.timeout(1800)
def test_every_kernel_compiles(compiler: Compiler) -> None:
    for drive in (
        decoders,
        attention,
        joined_products,
        mixtures,
        gradients_in_codes,
        exact,
        heads,
        optimizers,
        quantisers,
        updates,
        engines,
        exact_steps,
        latents,
    ):
        drive()
    found = set()
    for package in (rollmill.models.kernels, rollmill.inference.embedded):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found |= launched(importlib.import_module(module.name))
    assert found <= compiler.kernels, {each.fn.__name__ for each in found - compiler.kernels}
