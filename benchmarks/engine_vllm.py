"""The embedded engine beside vLLM's build for CPUs, on the same cores: tokens per second.

    python -m benchmarks.engine_vllm [--repeats N] [--new TOKENS]

SmolLM2-135M's shape with random weights, 32 prompts of 128 tokens, sampled at temperature 1, prefill included. Ours
computes in FP32; vLLM in float32 and in bfloat16, each in a process of its own in .venv-vllm (scripts/setup-vllm).
The sides take turns, and each has generated once before it is timed. Medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import engine
from benchmarks.output import at_least, finish
from benchmarks.train_step_peers import transformers_model
from benchmarks.train_step_shapes import SMOLLM2, draw_
from rollmill.models.device import decoder_on

BATCH, PROMPT = 32, 128
PYTHON = Path(".venv-vllm/bin/python")
_THEIRS = """
import json, os, sys, time
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    prompts, new = json.load(open(sys.argv[1])), int(sys.argv[3])
    model = LLM(os.path.dirname(sys.argv[1]), dtype=sys.argv[2], skip_tokenizer_init=True, max_model_len=1024,
                max_num_seqs=len(prompts), enable_prefix_caching=False)
    settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1, detokenize=False)
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    model.generate(asked, settings, use_tqdm=False)
    started = time.perf_counter()
    out = model.generate(asked, settings, use_tqdm=False)
    seconds = time.perf_counter() - started
    print("RATE", sum(len(one.outputs[0].token_ids) for one in out) / seconds, flush=True)
"""


def theirs(directory: Path, dtype: str, new: int) -> float:
    """Tokens per second of a fresh vLLM process."""
    command = [str(PYTHON), "-c", _THEIRS, str(directory / "prompts.json"), dtype, str(new)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    rates = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE ")]
    if not rates:
        raise SystemExit(f"engine_vllm: vLLM with {dtype} ended with {done.returncode}: {done.stderr[-800:]}")
    return float(rates[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--new", type=int, default=64, help="sampled tokens per prompt")
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("engine_vllm: there is no .venv-vllm here; scripts/setup-vllm makes it")
    cell = engine.Cell("dense", SMOLLM2, BATCH, PROMPT, options.new)
    model = decoder_on(torch.device("cpu"), cell.model)
    draw_(model, 1)
    prompts = np.random.default_rng(0).integers(1, cell.model.vocab_size, (BATCH, PROMPT)).tolist()
    rates: dict[str, list[float]] = {"ours": [], "float32": [], "bfloat16": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        peer: Any = transformers_model(model)
        peer.save_pretrained(directory)
        del peer
        (directory / "prompts.json").write_text(json.dumps(prompts))
        for turn in range(options.repeats):
            rates["ours"].append(asyncio.run(engine._ours(cell, model, "cpu", prompts)))
            for dtype in ("float32", "bfloat16"):
                rates[dtype].append(theirs(directory, dtype, options.new))
            print(f"turn {turn + 1}: " + ", ".join(f"{side} {own[-1]:.1f}" for side, own in rates.items()), flush=True)
    figures = {f"{side}_tokens_s": statistics.median(own) for side, own in rates.items()}
    figures |= {f"{side}_{which.__name__}": which(own) for side, own in rates.items() for which in (min, max)}
    ratio = figures["ours_tokens_s"] / max(figures["float32_tokens_s"], figures["bfloat16_tokens_s"])
    for key, value in figures.items():
        print(f"{key:24} {value:10.1f}")
    finish("engine_vllm", figures | {"times_vllm": ratio}, {"times_vllm": at_least(ratio, 2)})


if __name__ == "__main__":
    main()
