"""Machines made of Linux namespaces: each has its own root, processes and network, and shares the host's kernel.

    client.py    in the dispatcher: NamespaceHost and its machines (asyncio)
      │  starts one
      ▼
    launch.py    builds the root file system of all machines in a mount namespace (root.py), then becomes
    host.py      the machine host: single-threaded, has machines made, reaps them, bounds them (cgroups.py), and lets
                 forks share files (forks.py)
      │  clone3 into user and uts namespaces
      ▼
    slot.py    makes the machines of a slot, one after the other; they are children of the machine host. Its root is
                 the slot's own: no machine sees an inode of another (inodes.py)
      │  clone3 into mount, pid, net and ipc namespaces
      ▼
    agent.py     pid 1 of a machine: serves files and commands to the client over its own socket (frames.py), and counts
                 memory where no control group does (usage.py); processes that run between
                 commands (processes.py), with a terminal if they want one (terminal.py)
      │  fork
      ▼
    command      a program, or a warm Python (warm_python.py): another user than pid 1 where the host has user ids to
                 give, filtered (seccomp.py), without capabilities

A machine's network is its own loopback address. Nothing is behind it but the ports that the client opens (`listen`):
pid 1 makes the socket and hands it to the client, which accepts the connections in its own process.

The client talks to each machine directly; the machine host only creates and ends them. Everything below the client
imports only the standard library, because it runs inside the machines' root, where nothing else exists.
"""
