"""A run that starts from a checkpoint: what is derived, what is refused, what is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.chat.formats.choice import format_beside
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import load_config
from rollmill.errors import ConfigError, RollmillError, WeightsError
from rollmill.launch.roles import trainer
from rollmill.runs.import_checkpoint import check_checkpoint, import_checkpoint
from rollmill.runs.prepare import prepare
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.files.companions import kept_companions
from rollmill.weights.reading.weight_store import WeightStore
from tests.gateway.test_recorder import full_disk
from tests.models.checkpoints import load_checkpoint
from tests.runs.checkpoints import MIDTRAIN_AND_RL, RL, TASKS, chat_tokenizer, make_chat_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_chat_checkpoint(directory)
    return directory


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def config_of(checkpoint: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, None, ["name=small", RL, TASKS, f"checkpoint={checkpoint}", *overrides])


# --- what is derived


def test_the_model_is_what_the_checkpoint_says(checkpoint: Path) -> None:
    config = config_of(checkpoint, "model.max_context=100")
    expected, _ = load_checkpoint(checkpoint)
    assert config.model == expected.model_copy(update={"max_context": 100})
    assert config_of(checkpoint).model == expected
    assert (config.line, config.checkpoint_line) == ("rl", "rl-checkpoint")
    check_checkpoint(config)


def test_a_relative_path_becomes_absolute(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert config_of(Path("model")).checkpoint == str(checkpoint)


def test_without_a_checkpoint_there_must_be_a_stage_before_rl_and_a_tokenizer() -> None:
    for stages in (RL, "seed=0"):
        with pytest.raises(ConfigError, match=r"without a checkpoint needs a stage before RL"):
            load_config(RunConfig, None, ["name=small", stages, TASKS, "model.vocab_size=512"])
    with pytest.raises(ConfigError, match=r"without a checkpoint needs a `tokenizer`"):
        load_config(RunConfig, None, ["name=small", MIDTRAIN_AND_RL, TASKS, "model.vocab_size=512"])
    with pytest.raises(ConfigError, match="model: Field required"):
        load_config(RunConfig, None, ["name=small", MIDTRAIN_AND_RL, TASKS])


def test_a_run_is_opened_when_its_checkpoint_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", config_of(checkpoint, "model.max_context=100"))
    shutil.rmtree(checkpoint)
    assert RunDirectory.open(run.path) == run


# --- what is refused


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("model.width=64",), r"model\.width is set[\s\S]*only set max_context"),
        (("model.max_context=513",), r"max_context is 513.*at most 512[\s\S]*set it to less"),
        (("model.max_context=long",), r"model\.max_context: Input should be a valid integer"),
        (("model.max_context=0",), r"model\.max_context: Input should be greater than 0"),
    ],
)
def test_a_model_section_that_contradicts_the_checkpoint(
    checkpoint: Path, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config_of(checkpoint, *overrides)


def test_a_whole_model_section_that_differs(checkpoint: Path) -> None:
    same = config_of(checkpoint)
    whole = [f"model.{key}={json.dumps(value)}" for key, value in same.model.model_dump(mode="json").items() if value]
    config = config_of(checkpoint, *whole, "model.layers=3")
    with pytest.raises(ConfigError, match=r"\[model\] is not what"):
        check_checkpoint(config)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory .*absent[\s\S]*rollmill model get"):
        config_of(tmp_path / "absent")


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        config_of(checkpoint)


def test_an_unknown_architecture(checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(ConfigError, match=r"'MambaForCausalLM' .* is not known[\s\S]*LlamaForCausalLM"):
        config_of(checkpoint)


def drop_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()


def drop_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def drop_a_shard(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    placed = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    save_file({name: tensors[name] for name in tensors if "00001" in placed[name]}, checkpoint / min(placed.values()))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def reshape(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31, dtype=torch.bfloat16)
    save_file(tensors, checkpoint / "model.safetensors")


def grow_tokenizer(checkpoint: Path) -> None:
    chat_tokenizer(size=320).save(checkpoint / "tokenizer.json")


def unknown_format(checkpoint: Path) -> None:
    chat_tokenizer(special=("<s>", "</s>")).save(checkpoint / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (drop_tokenizer, r"no tokenizer\.json[\s\S]*save_pretrained"),
        (drop_weights, r"no safetensors files in"),
        (drop_a_shard, r"lacks 1 of 2 shards: model-00002-of-00002\.safetensors"),
        (reshape, r"model\.norm\.weight has shape \[31\], but \[32\] by config\.json"),
        (grow_tokenizer, r"tokenizer .* has 320 tokens, but its model only 300"),
        (unknown_format, r"no chat format that is known[\s\S]*chat\.template"),
    ],
)
def test_a_checkpoint_that_cannot_be_trained(checkpoint: Path, damage: Callable[[Path], None], complaint: str) -> None:
    config = config_of(checkpoint)
    damage(checkpoint)
    with pytest.raises(RollmillError, match=complaint):
        check_checkpoint(config)


def edit_config(checkpoint: Path, **change: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


# --- what is kept


def test_the_import_is_version_0_and_happens_once(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint)
    weights = WeightStore(Objects.open(tmp_path / "store"))
    assert import_checkpoint(config, weights) == Version("rl-checkpoint", 0)
    digest = weights.manifest(Version("rl-checkpoint", 0)).digest
    kept = kept_companions(weights.objects, "rl-checkpoint")
    for name in ("config.json", "tokenizer.json"):
        assert kept[name] == (checkpoint / name).read_bytes()
    shutil.rmtree(checkpoint)
    assert import_checkpoint(config, weights) == Version("rl-checkpoint", 0)
    assert weights.manifest(Version("rl-checkpoint", 0)).digest == digest
    assert weights.numbers("rl-checkpoint") == [0]


def test_an_import_without_room_says_where_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint)
    weights = WeightStore(Objects.open(tmp_path / "store"))
    with full_disk(1 << 12), pytest.raises(WeightsError, match=r"temporary file of \d+ bytes[\s\S]*TMPDIR"):
        import_checkpoint(config, weights)
    assert weights.numbers("rl-checkpoint") == []
    assert import_checkpoint(config, weights) == Version("rl-checkpoint", 0)


def test_an_import_that_was_interrupted_is_done_again(checkpoint: Path, tmp_path: Path) -> None:
    """The files beside the weights are kept first. If the version is missing, the import is done again."""
    config = config_of(checkpoint)
    weights = WeightStore(Objects.open(tmp_path / "store"))
    import_checkpoint(config, weights)
    for key in weights.objects.list("weights"):
        weights.objects.delete(key)
    assert not weights.exists(Version("rl-checkpoint", 0))
    import_checkpoint(config, weights)
    assert weights.exists(Version("rl-checkpoint", 0))


def test_mid_training_starts_from_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = (MIDTRAIN_AND_RL, "stages.midtrain.steps=2", "stages.midtrain.documents_per_step=2", "device=cpu")
    run = RunDirectory.create(tmp_path / "runs", config_of(checkpoint, "tools_in_prompt=false", *settings))
    trainer.main(run, "midtrain")
    weights = WeightStore(Objects.open(run.home_store))
    first, last = (weights.manifest(Version("midtrain", number)) for number in (0, weights.head("midtrain") or 0))
    assert first.digest == weights.manifest(Version("rl-checkpoint", 0)).digest != last.digest
    assert first.origin == Version("rl-checkpoint", 0) and last.number == 1
    assert run.tokenizer.read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    shutil.rmtree(checkpoint)
    run.tokenizer.unlink()
    trainer.main(run, "midtrain")  # already done: it needs nothing but the run's own store
    assert run.tokenizer.is_file() and weights.head("midtrain") == 1


# --- the checkpoint's own chat template


def use_template(checkpoint: Path, **described: object) -> str:
    """Llama 3.1's special tokens in place of ChatML's. Returns its template."""
    special = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    chat_tokenizer(special).save(checkpoint / "tokenizer.json")
    edges = {"bos_token": {"content": special[0]}, "eos_token": special[1]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**edges, **described}))
    return (Path(__file__).parents[1] / "chat/templates/llama3.1.jinja").read_text()


def test_a_run_uses_the_template_of_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    template = use_template(checkpoint)
    use_template(checkpoint, chat_template=[{"name": "default", "template": template}])
    settings = (MIDTRAIN_AND_RL, "stages.midtrain.steps=1", "stages.midtrain.documents_per_step=2", "device=cpu")
    run = RunDirectory.create(tmp_path / "runs", config_of(checkpoint, "tools_in_prompt=false", *settings))
    trainer.main(run, "midtrain")
    shutil.rmtree(checkpoint)
    for path in (run.tokenizer, run.tokenizer.parent / "tokenizer_config.json"):
        path.unlink()
    trainer.main(run, "midtrain")  # the files come back from the run's own store
    tokenizer = Tokenizer.load(run.tokenizer)
    format = format_beside(run.tokenizer, tokenizer)
    text = tokenizer.decode(format.render_start([{"role": "user", "content": "Fix add."}], []))
    assert format.name == "template" and text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>")


def test_a_template_can_be_named_and_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(use_template(checkpoint))
    config = config_of(checkpoint)
    with pytest.raises(ConfigError, match=r"no chat template[\s\S]*chat\.template = FILE"):
        check_checkpoint(config)
    named = config_of(checkpoint, f"chat.template={file}", "chat.calls=json")
    check_checkpoint(named)
    run = RunDirectory.create(tmp_path / "runs", named)
    prepare(run, WeightStore(Objects.open(run.home_store)))
    file.unlink()
    prepare(run, WeightStore(Objects.open(run.home_store)))
    format = format_beside(run.tokenizer, Tokenizer.load(run.tokenizer), named.chat.kept)
    assert isinstance(format, TemplateFormat) and format.family.name == "json"


def test_a_template_that_cannot_be_used(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    for template, reason in {"{% if": "cannot be used", "{{ messages[0].role }}": "text of a user message"}.items():
        use_template(checkpoint, chat_template=template)
        with pytest.raises(ConfigError, match=reason):
            check_checkpoint(config)
    use_template(checkpoint, chat_template=7)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template"):
        check_checkpoint(config)
