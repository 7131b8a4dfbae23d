"""Real processes for tests, forked from one that has imported what each would import for seconds and done nothing else.

Python has one such server for a whole test run, and it imports the list it was last given before its start: so there
is one list, and it is here.
"""

from __future__ import annotations

import multiprocessing

from rollmill.runs.free_ports import free_ports

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "pytest",
        "tests.gateway.serve",
        "tests.training.worker",
        "tests.training.parallel.cases",
        "rollmill.training.parallel.many_ranks",
        "rollmill.trajectories.ledger",
        "rollmill.storage.directory_store",
        "rollmill.weights.reading.chunks",
        "torch._dynamo",  # torch imports it when a rank shards a model
        "torch.profiler",
        "alembic.command",
        "psycopg",
        "sqlalchemy.dialects.sqlite",
        "sqlalchemy.dialects.postgresql",
        "tests.freeze",  # the last one
    ]
)


def free_port() -> int:
    return free_ports(1)[0]
