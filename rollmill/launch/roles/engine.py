"""An engine of a run. In training it follows the line of a stage; outside the home region it mirrors the home store.

What it serves is given by its arguments: KIND NAME FORM, for example `line rl bf16`, `version rl@7 bf16` or
`channel live bf16`. An engine of a service reads the home store.
"""

from __future__ import annotations

from rollmill.inference.engine import EngineContext
from rollmill.inference.joining import Joining
from rollmill.inference.server import serve_engine
from rollmill.kinds import build
from rollmill.runs.prepare import need_tokenizer
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.addresses import any_gateway
from rollmill.runs.trust import server_tls, trusting
from rollmill.storage.objects import Objects
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.mirror import Mirror


def main(run: RunDirectory, engine_name: str, kind: str, name: str, form: str) -> None:
    line, _, number = name.partition("@")
    spec = run.config.engine_spec(engine_name)
    store, mirror, engine, region = run.objects(), None, spec.role, spec.region
    if run.service_of is not None:
        engine = f"{run.path.name}-{engine}"  # leases are held by name: not by that of the training's engine
    elif region != run.config.regions[0]:
        home = store if run.config.store else Objects.open(run.url("store"), token=run.secrets["store_token"])
        store = Objects.open(run.store_path(region))
        mirror = Mirror(home, store, region)
    context = EngineContext(
        name=engine,
        region=region,
        model=run.config.model_of(_line(run, WeightStore(store), kind, name)),
        settings=run.config.engine,
        device="cpu" if spec.section.gpus == 0 else run.config.device,
        form=form,
        exact=run.config.numerics == "exact",
        tokenizer=need_tokenizer(run),
    )
    serve_engine(
        context,
        WeightStore(store),
        line=line if kind != "channel" else run.config.line,
        mirror=mirror,
        pinned=int(number) if kind == "version" else None,
        channel=name if kind == "channel" else None,
        port=run.ports.get(spec.role, 0),
        host="127.0.0.1" if run.ports else run.host,  # on a node of a cluster: its address there
        tls=server_tls(run),
        token=run.secrets["engine_token"],
        kind=build(spec.section),
        joining=Joining(
            any_gateway(run),
            run.secrets["engine_token"],
            spec.section.kind,
            run.config.engine.max_batch,
            trusting(run),
        ),
    )


def _line(run: RunDirectory, weights: WeightStore, kind: str, name: str) -> str:
    """The line whose model is served. A channel has the model of the version that it points at now."""
    version = Channels(weights.objects).get(name) if kind == "channel" else None
    return version.line if version else name.partition("@")[0]
