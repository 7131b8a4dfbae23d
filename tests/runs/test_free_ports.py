"""Ports that are held for a server that starts later."""

from __future__ import annotations

import socket

import pytest

from rollmill.errors import ConfigError
from rollmill.runs.free_ports import free_ports, held_port

HOST = "127.0.0.1"


def test_two_services_do_not_meet_on_one_port() -> None:
    """Neither listens yet: both would have found the port free."""
    [default] = free_ports(1)
    with held_port(HOST, None, default) as first, held_port(HOST, None, default) as second:
        assert first == default and second != default
        with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{default}: Address already in use"):
            held_port(HOST, default).__enter__()


def test_only_the_server_it_is_held_for_listens_there() -> None:
    with held_port(HOST, None) as port:
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, port))
        for _ in range(2):  # it restarts, while its old connections are still in TIME_WAIT
            with socket.create_server((HOST, port), reuse_port=True) as server:
                with socket.create_connection((HOST, port)), server.accept()[0]:
                    pass
                with pytest.raises(ConfigError):
                    held_port(HOST, port).__enter__()
    with held_port(HOST, port) as again:
        assert again == port


def test_a_port_that_someone_listens_on() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another --port"):
            held_port(HOST, port).__enter__()
        with held_port(HOST, None, port) as other:
            assert other != port


def test_an_address_that_this_machine_does_not_have() -> None:
    for port, default in ((None, 8000), (8000, None)):
        with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000: "):
            held_port("192.0.2.1", port, default).__enter__()


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid:8000"):
        held_port("no-such-host.invalid", None, 8000).__enter__()
