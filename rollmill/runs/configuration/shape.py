"""The [model] of a run that starts from a checkpoint or from another run: read from there, and maybe made shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError


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
