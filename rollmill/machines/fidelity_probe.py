"""Looks at a computer as a suspicious guest does. Prints JSON: item → what was looked at → what was found.

Plain Python without imports of ours: the same file runs in a machine and on a reference computer,
`python fidelity_probe.py > reference.json`. It prints no secret: yes or no, names of programs, kinds of file systems.
"""

import json
import os
import pwd
import re
import shutil
import socket
import sys
import time

Facts = dict[str, "bool | str"]
TOOLS = "apt awk bash curl diff dpkg find git gzip ip less make man nano ps python3 sed ssh sudo tar top vi".split()
_DISK_FORMATS = ("ext4", "ext3", "xfs", "btrfs", "zfs")
_EMULATORS = re.compile(r"qemu|bochs|seabios|standard pc|firecracker|linux,dummy-virt", re.I)


def text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        return ""


def names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def mounts() -> dict[str, str]:
    lines = (line.split() for line in text("/proc/self/mounts").splitlines())
    return {words[1]: words[2] for words in lines if len(words) > 2}


def status() -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text("/proc/self/status").splitlines() if ":\t" in line)


def hardware() -> Facts:
    strings = ("sys_vendor", "product_name", "product_version", "chassis_vendor", "bios_vendor")
    maker = "".join(text(f"/sys/class/dmi/id/{name}") for name in strings) + text("/proc/device-tree/model")
    processor = text("/proc/cpuinfo")
    memory = re.findall(r"MemTotal:\s+(\d+)", text("/proc/meminfo"))
    return {
        "processor is described": bool(re.search(r"model name|CPU implementer", processor)),
        "processor is an emulator": bool(_EMULATORS.search(processor)),
        "more than one processor": (os.cpu_count() or 1) > 1,
        "a GiB of memory": bool(memory) and int(memory[0]) >= 1 << 20,
        "/sys lists processors": bool(text("/sys/devices/system/cpu/online")),
        "/sys has buses": bool(names("/sys/bus")),
        "maker is named": bool(maker),
        "maker is an emulator": bool(_EMULATORS.search(maker)),
        "disk": any(re.fullmatch(r"(sd|vd|hd|xvd|nvme).*", name) for name in names("/sys/block")),
        "root is on a disk": mounts().get("/") in _DISK_FORMATS,
        "terminal": os.path.exists("/dev/tty"),
    }


def init() -> Facts:
    return {
        "pid 1": text("/proc/1/comm"),
        "command of pid 1 is shown": bool(text("/proc/1/cmdline")),
        "systemd booted it": os.path.isdir("/run/systemd/system"),
        "machine id": bool(text("/etc/machine-id")),
        "logs": bool(names("/var/log")),
        "init program": os.path.exists("/sbin/init"),
    }


def processes() -> Facts:
    pids = [name for name in names("/proc") if name.isdigit()]
    return {
        "more than ten": len(pids) > 10,
        "kernel threads": any(text(f"/proc/{pid}/comm") == "kthreadd" for pid in pids),
        "own number is above 300": os.getpid() > 300,
        "every process has a name": all(text(f"/proc/{pid}/comm") for pid in pids if os.path.exists("/proc/" + pid)),
    }


def users() -> Facts:
    try:
        own = pwd.getpwuid(os.getuid())
    except KeyError:
        own = None
    return {
        "own user has a name": own is not None,
        "own shell exists": own is not None and os.path.exists(own.pw_shell),
        "system users": len(text("/etc/passwd").splitlines()) > 15,
        "groups": len(text("/etc/group").splitlines()) > 20,
        "sudo group": "\nsudo:" in text("/etc/group"),
        "USER is set": bool(os.environ.get("USER")),
        "SHELL is set": bool(os.environ.get("SHELL")),
        "system files belong to root": os.stat("/usr/bin/env").st_uid == 0,
    }


def home() -> Facts:
    place = os.path.expanduser("~")
    return {
        "below /home or /root": place.startswith(("/home/", "/root")),
        "can be written": os.access(place, os.W_OK),
        ".bashrc": os.path.exists(place + "/.bashrc"),
        ".profile": os.path.exists(place + "/.profile"),
        "skeleton": bool(names("/etc/skel")),
    }


def shell_history() -> Facts:
    lines = text(os.path.expanduser("~/.bash_history")).splitlines()
    return {"there is one": bool(lines), "ten lines": len(lines) >= 10}


def clock() -> Facts:
    up = text("/proc/uptime").split() or ["0"]
    return {
        "time zone": os.path.exists("/etc/localtime"),
        "up for ten minutes": float(up[0]) > 600,
        "system files are older than a day": time.time() - os.stat("/etc/passwd").st_mtime > 86400,
        "after 2025": time.time() > 1767225600,
    }


def locale() -> Facts:
    language = os.environ.get("LANG", "")
    return {
        "LANG is set": bool(language),
        "UTF-8": language.upper().replace("-", "").endswith("UTF8"),
        "encoding of files": sys.getfilesystemencoding(),
        "default": bool(text("/etc/default/locale")),
    }


def tools() -> Facts:
    found: Facts = {name: shutil.which(name) is not None for name in TOOLS}
    found["package database"] = bool(text("/var/lib/dpkg/status"))
    found["os-release"] = bool(text("/etc/os-release"))
    return found


def network() -> Facts:
    own = socket.gethostname()
    return {
        "interface besides loopback": any(name != "lo" for _, name in socket.if_nameindex()),
        "default route": "\t00000000\t" in text("/proc/net/route"),
        "name server": "nameserver" in text("/etc/resolv.conf"),
        "own name is known": own in text("/etc/hosts").split(),
        "own name is in /etc/hostname": text("/etc/hostname") == own,
        "own name is a number": bool(re.fullmatch(r"[0-9a-f]{12,}", own)),
    }


def container_marks() -> Facts:
    state = status()
    places = mounts()
    control = text("/proc/self/cgroup")
    return {
        "mark of a container": any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv", "/.singularity.d"))),
        "container variable": "container" in os.environ,
        "all user ids": "4294967295" in text("/proc/self/uid_map"),
        "filter of system calls": state.get("Seccomp") not in (None, "0"),
        "new privileges": state.get("NoNewPrivs") == "0",
        "system directories are mounts": any(place in places for place in ("/usr", "/etc/hosts", "/etc/resolv.conf")),
        "control group of a container": bool(re.search(r"docker|kubepods|containerd|lxc|libpod", control)),
        "overlay root": places.get("/") == "overlay",
    }


PROBES = (hardware, init, processes, users, home, shell_history, clock, locale, tools, network, container_marks)


def look() -> dict[str, Facts]:
    return {probe.__name__.replace("_", " "): probe() for probe in PROBES}


if __name__ == "__main__":
    json.dump(look(), sys.stdout, indent=1)
    print()
