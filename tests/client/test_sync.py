"""The blocking client against a scripted server."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from coli_client import (
    BadOption,
    Chunk,
    Client,
    ClientInUse,
    ConnectionLost,
    Info,
    NotFound,
    ProtocolViolation,
    Session,
    Stats,
    Timeout,
    TooManyClients,
)


def ping(peer: Any) -> None:
    assert peer.next().line == b"PING"
    peer.send(b"PONG\n")


def closing(peer: Any) -> None:
    assert peer.rest() in (b"QUIT\n", b"")


def closing_after_half(peer: Any) -> None:
    assert len(peer.rest()) == 12


def test_commands(serve: Any) -> None:
    def script(peer: Any) -> None:
        ping(peer)
        for line, reply in [
            (b"VERSION", b"VERSION 0.1.0 protocol=1\n"),
            (b"HELP gen", b"GEN x\n  y\nEND\n"),
            (b"STAT cache", b"STAT a 1\nEND\n"),
            (b"STAT line", b"STAT 1 2 3 4 5 0\n"),
            (b"STAT reset", b"RESET\n"),
            (b"SESSION s", b"OK session=s new=1\n"),
            (b"SET temp 0.5", b"OK\n"),
            (b"CANCEL x", b"ERR NOT_FOUND nothing runs by that id\n"),
            (b"RESET", b"OK\n"),
        ]:
            assert peer.next().line == line
            peer.send(reply)
        closing(peer)

    with Client(port=serve(script)) as client:
        client.ping()
        assert client.version().version == "0.1.0"
        assert client.help("gen") == "GEN x\n  y"
        assert client.stat("cache") == Stats(a="1")
        assert client.stat_line().tokens == 1
        client.stat_reset()
        assert client.session("s") == Session("s", True)
        client.set("temp", 0.5)
        with pytest.raises(NotFound):
            client.cancel("x")
        client.reset()


def test_chunks_stream_before_the_end(serve: Any) -> None:
    read = threading.Event()

    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'INFO %b prefill=1/3\nTOK %b "He"\n' % (id, id))
        assert read.wait(5)
        peer.send(b'TOK %b "llo"\n' % id)
        peer.done(id)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x", max=2)
        assert (generation.ack.prompt_tokens, generation.ack.session) == (3, "~1")
        events = generation.events()
        assert next(events) == Info(generation.id, {"prefill": "1/3"})
        assert next(events) == Chunk(generation.id, "He")
        assert generation.text == "He"
        assert not generation.ended
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = generation.result
        read.set()
        assert "".join(map(str, events)) == "llo"
        assert generation.text == generation.result.text == "Hello"
        assert generation.result.finish == "length"
        assert list(generation) == []


def test_wait_gives_the_whole(serve: Any) -> None:
    def script(peer: Any) -> None:
        seen = peer.next()
        assert seen.line.startswith(b"CHAT id=")
        assert (seen.line.endswith(b' max=2 stop="\\n" bytes=2'), seen.payload) == (True, "é".encode())
        peer.send(b"ACK %b prompt_tokens=3 session=~1\n" % seen.id)
        peer.send(b'TOK %b "a"\nTOK %b "b"\n' % (seen.id, seen.id))
        peer.done(seen.id)
        closing(peer)

    with Client(port=serve(script)) as client:
        assert client.chat("é", max=2, stop="\n").wait().text == "ab"


def test_wrong_arguments_send_nothing(serve: Any) -> None:
    with Client(port=serve(lambda peer: (ping(peer), closing(peer)))) as client:
        with pytest.raises(TypeError, match="unknown option 'maximum'"):
            client.generate("x", maximum=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="must be 1 to 64"):
            client.session("a\nQUIT")
        client.ping()


def test_a_refusal_leaves_the_connection_in_step(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.next()
        peer.send(b"ERR BAD_OPTION max=0 is refused\n")
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        with pytest.raises(BadOption):
            client.generate("x", max=0)
        client.ping()


def test_a_failure_in_the_middle_is_raised_where_it_is_read(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nERR MODEL id=%b broken\n' % (id, id))
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        chunks = iter(generation)
        assert str(next(chunks)) == "a"
        for _ in range(2):
            with pytest.raises(Exception, match="MODEL: broken"):
                next(iter(generation))
        assert generation.text == "a"
        client.ping()


def test_break_cancels_and_the_next_command_gets_its_own_reply(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nTOK %b "b"\n' % (id, id))
        assert peer.next().line == b"CANCEL " + id
        peer.send(b'TOK %b "c"\nOK\nTOK %b "d"\n' % (id, id))
        peer.done(id, b"finish=cancelled tokens=4 prompt_tokens=3")
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        for chunk in generation:
            assert chunk.text == "a"
            break
        assert generation.result.finish == "cancelled"
        assert generation.text == "abcd"
        client.ping()


def test_an_exception_in_the_loop_cancels(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\n' % id)
        peer.cancelled(id)
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        with pytest.raises(ZeroDivisionError):
            [1 / len(chunk.logprobs or "") for chunk in generation]
        assert generation.result.finish == "cancelled"
        client.ping()


def test_cancel_of_what_has_just_ended_is_no_error(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.done(id)
        assert peer.next().line == b"CANCEL " + id
        peer.send(b"ERR NOT_FOUND nothing runs by that id\n")
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        assert generation.cancel().finish == "length"
        assert generation.cancel().finish == "length"
        client.ping()


def test_cancel_by_id_is_cancel(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x", id="mine")
        client.cancel("mine")
        assert generation.result.finish == "cancelled"


def test_a_dropped_generation_is_cancelled_before_the_next_command(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        client.generate("x")
        gc.collect()
        client.ping()


def test_another_command_during_a_generation_is_an_error(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\n' % id)
        peer.done(id)
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        for _ in generation:
            with pytest.raises(ClientInUse, match=generation.id):
                client.ping()
            with pytest.raises(ClientInUse):
                client.generate("y")
        client.ping()


def test_another_thread_is_an_error(serve: Any) -> None:
    asked, answer = threading.Event(), threading.Event()

    def script(peer: Any) -> None:
        assert peer.next().line == b"PING"
        asked.set()
        assert answer.wait(5)
        peer.send(b"PONG\n")
        closing(peer)

    with Client(port=serve(script)) as client:
        thread = threading.Thread(target=client.ping)
        thread.start()
        assert asked.wait(5)
        with pytest.raises(ClientInUse, match="another thread"):
            client.ping()
        answer.set()
        thread.join(5)


def interrupt_next_read(patch: pytest.MonkeyPatch) -> None:
    """The next read of a socket is interrupted as by Ctrl-C; the ones after it work."""

    def recv(_: socket.socket, size: int) -> bytes:
        assert size
        patch.undo()
        raise KeyboardInterrupt

    patch.setattr(socket.socket, "recv", recv)


def test_ctrl_c_cancels_and_keeps_the_connection(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        generation = client.generate("x")
        interrupt_next_read(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            generation.wait()
        assert generation.result.finish == "cancelled"
        client.ping()


def test_ctrl_c_before_the_acceptance_cancels_and_keeps_the_connection(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(peer: Any) -> None:
        peer.cancelled(peer.accept())
        ping(peer)
        closing(peer)

    with Client(port=serve(script)) as client:
        interrupt_next_read(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            client.generate("x")
        client.ping()


def test_ctrl_c_in_a_command_closes(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Any) -> None:
        assert peer.next().line == b"VERSION"
        closing(peer)

    client = Client(port=serve(script, ping))
    interrupt_next_read(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        client.version()
    with pytest.raises(ConnectionLost, match="interrupted"):
        client.ping()
    client.connect()
    client.ping()
    client.close()


def test_ctrl_c_while_sending_closes(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a command may be under way: anything that followed would be read as its text."""

    def sendall(sock: socket.socket, data: bytes) -> None:
        sock.send(data[:12])
        raise KeyboardInterrupt

    client = Client(port=serve(closing_after_half, ping))
    client.connect()
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendall", sendall)
        with pytest.raises(KeyboardInterrupt):
            client.generate("text")
    with pytest.raises(ConnectionLost, match="interrupted"):
        client.ping()
    client.connect()
    client.ping()
    client.close()


