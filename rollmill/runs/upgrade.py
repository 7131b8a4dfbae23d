"""Configurations of older releases. A run.json is brought up to date; a file is told where its settings are now."""

from __future__ import annotations

from typing import Any

from rollmill.errors import ConfigError

DEMO = "rollmill.demo"
# settings of 0.1.0 that a stage has now
MOVED = ("line", "steps", "groups_per_step", "group_size", "max_staleness", "midtrain", "training", "rl")


def bring_up_to_date(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the words of this release."""
    config = dict(config)
    if isinstance(config.get("tasks", ""), str):  # 0.1.0 had no kinds: its tasks are those of the demo
        config["tasks"] = {"kind": f"{DEMO}.micro_repos:MicroRepos"}
    if "stages" not in config:
        config = _with_stages(config)
    if "regions" in config:  # had one engine each
        config["engines"] = [{"region": region} for region in config.pop("regions")]
    return config


def _with_stages(config: dict[str, Any]) -> dict[str, Any]:
    """A run had at most two stages: mid-training on the demo's demonstrations, then RL. They keep their lines.

    A run that only serves had no mid-training, no RL steps and no tasks: it has no stages.
    """
    line, steps = config.pop("line", "main"), config.pop("steps")
    midtrain, training, rl = config.pop("midtrain", None), config.pop("training", {}), config.pop("rl", {})
    names = ("groups_per_step", "group_size", "max_staleness")
    pace = {name: config.pop(name) for name in names if name in config}
    # `objective` is the name of `loss` in 0.1.0; the first reward says what is solved
    rl = {"loss" if name == "objective" else name: value for name, value in rl.items() if name != "solved_at"}
    stages: list[dict[str, Any]] = []
    if midtrain is not None:
        sources = [{"kind": f"{DEMO}.demonstrations:Demonstrations"}]
        stages.append({"kind": "midtrain", "name": f"{line}-base", "sources": sources, **midtrain})
    if midtrain is not None or steps or config.get("tasks") is not None:
        stages.append({"kind": "rl", "name": line, "steps": steps, "training": training, **pace, **rl})
    tokenizer = None
    if config.get("checkpoint") is None and config.get("start") is None:
        tokenizer = f"{DEMO}.tokenizer:demo_tokenizer"
    return {**config, "stages": stages, "tokenizer": tokenizer}


def refuse_moved(tree: dict[str, Any]) -> None:
    """Raise ConfigError for a setting of an early configuration that is now in a stage or in [[engines]], and for
    [trainer], which one may expect beside [gateway] and [dispatcher]."""
    if "trainer" in tree:
        raise ConfigError(
            "there is no section [trainer]: every stage has its own settings of the trainer",
            hint="ranks, with one GPU each: stages.rl.training.ranks=2; the nodes for it: labels.trainer in [cluster]",
        )
    if "regions" in tree:
        raise ConfigError(
            "'regions' is replaced by [[engines]]",
            hint='one table per region: [[engines]] region = "home"; or engines=[{region="home"}]',
        )
    moved = [name for name in MOVED if name in tree]
    if moved:
        where = {"midtrain": '[[stages]] kind = "midtrain"', "rl": '[[stages]] kind = "rl"', "line": "stages.rl.name"}
        raise ConfigError(
            f"{moved[0]!r} is a setting of a stage",
            hint=f"write {where.get(moved[0], f'stages.rl.{moved[0]}')}; CHANGELOG.md lists the settings that moved",
        )
