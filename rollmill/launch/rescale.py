"""How many engines a run has: what [[engines]] says, or what `rollmill scale RUN engines=4` has said since.

The number is an object of the run's store, so the command may be given on any host that reaches the store. The
supervisor looks at it, starts the engines that are missing and stops those that are too many. If the host has too few
GPUs for them, it warns and keeps those that it has. An engine that stops leaves the gateway first; answers that it has
begun go on elsewhere with the tokens that it sampled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollmill import telemetry
from rollmill.config import override_config
from rollmill.errors import ConfigError, StorageError
from rollmill.inference.engine_sections import EnginesSection
from rollmill.kinds import build
from rollmill.launch.launcher import Cluster, Launcher
from rollmill.runs.run import RunConfig, RunDirectory

KEY = "cluster/scale.json"
LOOK_S = 1.0
MOST = 10_000


def read_scale(run: RunDirectory) -> dict[str, int]:
    """Region → how many engines of its first table were asked for."""
    home = run.existing_home()
    try:
        tree = json.loads(home.get(KEY)) if home is not None and home.head(KEY) is not None else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(tree, dict):
        return {}
    return {str(region): count for region, count in tree.items() if type(count) is int}


def scaled(run: RunDirectory, scale: Mapping[str, int]) -> RunDirectory:
    """The run with these numbers of engines."""
    config = with_counts(run.config, scale)
    return run if config is run.config else replace(run, config=config)


def with_counts(config: RunConfig, scale: Mapping[str, int]) -> RunConfig:
    tables = list(config.engines)
    for region, count in scale.items():
        index = next((index for index, table in enumerate(tables) if table.region == region), None)
        if index is not None:
            tables[index] = tables[index].model_copy(update={"count": count})
    if tables == list(config.engines):
        return config
    tree = {**config.model_dump(mode="json"), "engines": [table.model_dump(mode="json") for table in tables]}
    return override_config(RunConfig, tree, (), "the number of engines")


def ask_scale(run: RunDirectory, settings: list[str]) -> dict[str, int]:
    """Ask for numbers of engines: `engines=4` in the home region, `away=2` in another. Raises ConfigError if they make
    no sense. Returns the numbers of all regions."""
    scale = read_scale(run)
    for setting in settings:
        name, _, text = setting.partition("=")
        region = run.config.regions[0] if name == "engines" else name
        if region not in run.config.regions:
            raise ConfigError(
                f"{name!r} is no region of this run", hint=f"engines=N, or one of {', '.join(run.config.regions)}"
            )
        if not text.isdecimal() or not 1 <= int(text) <= MOST:
            raise ConfigError(f"{setting!r} is no number of engines", hint=f"for example {name}=4")
        scale[region] = int(text)
    config = with_counts(run.config, scale)
    _check_room(run.config, config)
    run.objects().put(KEY, json.dumps(scale).encode())
    return {table.region: table.count for table in reversed(config.engines)}


def _check_room(before: RunConfig, after: RunConfig) -> None:
    """Raises ConfigError if the run fits on this host, but not with the new number of engines."""
    cluster: Cluster = build(before.cluster)
    if cluster.elsewhere:
        return  # the supervisor checks
    try:
        cluster.check(before)
    except ConfigError:
        return  # the run is on another host: its supervisor checks
    cluster.check(after)


class Engines:
    """The engines of a stage. `adjust` keeps as many as the run should have. `target`: KIND NAME of what they serve."""

    def __init__(self, run: RunDirectory, launcher: Launcher, target: tuple[str, ...]) -> None:
        self._run, self._launcher, self._target = run, launcher, target
        self._now: RunDirectory | None = None  # the run with the engines that were started
        self._refused: Sequence[EnginesSection] | None = None  # what there was no room for
        self._looked = float("-inf")

    def adjust(self) -> None:
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            wanted = scaled(self._run, read_scale(self._run))
        except (StorageError, ConfigError):
            wanted = self._now or self._run  # the store does not answer now, or somebody wrote nonsense into it
        if self._now is not None and wanted.config.engines in (self._now.config.engines, self._refused):
            return
        try:
            self._launcher.rescale(wanted)
        except ConfigError as error:
            self._refused = wanted.config.engines
            telemetry.emit("warning", text=f"the engines stay as they are: {error}")
            if self._now is not None:
                return
            wanted = self._run
            self._launcher.rescale(wanted)
        running = self._launcher.running()
        for spec in wanted.config.engine_specs:
            if spec.role not in running:
                arguments = (*self._target, wanted.config.form_of(spec))
                self._launcher.start(spec.role, *arguments, threads=wanted.config.engine.threads, service=True)
        if self._now is not None:
            telemetry.emit("scale", engines=len(wanted.config.engine_specs), before=len(self._now.config.engine_specs))
        self._now = wanted
