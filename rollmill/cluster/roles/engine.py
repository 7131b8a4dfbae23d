"""An engine that follows the line, or stays at one version. Outside the home region it mirrors the home store."""

from __future__ import annotations

from rollmill.cluster.run import RunDirectory
from rollmill.inference.server import serve_engine
from rollmill.storage.objects import Objects
from rollmill.weights.reading.store import WeightStore
from rollmill.weights.regions.mirror import Mirror


def main(run: RunDirectory, region: str, version: str | None = None) -> None:
    own = Objects.open(run.store_path(region))
    mirror = None
    if region != run.config.regions[0]:
        mirror = Mirror(Objects.open(run.url("store"), token=run.store_token), own, region)
    serve_engine(
        run.config.engine,
        run.config.model,
        WeightStore(own),
        line=run.config.line,
        mirror=mirror,
        pinned=int(version) if version else None,
        name=f"engine-{region}",
        region=region,
        port=run.ports[f"engine-{region}"],
        device=run.config.device,
        form=run.config.form,
        token=run.engine_token,
    )
