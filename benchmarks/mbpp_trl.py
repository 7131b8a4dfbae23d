"""The peer of `benchmarks.mbpp`: TRL's GRPOTrainer with the same weights, problems, group size and learning rate.

    python -m benchmarks.mbpp_trl WORK [--seconds 220] [--steps N] [--continuous]

WORK is the directory of `benchmarks.mbpp`. The version that its RL began from is exported into WORK/sft. TRL generates
with transformers: `generate`, or its continuous batching with `--continuous`. Rewards are ours, in the same machines.
Settings that the two do not share stay at TRL's defaults, but for gradient checkpointing, which is off: faster, and
there is memory. Each step says its seconds, and how many of them were generation and rewards.

Time to the same reward: both curves are means of the last 1,024 samples of training problems, over the seconds since RL
began, compilation included and the loading of weights not. `--ours WORK` is the run that is compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.mbpp import Curve, curve, rl_figures, rollmill, run_in, seconds_to, sft_version, smoothed
from benchmarks.output import at_least, finish
from rollmill.config import load_config
from rollmill.environments.environment import build_tasks, open_environments
from rollmill.environments.episode import Episode
from rollmill.environments.harnesses.chat import files_of
from rollmill.environments.harnesses.turns import start
from rollmill.environments.reward import grade_episode
from rollmill.runs.run import RunConfig
from rollmill.telemetry import read_events

AT_ONCE = 64  # machines


class Grading:
    """Grades answers in machines, on an event loop of its own."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self.tasks = config, build_tasks(config)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._opened = open_environments(config)
        self._environments = asyncio.run_coroutine_threadsafe(self._opened.__aenter__(), self._loop).result()

    def __call__(self, ids: list[str], answers: list[str]) -> list[float]:
        return asyncio.run_coroutine_threadsafe(self._grade(ids, answers), self._loop).result()

    async def _grade(self, ids: list[str], answers: list[str]) -> list[float]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(id: str, answer: str) -> float:
            task = self.tasks.get(id)
            environment = self._environments.of(task)
            files = {path: text.encode("utf-8", "replace") for path, text in files_of(answer, task).items()}
            handed_in = {path: files[path] for path in task.paths if path in files}
            async with slots:
                episode = Episode(task, handed_in, environment.machines)
                return (await grade_episode(environment.grader, episode)).value

        return list(await asyncio.gather(*map(one, ids, answers)))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._opened.__aexit__(None, None, None), self._loop).result()


