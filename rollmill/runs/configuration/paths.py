"""Paths in the configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.kinds import resolve_paths
from rollmill.training.stage import StageSection


def with_absolute_paths(tree: dict[str, Any]) -> dict[str, Any]:
    """Paths in [[stages]], of the tokenizer, the chat template and [tls]: relative ones start in `modules`."""
    directory = Path(tree["modules"]) if isinstance(tree.get("modules"), str) else Path.cwd()
    tokenizer, stages, chat = tree.get("tokenizer"), tree.get("stages"), tree.get("chat")
    if isinstance(stages, list):
        tree = {**tree, "stages": [resolve_paths(StageSection, stage, directory) for stage in stages]}
    if isinstance(tokenizer, str) and tokenizer.endswith(".json"):
        tree = {**tree, "tokenizer": str(directory.absolute() / Path(tokenizer).expanduser())}
    if isinstance(chat, dict) and isinstance(chat.get("template"), str):
        tree = {**tree, "chat": {**chat, "template": str(directory.absolute() / Path(chat["template"]).expanduser())}}
    if isinstance(tls := tree.get("tls"), dict):
        absolute = {
            name: str(directory.absolute() / Path(path).expanduser())
            for name, path in tls.items()
            if isinstance(path, str)
        }
        tree = {**tree, "tls": {**tls, **absolute}}
    return tree
