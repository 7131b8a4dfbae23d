"""The report of a run: one page to read and show, one file of figures for programs."""

from rollmill.runs.report.page import example_trajectories, write_report

__all__ = ["example_trajectories", "write_report"]
