"""Virtual machines by Firecracker, on hosts with KVM. A template is booted once; machines are restored from its files.

    host.py     FirecrackerHost: one template per image; machines are those of qemu/machine.py
    vm.py       one Firecracker process: boot, restore, save, connections into the guest, end
    api.py      its HTTP API, over a Unix socket
    launch.py   the parts that this host has; the command of the jailer; the kernel in the form that Firecracker takes

The guest is the one of qemu/: no disk, no network card, the same first process and agent. Connections into it go over
vsock. Loading a snapshot resets them, so in the guest qemu/relay.py listens and connects the next one to the agent.

There was no KVM where this was written. The API is tested against Firecracker's published contract, request by request;
booting, saving and restoring a guest were not run. `rollmill machines doctor` tries them, and says what fails.
"""
