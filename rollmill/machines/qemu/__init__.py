"""Virtual machines: each has a kernel of its own, and starts from the memory of a template that was booted once.

    host.py        in the dispatcher: QemuHost boots one template per image, and restores machines from it (asyncio)
      │
    vm.py          one QEMU process: its arguments, its monitor, start, restore, save, end
    ram.py         copies of guest memory: the template's, with the pages that a machine has changed
      │
    parts.py       the programs and files that this host has: QEMU, kernel, modules; setup.py gets what is missing
    disks.py       of an OCI image: its layers, read-only, and what a machine writes
    initramfs.py   the files of the guest: the Python, programs and libraries of this host, and the agent
      │  inside the guest
      ▼
    init.py        its first process: loads modules, starts the agent of guest/agent.py, renews the guest's identity
    streams.py     carries connections to the guest's loopback ports; ports.py is the host's end

A guest has no network card, and no disk unless its image is an OCI image. Its files are in its memory, so memory and
device state are all there is to save; with an OCI image also the disk that the machine writes to. Guest memory is an
anonymous file (memfd): the template's is mapped privately by every machine, so untouched pages are there once. When the
dispatcher dies, every QEMU gets SIGKILL, and no file is left.

Three virtio ports lead into the guest: one to the agent, which runs commands, one to `init`, and one for connections to
loopback ports (`listen`). Over that one, programs reach the sockets that the machine's owner opened, and nothing else.
After every restore `init` gets fresh entropy and the time before anyone uses the machine: clones would repeat each
other's random numbers.
"""
