"""Reading documents for mid-training from JSONL in random order, next to Hugging Face `datasets` on the same file.

    python -m benchmarks.data [--quick] [--megabytes N]

Both open the file, then read documents in a random order and tokenise them with the same tokenizer, in one thread. Each
runs in a process of its own, whose peak memory is measured; the file was just written, so it is in the page cache. Bars
are about CPU seconds, because other work on the host makes wall time meaningless. The last line shows what reading
ahead saves: steps that train (here: wait, as for a GPU) as long as reading takes.
Texts are SYNTHETIC: words of a fixed list, lengths from a long-tailed distribution, a few records of 2 MB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, at_most, finish
from benchmarks.weights_memory import peak_rise
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.config import LocalPath
from rollmill.training.pretraining.mixture import Mixture, Part
from rollmill.training.pretraining.read_ahead import ReadAhead
from rollmill.training.pretraining.source import SourceContext
from rollmill.training.pretraining.sources.jsonl import Jsonl, JsonlSettings

CONTEXT = 2048
LONG = 2_000_000  # bytes of the longest records
LONG_SHARE = 1 / 20_000  # of the records
MEDIAN = 2_000  # bytes of the other records
PER_STEP = 64  # documents
SECONDS = {False: 15.0, True: 3.0}  # of reading, by `quick`


def write_corpus(path: Path, megabytes: int) -> int:
    """Returns how many records were written."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(draw.choice(letters, size=draw.integers(2, 10))) for _ in range(5000)]
    text = " ".join(words[number] for number in draw.zipf(1.3, size=2_000_000) % len(words)).replace(" ab ", ".\n")
    size = records = 0
    with path.open("w") as file:
        while size < megabytes * 10**6:
            length = LONG if draw.random() < LONG_SHARE else int(MEDIAN * np.exp(draw.normal()))
            start = int(draw.integers(0, len(text) - min(length, len(text) - 1)))
            line = json.dumps({"id": records, "text": text[start : start + length]}) + "\n"
            file.write(line)
            size, records = size + len(line), records + 1
    return records


def texts(path: Path, count: int) -> Iterator[str]:
    with path.open() as file:
        for line in itertools.islice(file, count):
            yield json.loads(line)["text"]


def read_rollmill(path: Path, tokenizer: Tokenizer, folder: Path) -> tuple[Callable[[], object], int]:
    context = SourceContext(tokenizer, format_of(tokenizer), CONTEXT, 16, 0, folder / "index")
    documents = Jsonl(JsonlSettings(path=LocalPath(path))).documents(context)
    mixture, numbers = Mixture([Part("corpus", documents)], 0), itertools.count()
    return lambda: mixture.read(next(numbers))[0].tokens, documents.count


def read_datasets(path: Path, tokenizer: Tokenizer, folder: Path) -> tuple[Callable[[], object], int]:
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    shuffled = loaded.shuffle(seed=0)
    numbers = itertools.cycle(range(len(shuffled)))
    return lambda: tokenizer.encode(shuffled[next(numbers)]["text"]), len(shuffled)


CONTENDERS = {"rollmill": read_rollmill, "datasets": read_datasets}


