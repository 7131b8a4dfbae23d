"""A run that began from random weights ends as a directory that others, and a next run, can start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollmill.chat.tokenizer import Tokenizer
from rollmill.cli.main import app
from rollmill.config import load_config, validate_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host, to_host
from rollmill.runs.import_checkpoint import check_checkpoint, import_checkpoint
from rollmill.runs.prepare import keep_tokenizer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Publisher, WeightStore
from tests.models.checkpoints import our_logits, their_logits

MICRO = Path(__file__).parents[2] / "examples" / "micro.toml"


@torch.no_grad()
def export(config: RunConfig, directory: Path) -> tuple[Decoder, Tokenizer, Path]:
    """What the first version of a run's base line becomes, with the weights and the tokenizer it was made of."""
    run = RunDirectory.create(directory, config)
    objects = Objects.open(run.home_store)
    keep_tokenizer(run, objects)
    model = Decoder(config.model)
    model.initialise(config.seed)
    tensors = to_host(model.state_dict())
    load_host(model, tensors)  # as bf16 rounds them
    Publisher(WeightStore(objects), config.stages[0].name).publish(0, tensors)
    out = directory / "exported"
    told = CliRunner().invoke(app, ["weights", "export", str(run.path), f"{config.stages[0].name}@0", str(out)])
    assert told.exit_code == 0, told.output
    return model, Tokenizer.load(run.tokenizer), out


@pytest.mark.parametrize("source", [DEMO, MICRO], ids=["demo", "micro"])
@torch.no_grad()
def test_an_export_loads_everywhere(source: Path, tmp_path: Path) -> None:
    import transformers

    model, tokenizer, out = export(load_config(RunConfig, source), tmp_path)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.arange(model.config.max_context) * 7 % model.config.vocab_size
    torch.testing.assert_close(our_logits(model, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)
    words = transformers.AutoTokenizer.from_pretrained(out)
    text = "def add(a, b):\n    return a + b  # größer 123\n"
    assert words.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert words.decode(tokenizer.encode(text)) == text
    assert words.eos_token_id == theirs.config.eos_token_id == tokenizer.token_id("<end>")

    shown = CliRunner().invoke(app, ["model", "show", str(out)])
    assert shown.exit_code == 0 and "MixtralForCausalLM" in shown.output

    tree = {"name": "next", "checkpoint": str(out)}
    config = validate_config(RunConfig, tree, "next.toml")
    check_checkpoint(config)
    weights = WeightStore(Objects.open(tmp_path / "next"))
    assert import_checkpoint(config, weights) == Version("main-checkpoint", 0)
    again = Decoder(config.model)
    load_host(again, weights.hold(Version("main-checkpoint", 0), "bf16").tensors)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_could_not_leave_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"model\.shared_experts = 2: no Hugging Face layout has it"):
        load_config(RunConfig, DEMO, ["model.shared_experts=2"])
