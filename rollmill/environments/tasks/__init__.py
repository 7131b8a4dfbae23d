"""Task sets: read from files, held in memory.

listed.py      the set itself: tasks by id, in splits
splits.py      settings that all kinds share: where the file is, which tasks are held out
lines.py       a JSONL file as a stream of lines; what is wrong with one line spoils no other
jsonl.py       our own format, one task per line
directory.py   our own format, one folder per task
mbpp.py  humaneval.py  programs.py    problems in the format of these benchmarks
"""
