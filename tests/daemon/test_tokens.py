"""Tokens: who may do what, what is never told, and what happens when they change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coli_server.daemon.tokens import load_tokens
from coli_server.errors import ConfigurationError

if TYPE_CHECKING:
    from tests.daemon.conftest import Client, Running, Serve

ALICE, BOB, ADMIN = "alice-" + "a" * 20, "bob-" + "b" * 20, "root-" + "r" * 20
TOKENS = f"alice={ALICE} bob={BOB} admin={ADMIN}"


async def as_owner(running: Running, token: str) -> Client:
    client = await running.connect()
    assert await client.ask(f"AUTH {token}") == "OK"
    return client


async def test_without_a_token_only_harmless_commands_are_answered(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    client = await running.connect()
    assert await client.ask("PING") == "PONG"
    assert (await client.ask("VERSION")).startswith("VERSION ")
    assert (await client.ask("GEN id=x max=1 Hello")).startswith("ERR AUTH id=x ")
    assert (await client.ask("STAT")).startswith("ERR AUTH ")
    client.send("SESSION s", "PING")
    assert [line.split()[:2] for line in await client.rest()] == [["ERR", "AUTH"]]


async def test_a_client_that_guesses_is_sent_away_after_three_tokens(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    client = await running.connect()
    client.send(*[f"AUTH wrong-{number}-{'x' * 20}" for number in range(3)], f"AUTH {ALICE}", "PING")
    lines = await client.rest()
    assert [line.split()[:2] for line in lines] == [["ERR", "AUTH"]] * 3
    figures = await (await as_owner(running, ADMIN)).stat()
    assert figures["auth_failures_total"] == "3"


async def test_a_named_session_is_for_its_owner(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    alice, again, bob = [await as_owner(running, token) for token in (ALICE, ALICE, BOB)]
    assert await alice.ask("SESSION diary") == "OK session=diary new=1"
    assert await again.ask("SESSION diary") == "OK session=diary new=0"
    assert (await bob.ask("SESSION diary")).startswith("ERR FORBIDDEN ")
    assert (await bob.ask("STAT session diary")).startswith("ERR FORBIDDEN ")
    assert (await bob.ask("STAT sessions")).startswith("ERR FORBIDDEN ")
    admin = await as_owner(running, ADMIN)
    assert "diary:connections" in await admin.stat("sessions")
    assert (await admin.stat("session diary"))["requests_total"] == "0"


async def test_another_token_on_the_same_connection_begins_another_session(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    client = await as_owner(running, ALICE)
    await client.ask("SESSION diary")
    assert await client.ask(f"AUTH {BOB}") == "OK"
    client.send("GEN max=1 Hello")
    assert "session=~" in (await client.until("ACK"))[-1]


async def test_a_token_that_is_taken_back_ends_its_connections_and_no_others(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    alice, bob = await as_owner(running, ALICE), await as_owner(running, BOB)
    alice.send("GEN max=60000 Hello")
    await alice.until("TOK")
    running.daemon.reload(load_tokens(None, f"bob={BOB}"))
    assert (await alice.rest())[-1].startswith("ERR AUTH ")
    assert await bob.ask("PING") == "PONG"
    assert (await (await running.connect()).ask(f"AUTH {ALICE}")).startswith("ERR AUTH ")


async def test_taking_all_tokens_back_does_not_open_the_daemon(serve: Serve) -> None:
    running = await serve(tokens=TOKENS)
    running.daemon.reload(load_tokens(None, ""))
    assert (await (await running.connect()).ask("STAT")).startswith("ERR AUTH ")


async def test_without_tokens_anything_passes_for_one(client: Client) -> None:
    assert await client.ask("AUTH whatever") == "OK"
    client.send("GEN max=1 Hello")
    await client.until("DONE")
    assert "~1:connections" in await client.stat("sessions")


async def test_a_client_that_shows_no_token_in_time_is_closed(serve: Serve) -> None:
    running = await serve(tokens=TOKENS, half_command_seconds=0.1)
    client = await running.connect()
    assert (await client.rest())[-1].startswith("ERR TIMEOUT ")


async def test_only_who_may_see_others_sees_where_files_lie(serve: Serve, tmp_path: Path) -> None:
    running = await serve(tokens=TOKENS, session_dir=str(tmp_path))
    assert "session_dir" not in await (await as_owner(running, ALICE)).stat("settings")
    assert "session_dir" in await (await as_owner(running, ADMIN)).stat("settings")


async def test_no_token_and_no_text_reaches_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    running = await serve(tokens=TOKENS)
    client = await as_owner(running, ALICE)
    client.send(
        "AUTH wrong-token-of-somebody", f"AUTH {BOB} {BOB}", "GEN max=2 xyzzy", "GEN top_p=9 xyzzy", "QUIT"
    )
    await client.rest()
    await running.stop()
    log = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "owner" in log
    for secret in (ALICE, BOB, ADMIN, "wrong-token", "xyzzy"):
        assert secret not in log


def test_tokens_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\nalice={ALICE}\n\nbob={BOB}  # new\nbob=older-{BOB}\n")
    file.chmod(0o600)
    tokens = load_tokens(str(file), f"admin={ADMIN}")
    owners = [tokens.identify(token) for token in (ALICE, BOB, f"older-{BOB}", ADMIN)]
    assert [identity and (identity.owner, identity.admin) for identity in owners] == [
        ("alice", False),
        ("bob", False),
        ("bob", False),
        ("admin", True),
    ]
    assert tokens.identify(ALICE[:-1]) is None
    assert ALICE not in repr(vars(tokens))


@pytest.mark.parametrize(
    "content", ["alice", "alice=short", "a b=" + "x" * 20, "alice=" + "é" * 20, "", "# none"]
)
def test_a_bad_token_file_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="tokens") as caught:
        load_tokens(str(file), "")
    assert "short" not in str(caught.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"COLI_TOKEN_FILE is .*nowhere"):
        load_tokens(str(tmp_path / "nowhere"), "")
