"""What publishing a second form costs the trainer and the link. `python -m benchmarks.forms`

Synthetic updates: every weight moves by ± the learning rate, as with Adam's first steps. A version is published in
bf16, which is the trainer's own form, then in fp8 and nvfp4, which are made from it. Seconds are CPU seconds. Exports
are on the trainer's own thread; publishing runs beside the next step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.output import finish
from rollmill.models.config import ModelConfig
from rollmill.models.counts import all_parameters
from rollmill.models.decoder import Decoder
from rollmill.storage.objects import Objects
from rollmill.training.config import TrainingConfig
from rollmill.training.single import WHOLE
from rollmill.weights.reading.weight_store import WeightStore

FORMS = ("bf16", "fp8", "nvfp4")
RATES = (1e-6, 1e-5)
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    experts=0,
    max_context=2048,
    tie_embeddings=True,
)


def measure(config: ModelConfig, directory: str) -> dict[str, float]:
    model, draw = Decoder(config), torch.Generator().manual_seed(1)
    model.initialise(0)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    store, training, figures = WeightStore(Objects.open(Path(directory))), TrainingConfig(snapshot_every=1000), {}
    publishers = {form: WHOLE.publisher(model, store, "main", form, training) for form in FORMS}
    print("lr       form     export    publish   delta         of bf16's")
    for number, rate in enumerate((0.0, *RATES)):
        _update(model, masters, rate, draw)
        for form, publisher in publishers.items():
            times = [time.process_time()]
            exported = publisher.export(model)
            times.append(time.process_time())
            manifest = publisher.publish(number, exported, None, {})
            times.append(time.process_time())
            if manifest.delta is None:  # version 0
                continue
            key, size = f"{form}_{rate:g}", manifest.delta.bytes
            figures |= {f"export_s_{key}": times[1] - times[0], f"publish_s_{key}": times[2] - times[1]}
            figures |= {f"bytes_{key}": size, f"ratio_{key}": size / figures.get(f"bytes_bf16_{rate:g}", size)}
            took = f"{times[1] - times[0]:6.2f} s  {times[2] - times[1]:6.2f} s"
            print(f"{rate:<8g} {form:6} {took} {size / 1e6:8.2f} MB {figures[f'ratio_{key}']:10.2f}", flush=True)
    return figures


@torch.no_grad()
def _update(model: Decoder, masters: dict[str, torch.Tensor], rate: float, draw: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        masters[name] += rate * torch.randn(parameter.shape, generator=draw).sign()
        parameter.copy_(masters[name].bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 layers instead of 30")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    config = SMOLLM2.model_copy(update={"layers": 3, "vocab_size": 4096}) if quick else SMOLLM2
    print(f"{all_parameters(config) / 1e6:.1f}M parameters, synthetic updates")
    with tempfile.TemporaryDirectory() as directory:
        finish("forms", measure(config, directory), {})


if __name__ == "__main__":
    main()
