from __future__ import annotations

import pytest
import typer

from rollmill.cli import doctor
from rollmill.cli.doctor import Check


@pytest.mark.slow
def test_every_check_says_what_it_found_and_what_to_do() -> None:
    checks = [check for probe in doctor.PROBES for check in probe()]
    names = [check.name for check in checks]
    assert {"Python", "torch", "GPU", "CPU threads", "memory", "disk", "machines (namespaces)", "SQLite", "git"} <= set(
        names
    )
    for check in checks:
        assert check.found
        assert check.status == "ok" or check.remedy, check


def test_something_missing_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = Check("torch", "missing", "not installed", "install it[now]")
    monkeypatch.setattr(doctor, "PROBES", (lambda: [missing],))
    with pytest.raises(typer.Exit) as error:
        doctor.doctor()
    assert error.value.exit_code == 1
    assert "install it[now]" in capsys.readouterr().out  # brackets are no markup
    monkeypatch.setattr(doctor, "PROBES", (lambda: [missing._replace(status="warn")],))
    doctor.doctor()
