"""Settings that were moved or removed: whoever still gives one is told what to write instead."""

from __future__ import annotations

from typing import Any

from rollmill.errors import ConfigError

# settings of a run that a stage has now
MOVED = ("line", "steps", "groups_per_step", "group_size", "max_staleness", "midtrain", "training", "rl")


def refuse_moved(tree: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that is now in a stage or in [[engines]] or is gone, and for [trainer], which one
    may expect beside [gateway] and [dispatcher]."""
    rollouts = tree.get("rollouts")
    if isinstance(rollouts, dict) and "simulated_tool_seconds" in rollouts:
        raise ConfigError(
            "'simulated_tool_seconds' of [rollouts] was removed: tools take as long as they take",
            hint="leave it out; `harness.kind` may be a class that waits, as SlowTools in benchmarks/async_speedup.py",
        )
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
