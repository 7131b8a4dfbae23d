"""Task sets: read from files, held in memory.

listed.py      the set itself: tasks by id, in splits
task_splits.py      settings that all kinds share: where the file is, which tasks are held out
lines.py       a JSONL file as a stream of lines; what is wrong with one line spoils no other
jsonl.py       our own format, one task per line
task_directory.py   our own format, one folder per task
mbpp.py  humaneval.py  programs.py    problems in the format of these benchmarks
harbor.py  dockerfile.py              directories in the format of Harbor and Terminal-Bench
swe_bench.py  git_files.py            instances in the format of SWE-bench, on local git repositories
"""
