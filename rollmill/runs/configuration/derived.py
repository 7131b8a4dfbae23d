"""What is filled in before a configuration is validated: absolute paths, and [model] of a checkpoint or another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError
from rollmill.kinds import resolve_paths
from rollmill.training.stage import StageSection


def with_absolute_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """Paths in [[stages]], of the tokenizer, the chat template and [tls]: relative ones start in `modules`."""
    directory = Path(tree["modules"]) if isinstance(tree.get("modules"), str) else Path.cwd()

    def absolute(table: dict[str, Any]) -> dict[str, Any]:
        paths = {name: path for name, path in table.items() if isinstance(path, str)}
        return {**table, **{name: str(directory.absolute() / Path(path).expanduser()) for name, path in paths.items()}}

    tokenizer, stages, chat, tls = (tree.get(name) for name in ("tokenizer", "stages", "chat", "tls"))
    if isinstance(stages, list):
        tree = {**tree, "stages": [resolve_paths(StageSection, stage, directory) for stage in stages]}
    if isinstance(tokenizer, str) and tokenizer.endswith(".json"):
        tree = {**tree, **absolute({"tokenizer": tokenizer})}
    if isinstance(chat, dict) and "template" in chat:
        tree = {**tree, "chat": {**chat, **absolute({"template": chat["template"]})}}
    if isinstance(tls, dict):
        tree = {**tree, "tls": absolute(tls)}
    return tree


def model_of_checkpoint(directory: Path) -> dict[str, Any]:
    """The [model] of a checkpoint."""
    from rollmill.models.huggingface.config import config_from_huggingface
    from rollmill.models.huggingface.files import CONFIG, read_json

    if not directory.is_dir():
        raise ConfigError(
            f"checkpoint: there is no directory {directory}", hint="`rollmill model get` makes one; see its --help"
        )
    return config_from_huggingface(read_json(directory / CONFIG), str(directory / CONFIG)).model_dump(mode="json")


def shortened(model: dict[str, Any], given: dict[str, Any], where: str) -> dict[str, Any]:
    """[model] as `where` has it, with `max_context` as given; and the context that it was made for."""
    strange = sorted(given.keys() - {"max_context"})
    if strange:
        raise ConfigError(
            f"model.{strange[0]} is set, but {where} decides it", hint="leave [model] out, or only set max_context"
        )
    longest = model["max_context"]
    wanted = given.get("max_context", longest)
    if isinstance(wanted, int) and wanted > longest:
        raise ConfigError(
            f"model.max_context is {wanted}, but {where} supports at most {longest}",
            hint="set it to less, or leave it out; stages.rl.max_context may be more",
        )
    return {"model": {**model, "max_context": wanted}, "trained_context": longest}
