"""What each role process of a run does: open the stores, connect the parts, run. Wiring only.

One module per role, each with one `main(run, …)`. A process imports only its own module: a gateway never loads torch, a
trainer never loads a web server.
"""
