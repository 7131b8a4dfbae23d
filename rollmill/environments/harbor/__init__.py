"""Machines for Harbor: its tasks and agents run in ours.

    environment.py   Harbor's BaseEnvironment, made of a machine. Only this needs the package `harbor`

Harbor finds it by import path, in its job file or with `--environment-import-path`:

    rollmill.environments.harbor.environment:RollmillEnvironment
"""
