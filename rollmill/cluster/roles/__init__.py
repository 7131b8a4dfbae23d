"""What each process of a run does: open the stores, put the parts together, run. Wiring only.

A module a role, each with one `main(run, …)`; a process imports only its own, so a gateway never loads torch and a
trainer never loads a web server.
"""
