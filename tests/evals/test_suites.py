"""Suites of [[evals.suites]]: their settings, their results apart, and their bounds in the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.cli.evaluate import limited_suite
from rollmill.config import load_config, validate_config
from rollmill.environments.environment import build_tasks
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import ConfigError, RollmillError
from rollmill.evals.evaluation import Conduct
from rollmill.evals.gate import GateVerdict
from rollmill.evals.gate_config import GateConfig
from rollmill.evals.gate_suites import judge_suites
from rollmill.evals.suite import EvalConfig, SuiteConfig
from rollmill.realtime.gate_run import suite_digest
from rollmill.reference import to_toml
from rollmill.runs.configuration.settings import RunConfig
from rollmill.runs.preflight import check_tasks
from tests.environments.test_several_environments import RUN, TWO
from tests.evals.test_gate import SOLVES, attempts
from tests.launch.served import published_run

ONE = f'{RUN}[tasks]\nkind = "jsonl"\npath = "repairs.jsonl"\n'
OWN = '[[evals.suites]]\nname = "hard"\ntasks = {kind = "jsonl", path = "hard.jsonl", heldout_share = 1.0}\n'


def read(toml: str, directory: Path, *overrides: str) -> RunConfig:
    """The run, with files of two tasks each: one is held out."""
    for name in ("repairs", "functions", "hard"):
        lines = [{"id": f"{name}-{split}", "instruction": "Do it.", "split": split} for split in ("train", "heldout")]
        if name == "hard":
            lines = [{"id": "repairs-heldout", "instruction": f"Do {name}."}]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (directory / "run.toml").write_text(
        toml.replace("evals = {family_tasks = 0}\n", "") + "[evals]\nfamily_tasks = 0\n"
    )
    return load_config(RunConfig, directory / "run.toml", overrides)


def test_suites_are_further_cells_with_tasks_of_their_own(tmp_path: Path) -> None:
    config = read(f'{ONE}{OWN}attempts = 2\n[[evals.suites]]\nname = "cool"\ncount = 5\ntemperature = 0.2\n', tmp_path)
    tasks, cells = build_tasks(config), config.evals.cells(build_tasks(config))
    assert [(cell.name, cell.split, cell.mode, cell.attempts, cell.temperature) for cell in cells] == [
        ("heldout", "heldout", "sampled", 4, 1.0),
        ("heldout", "heldout", "greedy", 1, 0.0),
        ("hard", "heldout", "sampled", 2, 1.0),
        ("cool", "heldout", "sampled", 4, 0.2),
    ]
    assert [[task.instruction for task in cell.chosen(tasks)] for cell in cells[1:]] == [
        ["Do it."],
        ["Do hard."],
        ["Do it."],
    ]
    assert [cell.name for cell in config.evals.while_training().cells(tasks)] == ["heldout", "hard", "cool"]
    limited = limited_suite(config.evals, 1, 7).suites
    assert [(each.count, each.attempts) for each in limited] == [(1, 7), (1, 7)]
    assert validate_config(RunConfig, config.model_dump(mode="json"), "run.json") == config
    assert load_config(RunConfig, tmp_path / "run.toml", ["evals.suites.hard.count=3"]).evals.suites[0].count == 3
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(RunConfig, tmp_path / "again.toml") == config


def test_a_suite_of_an_environment_is_graded_as_that_one(tmp_path: Path) -> None:
    two = f'{TWO}{OWN}environment = "repairs"\n[[evals.suites]]\nname = "some"\nenvironment = "functions"\n'
    config = read(two, tmp_path)
    tasks = check_tasks(config)
    chosen = [cell.chosen(tasks) for cell in config.evals.cells(tasks)[2:]]
    assert [[(task.id, task.environment) for task in of] for of in chosen] == [
        [("repairs/repairs-heldout", "repairs")],
        [("functions/functions-heldout", "functions")],
    ]


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (f"{ONE}{OWN}{OWN}", "two suites are called 'hard': give each its own `name`"),
        (f"{ONE}{OWN.replace('hard', 'fresh')}", "give the suite another name"),
        (f'{ONE}{OWN}environment = "repairs"\n', "evals.suites.hard: environment = 'repairs' is none of the run"),
        (f'{TWO}{OWN}environment = "repair"\n', "environment = 'repair' is none of the run"),
        (f"{TWO}{OWN}", "`tasks` says not which one plays it"),
        (f"{ONE}{OWN}bounds = {{max_qualty_loss = 0.1}}\n", "'max_qualty_loss' is no bound; did you mean 'max_quality"),
        (f"{ONE}{OWN}bounds = {{max_quality_loss = -1}}\n", "max_quality_loss"),
        (f'{ONE}{OWN}split = "large"\n', "evals.suites.hard: there are no tasks in the split 'large'"),
        (f"{ONE}{OWN}".replace(", heldout_share = 1.0", ""), "`heldout_share = 1.0` in the suite's own `tasks`"),
        (f"{ONE}{OWN}".replace("hard.jsonl", "gone.jsonl"), "gone.jsonl cannot be read"),
        (f"{ONE}{OWN}atempts = 2\n", "did you mean 'evals.suites.0.attempts'"),
    ],
)
def test_what_is_refused_names_the_suite_and_the_remedy(toml: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RollmillError) as raised:
        check_tasks(read(toml, tmp_path))
    assert says in f"{raised.value.message} {raised.value.hint}"


def test_further_rounds_of_a_suite_go_on_where_it_stopped() -> None:
    """Each cell by its own attempts: no draw is made twice, and none is left out."""
    tasks = ListedTasks([Task("a", "Do it.", split="heldout")])
    config = EvalConfig(attempts=2, greedy=False, family_tasks=0, suites=(SuiteConfig(name="more", attempts=3),))
    for rounds in ((range(1), range(1, 2), range(2, 4)), (range(4),)):
        for cell in config.cells(tasks):
            made = [cell.repeated(each) for each in rounds]
            assert [n for each in made for n in range(each.first, each.first + each.attempts)] == [
                *range(4 * cell.attempts)
            ]


# --- the gate

NAMES = ("rl@1", "rl@2")
CONFIG = GateConfig(alpha=0.5, least_tasks=1)
BOUNDED = SuiteConfig(name="hard", bounds={"max_quality_loss": 0.01})


def both(rate: float, hard: float) -> dict[str, list[Conduct]]:
    main, suite = attempts(rate), attempts(hard)
    return {**{f"heldout {id}": of for id, of in main.items()}, **{f"hard {id}": of for id, of in suite.items()}}


def compare(candidate: dict[str, list[Conduct]], suite: SuiteConfig = BOUNDED) -> GateVerdict:
    return judge_suites(both(0.6, 0.6), candidate, CONFIG, NAMES, [suite])


def test_a_suite_that_loses_holds_what_the_others_would_promote() -> None:
    assert compare(both(0.6, 0.6)).promotes
    verdict = compare(both(0.6, 0.55))
    failing = [metric.name for metric in verdict.metrics if metric.holds is False]
    assert not verdict.promotes and failing[0] == "hard: quality"
    assert verdict.reasons[0].startswith("hard: quality: difference") and "at least -0.01" in verdict.reasons[0]
    assert compare(both(0.6, 0.6)).tasks == 200
    # a loss of the run's own suite counts under [gate], and a gain of the other one does not make up for it
    verdict = compare(both(0.5, 0.9))
    assert not verdict.promotes and all(reason.startswith(("quality", "tokens")) for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"max_more_seconds": 9.0}, "hard: max_more_seconds is set, and latency was not measured"),
        ({"max_pass_k_loss": 1.0}, "hard: max_pass_k_loss is set, and pass@k was not measured"),
        ({"offline_bar": 0.99}, "hard: bar: solve rate 0.59"),
        ({"least_tasks": 101}, "hard: 100 tasks are too few"),
    ],
)
def test_a_bound_that_is_not_measured_or_not_kept_holds(bounds: dict[str, float], says: str) -> None:
    once = {task: made[:1] for task, made in both(0.6, 0.6).items()}
    suite = SuiteConfig(name="hard", bounds=bounds)
    verdict = judge_suites(once, once, CONFIG, NAMES, [suite], beside=False)
    assert not verdict.promotes and len(verdict.reasons) == 1 and verdict.reasons[0].startswith(says), verdict.reasons


def test_a_suite_that_nothing_was_earned_on_is_not_passed() -> None:
    verdict = judge_suites(both(0.6, 0.0), both(0.6, 0.0), CONFIG, NAMES, [BOUNDED])
    assert "hard: quality was not measured" in verdict.reasons[0] and not verdict.promotes
    lost = {**attempts(0.6), "hard a": [SOLVES]}
    with pytest.raises(RollmillError, match="no task that both versions attempted"):
        judge_suites({f"heldout {id}": of for id, of in attempts(0.6).items()}, lost, CONFIG, NAMES, [BOUNDED])


def test_the_yardstick_is_compared_suite_by_suite() -> None:
    verdict = judge_suites(both(0.6, 0.6), both(0.6, 0.6), CONFIG, NAMES, [BOUNDED], yardstick=("rl@0", both(0.6, 0.9)))
    assert [each.name for each in verdict.metrics if each.holds is False] == ["hard: yardstick"]
    first = judge_suites(both(0.6, 0.6), both(0.6, 0.6), CONFIG, ("rl@1", "rl@1"), [BOUNDED])
    assert first.promotes and [each.name for each in first.metrics] == ["bar", "hard: bar"]


def test_a_bound_changes_no_measurement_and_a_suite_does(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1)
    suites = [(), (SuiteConfig(name="a"),), (SuiteConfig(name="a", bounds={"offline_bar": 0.5}),)]
    digests = [suite_digest(run, run.config.evals.model_copy(update={"suites": each})) for each in suites]
    assert digests[0] != digests[1] == digests[2]
    with pytest.raises(ConfigError, match="none of the run"):
        suite_digest(run, run.config.evals.model_copy(update={"suites": (SuiteConfig(name="a", environment="b"),)}))
