"""Environments that others wrote, as packages: they bring their own tasks, and grade the episodes they play. And agents
that others wrote, which play our tasks in our machines.

verifiers.py  verifiers_program.py    environments of `verifiers`: they ask the model themselves
openenv.py    openenv_program.py      servers of `openenv`: reset, and then one step per answer of the model
harbor.py     harbor_program.py       agents of Harbor
package_process.py  program.py          both ends of the process in which a package runs
reported.py    the reward that the environment reports
"""