class Timed:
    """Seconds per step spent inside functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


def export(work: Path) -> Path:
    """The version after SFT as a directory that transformers reads."""
    run, version = sft_version(work)
    if not (work / "sft").exists():
        subprocess.run(rollmill("weights", "export", run, version, work / "sft"), check=True)
    return work / "sft"


def arguments_of(config: RunConfig, stage: Any, work: Path, steps: int, per_pass: int, continuous: bool) -> Any:
    import torch
    from trl import GRPOConfig

    batch, optimizer = stage.groups_per_step * stage.group_size, stage.training.optimizer
    per_pass = min(per_pass, batch)
    return GRPOConfig(
        output_dir=str(work / "trl"),
        max_steps=steps,
        num_generations=stage.group_size,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=batch // per_pass,  # one generation of the whole batch, then one update
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer.warmup_steps,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.max_grad_norm,
        max_completion_length=config.rollouts.max_answer_tokens,
        temperature=config.rollouts.temperature,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        use_transformers_continuous_batching=continuous,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )


def train(
    config: RunConfig, work: Path, model: Path, seconds: float, steps: int, per_pass: int, continuous: bool
) -> list[dict[str, float]]:
    """Returns what each step took and earned."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    stage: Any = config.stage("rl")
    grading, timed, rows = Grading(config), Timed(), list[dict[str, float]]()
    tasks: Any = grading.tasks
    prompt = config.harness.system_prompt  # type: ignore[attr-defined]
    asked = [{"prompt": start(tasks.get(id), prompt), "task": id} for id in tasks.train_ids()]
    began = time.time()
    solved: list[float] = []

    def reward(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        values = grading(task, [completion[0]["content"] for completion in completions])
        solved[:] = values
        return values

    class Told(TrainerCallback):
        at = time.perf_counter()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal began
            began = time.time()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not rows:
                self.at = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now = time.perf_counter()
            row = {
                "seconds": now - self.at,
                "solved": statistics.mean(solved),
                **timed.seconds,
                "at": time.time() - began,
            }
            self.at = now
            timed.seconds.clear()
            rows.append(row)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
            print(f"TRL step {state.global_step}: {shown}", flush=True)
            if time.time() - began > seconds:
                control.should_training_stop = True

    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=[timed.wrap("reward_s", reward)],
        args=arguments_of(config, stage, work, steps, per_pass, continuous),
        train_dataset=Dataset.from_list(asked),
        callbacks=[Told()],
    )
    trainer._generate_single_turn = timed.wrap("generation_s", trainer._generate_single_turn)
    trainer.train()
    grading.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("settings", nargs="*", help="settings laid over the recipe, as for benchmarks.mbpp")
    parser.add_argument("--seconds", type=float, default=220.0, help="no step begins after this")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ours", type=Path, help="the run of `benchmarks.mbpp` to compare with; not given: in WORK")
    parser.add_argument("--per-pass", type=int, default=128, help="trajectories in one forward pass of the trainer")
    parser.add_argument("--continuous", action="store_true", help="generate with transformers' continuous batching")
    given = parser.parse_intermixed_args()
    model = export(given.work)
    settings = [f'checkpoint="{model.absolute()}"', *given.settings]
    config = load_config(RunConfig, given.work / "run.toml", settings)
    stage: Any = config.stage("rl")
    rows = train(config, given.work, model, given.seconds, given.steps, given.per_pass, given.continuous)
    warm = rows[3:] or rows  # as in benchmarks.mbpp
    step = statistics.median(row["seconds"] for row in warm)
    generation = statistics.median(row["generation_s"] for row in warm)
    rewards = statistics.median(row["reward_s"] for row in warm)
    samples, seconds = stage.groups_per_step * stage.group_size, sum(row["seconds"] for row in warm)
    few = max(1, len(rows) // 6)
    figures = {
        "steps": len(rows),
        "step_s": step,
        "generation_s": generation,
        "reward_s": rewards,
        "step_without_generation_s": step - generation,
        "training_s": step - generation - rewards,
        "samples_per_s": samples * len(warm) / seconds,
        "samples_per_s_without_generation": samples * len(warm) / (seconds - sum(row["generation_s"] for row in warm)),
        "solved_first": statistics.mean(row["solved"] for row in rows[:few]),
        "solved_last": statistics.mean(row["solved"] for row in rows[-few:]),
    }
    theirs = smoothed((row["at"], row["solved"], samples) for row in rows)
    events = read_events(run_in(given.ours or given.work) / "events")
    ours = rl_figures(events)
    figures |= compared(figures, theirs, ours, curve(events))
    for name, value in figures.items():
        print(f"{name:34} {value:12.5g}")
    bars = {name: at_least(figures[name], 5) for name in ("times_samples", "times_to_reward") if name in figures}
    finish("mbpp_trl", {name: float(value) for name, value in figures.items()}, bars)


def compared(figures: dict[str, float], theirs: Curve, ours: dict[str, float], our_curve: Curve) -> dict[str, float]:
    """Ours against TRL's: samples per second, and seconds to the highest level that both curves reached."""
    found = {f"seconds_to_{level}": at for level, at in seconds_to(theirs).items()}
    if "rl_samples_per_s" in ours:
        found |= {"ours_samples_per_s": ours["rl_samples_per_s"]}
        found |= {"times_samples": ours["rl_samples_per_s"] / figures["samples_per_s"]}
    one, other = seconds_to(our_curve), seconds_to(theirs)
    found |= {f"ours_seconds_to_{level}": at for level, at in one.items()}
    both = [level for level in one if level in other]
    return found | ({"times_to_reward": other[both[-1]] / one[both[-1]]} if both else {})


if __name__ == "__main__":
    main()