def measure(name: str, path: Path, seconds: float) -> dict[str, float]:
    """Open the corpus, then read for some seconds. Runs in a process of its own."""
    tokenizer = Tokenizer.load(path.parent / "tokenizer.json")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def work() -> None:
            start, used = time.perf_counter(), time.process_time()
            read, figures["documents"] = CONTENDERS[name](path, tokenizer, Path(folder))
            figures["open_seconds"], figures["open_cpu_seconds"] = (
                time.perf_counter() - start,
                time.process_time() - used,
            )
            tokens, durations = 0, []
            start, used = time.perf_counter(), time.process_time()
            while time.perf_counter() - start < seconds:
                began = time.perf_counter()
                tokens += len(read())  # type: ignore[arg-type]
                durations.append(time.perf_counter() - began)
            total, used = time.perf_counter() - start, time.process_time() - used
            figures["documents_per_second"], figures["tokens_per_second"] = len(durations) / total, tokens / total
            figures["tokens_per_cpu_second"] = tokens / used
            figures["slowest_milliseconds"] = 1000 * max(durations)

        figures["peak_bytes"] = peak_rise(work)
        figures["disk_bytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return figures


def overlap(path: Path, steps: int) -> dict[str, float]:
    """Seconds per step that trains as long as its documents take to read: read in the step, and read ahead."""
    tokenizer = Tokenizer.load(path.parent / "tokenizer.json")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        read, _ = read_rollmill(path, tokenizer, Path(folder))

        def step(number: int) -> list[object]:
            return [read() for _ in range(PER_STEP)]

        alone = []
        for number in range(steps):
            start = time.perf_counter()
            step(number)
            alone.append(time.perf_counter() - start)
        training = statistics.mean(alone)
        ahead = ReadAhead(step)
        ahead.take(0)
        start = time.perf_counter()
        for number in range(1, steps + 1):
            time.sleep(training)
            ahead.take(number)
        return {"in_step_seconds": 2 * training, "ahead_step_seconds": (time.perf_counter() - start) / steps}


def run(name: str, path: Path, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.data", "--contender", name, str(path), str(seconds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def show(rows: dict[str, dict[str, float]], megabytes: float, steps: dict[str, float]) -> None:
    table = Table(title=f"{megabytes:.0f} MB of JSONL, random order, one thread")
    for column in ("", "open", "of CPU", "tokens/s", "per CPU second", "slowest read", "memory", "disk"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['open_seconds']:.1f} s",
            f"{row['open_cpu_seconds']:.1f} s",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_cpu_second']:,.0f}",
            f"{row['slowest_milliseconds']:.0f} ms",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{row['disk_bytes'] / 1e6:.0f} MB",
        )
    Console().print(table)
    print("rollmill's documents are at most one context long, those of datasets whole records: compare tokens/s")
    inside, ahead = steps["in_step_seconds"], steps["ahead_step_seconds"]
    print(f"a step that trains as long as it reads: {inside:.3f} s read in the step, {ahead:.3f} s read ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 MB instead of 1 GB")
    parser.add_argument("--megabytes", type=int, help="size of the corpus")
    parser.add_argument("--contender", nargs=3, metavar=("NAME", "PATH", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, path, seconds = arguments.contender
        print(json.dumps(measure(name, Path(path), float(seconds))))
        return
    megabytes = arguments.megabytes or (100 if arguments.quick else 1000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        write_corpus(path, megabytes)
        Tokenizer(train_tokenizer(texts(path, 500), 8000, SPECIAL_TOKENS)).save(path.parent / "tokenizer.json")
        rows = {name: run(name, path, SECONDS[arguments.quick]) for name in CONTENDERS}
        steps = overlap(path, steps=5)
    show(rows, megabytes, steps)
    ours, theirs = rows["rollmill"], rows["datasets"]
    bars = {
        "open_cpu_seconds": at_most(ours["open_cpu_seconds"], 1.5 * theirs["open_cpu_seconds"]),
        # both spend nine tenths of it in the same tokenizer; on a shared core it varies by a quarter
        "tokens_per_cpu_second": at_least(ours["tokens_per_cpu_second"], 0.75 * theirs["tokens_per_cpu_second"]),
        "peak_megabytes": at_most(ours["peak_bytes"] / 1e6, 300),
        "ahead_share": at_most(steps["ahead_step_seconds"] / steps["in_step_seconds"], 0.7),
    }
    figures = {f"{name}_{key}": value for name, row in rows.items() for key, value in row.items()}
    finish("data", {**figures, **steps, "megabytes": megabytes}, bars)


if __name__ == "__main__":
    main()
