"""A live page about a run or a store. Read-only."""
