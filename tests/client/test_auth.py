"""Tokens leave the client in one command or not at all, and are never shown."""

from __future__ import annotations

import ssl

import pytest

from coli_client import AsyncClient, Client, commands
from coli_client.defaults import tls_context

BAD = ["", "a b", "a\nQUIT", "a\r", "a\0", "é", "a=b", "x" * 257, b"bytes", None]


@pytest.mark.parametrize("token", BAD)
def test_a_token_that_could_be_more_than_one_word_is_refused_unshown(token: object) -> None:
    with pytest.raises(ValueError, match="token must be") as caught:
        commands.auth(token)  # type: ignore[arg-type]
    assert token is None or not token or str(token) not in str(caught.value)


def test_a_client_refuses_a_bad_token_before_it_connects() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="token must be"):
            kind("127.0.0.1", 1, token="a\nQUIT")


def test_a_command_does_not_show_its_token() -> None:
    command = commands.auth("very-secret-token")
    assert command.data == b"AUTH very-secret-token\n"
    assert "secret" not in repr(command)


def test_what_to_trust_has_one_place() -> None:
    own = ssl.create_default_context()
    assert tls_context(False, None) is None
    assert tls_context(own, None) is own
    default = tls_context(True, None)
    assert default is not None
    assert (default.check_hostname, default.verify_mode) == (True, ssl.CERT_REQUIRED)
    with pytest.raises(ValueError, match="cafile"):
        tls_context(own, "ca.pem")
    with pytest.raises(OSError, match="No such file"):
        Client("127.0.0.1", 1, cafile="/nowhere/ca.pem")
