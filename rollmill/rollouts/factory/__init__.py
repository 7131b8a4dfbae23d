"""A factory: from a repository to tasks. `rollmill tasks make` runs it.

    sources.py    a repository, directory or PyPI name ──► files, and the history if there is one
    install.py    ──► an image with what the project needs; the project itself lies in the work directory
    stable_tests.py   ──► tests with one verdict, what each of them calls (traced.py), which run apart from the project
    edits.py      ──► candidates: functions removed, mutations of the syntax tree
    history.py    ──► candidates: commits that change tests and code, reverted
    kept_changes.py   ──► candidates: what users asked for, and the change that they kept
    overlap.py    drops candidates whose solution is in a training source or an eval suite
    admit.py      runs a candidate: which tests notice, and the checks of `rollmill tasks check`
    instruct.py   lets a model write the instruction, and checks its text
    make.py       goes through the candidates; what it has decided is on disk, so a killed run continues

Code of the project runs in machines. Only what pip runs to install packages, and to find the sdist of a PyPI name, runs
on this host.
"""
