"""Tests and submitted code in two machines: a verdict comes from a process that submitted code cannot reach.

    machine of the tester                    grader                    machine of the worker
    pristine files, hidden tests  ◄── bytes of the wire, unread ──►    pristine files, submission over them
    tester.py, proxies.py                   session.py                 worker.py

wire.py      what travels: plain data of exact types, and numbers for everything else
proxies.py   stand-ins for submitted modules, classes and objects; what the worker may ask in return
tester.py    runs tests by pytest or unittest, or statements, and tells a verdict for each
worker.py    imports submitted code and does what it is asked
session.py   two machines and what goes between them
levels.py    which tests can be run like this, found with the task's reference
"""
