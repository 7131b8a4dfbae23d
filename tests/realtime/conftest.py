from tests.runs.conftest import make_run, run  # noqa: F401
