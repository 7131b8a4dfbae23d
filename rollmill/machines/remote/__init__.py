"""Machines of other hosts, behind a URL. `rollmill machines serve` offers those of a host to two kinds of clients.

    client.py      [machine] kind = "remote": places machines over several hosts
      │  frames over HTTP (routes.py), ports over WebSockets (ports.py)
      ▼
    service.py     the machines that are lent: leases, tokens, capacity       ◄── e2b*.py, rpc.py: for E2B's SDKs
      │
      ▼
    any MachineHost of this host

e2b_client.py is the other side of E2B's API, [machine] kind = "e2b": machines of any server that speaks it.
outward.py carries connections the other way round, for hosts that nobody can reach: they dial the run.

A lease ends a machine whose client has gone. Every request needs the service's key, or the token of its machine.
"""
