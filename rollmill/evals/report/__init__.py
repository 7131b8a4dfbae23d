"""The report of a run: one page to read and show, one file of figures for programs."""

from rollmill.evals.report.page import example_trajectories, write_report

__all__ = ["example_trajectories", "write_report"]
