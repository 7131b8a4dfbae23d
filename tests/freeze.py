"""Imported last by the server that test processes are forked from (tests/processes.py).

In a forked process the garbage collector then skips what the server imported. Going through it takes longer than most
tests.
"""

import gc

gc.collect()
gc.freeze()
