"""Machines made of Linux namespaces: a private root, process tree and (dead) network, sharing the host's kernel.

    client.py    in the dispatcher: NamespaceHost and NamespaceMachine (asyncio)
      │  starts one
      ▼
    launch.py    builds the machines' root file system in a mount namespace (root.py), then becomes
    host.py      the machine host: single-threaded, forks one machine per request, reaps it, bounds it (cgroups.py)
      │  clone3 into user, mount, pid, net, ipc and uts namespaces
      ▼
    agent.py     pid 1 of a machine: serves files and commands to the client over its own socket (wire.py)
      │  fork
      ▼
    command      a program, or a warm Python (warm_python.py): unprivileged, filtered (seccomp.py), without capabilities

The client talks to each machine directly; the host only makes and ends them. Everything below the client imports the
standard library alone: it runs inside the machines' root, where nothing else of this host exists.
"""