def test_after_a_timeout_no_old_reply_meets_a_new_command(serve: Any) -> None:
    def slow(peer: Any) -> None:
        assert peer.next().line == b"VERSION"
        assert peer.next().line == b"QUIT"
        peer.close()

    client = Client(port=serve(slow, ping), timeout=0.3)
    with pytest.raises(Timeout, match=r"silent for 0\.3 s"):
        client.version()
    with pytest.raises(ConnectionLost, match=r"closed.*silent.*connect\(\)"):
        client.ping()
    client.connect()
    client.ping()
    client.close()


def test_a_silent_generation_times_out_and_is_cancelled_by_quitting(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\n' % id)
        assert peer.next().line == b"QUIT"

    client = Client(port=serve(script), timeout=0.3)
    generation = client.generate("x")
    with pytest.raises(Timeout):
        generation.wait()
    assert generation.text == "a"
    with pytest.raises(Timeout):
        _ = generation.result


def test_a_server_that_does_not_obey_a_cancellation_is_left(serve: Any) -> None:
    stop = threading.Event()

    def script(peer: Any) -> None:
        id = peer.accept()
        assert peer.next().line == b"CANCEL " + id
        peer.send(b"OK\n")
        try:
            while not stop.wait(0.01):
                peer.send(b'TOK %b "more"\n' % id)
        except OSError:
            return
        raise AssertionError("the client still reads")

    client = Client(port=serve(script), timeout=0.3)
    generation = client.generate("x")
    with pytest.raises(Timeout, match="did not end"):
        generation.cancel()
    threading.Timer(5, stop.set).start()


@pytest.mark.parametrize("end", ["close", "reset"])
def test_the_server_goes_in_the_middle_of_a_line(serve: Any, end: str) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        peer.send(b'TOK %b "a"\nTOK %b "b' % (id, id))
        getattr(peer, end)()

    client = Client(port=serve(script))
    with pytest.raises(ConnectionLost):
        client.generate("x").wait()
    with pytest.raises(ConnectionLost):
        client.ping()


def test_the_reason_of_a_closing_server_is_read_though_sending_fails(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.send(b"ERR TOO_MANY_CLIENTS at most 1\n")
        peer.close()

    with Client(port=serve(script)) as client, pytest.raises(TooManyClients):
        client.generate("x" * 1_000_000)


def test_something_else_listens_there(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.next()
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    client = Client(port=serve(script))
    with pytest.raises(ProtocolViolation, match=r"HTTP/1\.1 400"):
        client.ping()


def test_half_lines_make_whole_replies(serve: Any) -> None:
    def script(peer: Any) -> None:
        id = peer.accept()
        for byte in b'TOK %b "\xc3\xa9"\n' % id:
            peer.send(bytes([byte]))
        peer.done(id)
        closing(peer)

    with Client(port=serve(script)) as client:
        assert client.generate("x").wait().text == "é"


def test_a_unix_socket(serve: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "coli")
    with pytest.raises(ConnectionLost, match=f"cannot connect to unix:{path}: "):
        Client(f"unix:{path}").connect()
    serve(lambda peer: (ping(peer), closing(peer)), path=path)
    with Client(f"unix:{path}") as client:
        client.ping()


def test_nobody_listens_there() -> None:
    client = Client(port=1)
    with pytest.raises(ConnectionLost, match=r"cannot connect to 127\.0\.0\.1:1"):
        client.ping()
    client.close()


def test_a_connection_that_is_never_accepted_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):  # more than the backlog holds: the kernel answers no further one
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        with pytest.raises(Timeout, match=r"no connection to .* within 0\.05 s"):
            Client(port=listener.getsockname()[1], connect_timeout=0.05).connect()


def test_close_during_a_generation_ends_it(serve: Any) -> None:
    def script(peer: Any) -> None:
        peer.accept()
        assert peer.next().line == b"QUIT"

    client = Client(port=serve(script))
    generation = client.generate("x")
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="the client was closed"):
        generation.wait()
    with pytest.raises(ConnectionLost, match="the client was closed"):
        generation.cancel()
