import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coli_server.daemon import listening
from coli_server.errors import ConfigurationError
from coli_server.settings import Address, Settings


def bind(address: Address) -> list[socket.socket]:
    return listening.bind(Settings(listen=address))


def test_port_zero_gets_a_port_that_is_told() -> None:
    with closing(bind(Address("127.0.0.1", 0))[0]) as one:
        host, port = listening.describe(one).split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0


def test_a_bound_port_refuses_clients_until_the_daemon_listens() -> None:
    with closing(bind(Address("127.0.0.1", 0))[0]) as one, pytest.raises(ConnectionRefusedError):
        socket.create_connection(one.getsockname())


def test_a_taken_port_is_named() -> None:
    with closing(bind(Address("127.0.0.1", 0))[0]) as one:
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"COLI_LISTEN is 127.0.0.1:{port}: .*in use"):
            bind(Address("127.0.0.1", port))


def test_an_address_that_others_can_reach_is_refused_unless_asked_for() -> None:
    settings = Settings(listen=Address("0.0.0.0", 0))
    bound = listening.bind(settings)
    with pytest.raises(ConfigurationError, match="COLI_INSECURE_BIND"):
        listening.check_reach(bound, settings, tokens=False)
    listening.check_reach(bound, settings, tokens=True)
    listening.check_reach(bound, replace(settings, insecure_bind=True), tokens=False)
    for one in bound:
        one.close()


def test_a_socket_of_the_supervisor_that_others_can_reach_is_refused_too() -> None:
    one = socket.create_server(("0.0.0.0", 0))
    with closing(one), pytest.raises(ConfigurationError, match="COLI_INSECURE_BIND"):
        listening.check_reach([one], Settings(), tokens=False)


def test_an_unknown_host_is_named() -> None:
    settings = Settings(listen=Address("no-such-host.invalid", 0), insecure_bind=True)
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid"):
        listening.bind(settings)


def test_a_unix_socket_is_for_its_owner_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "coli.sock"
    bound = bind(Address(path=str(path)))
    assert listening.describe(bound[0]) == f"unix:{path}"
    assert path.stat().st_mode & 0o077 == 0
    listening.unlink(bound)
    bound[0].close()
    assert not path.exists()


def test_a_unix_socket_of_a_dead_daemon_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "coli.sock"))
    bind(address)[0].close()  # as after SIGKILL: the file stays
    with closing(bind(address)[0]) as living:
        living.listen()
        with pytest.raises(ConfigurationError, match="in use"):
            bind(address)


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="no socket"):
        bind(Address(path=str(path)))
    assert path.read_text() == "precious"
