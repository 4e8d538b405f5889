"""The command line: `coli <command> ...`. One module a command; nothing is imported before it is needed."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "serve": "run the daemon",
    "chat": "talk with a model in the terminal",
    "gen": "continue one text",
    "stat": "show a daemon's figures",
    "top": "watch a daemon in the terminal",
    "pull": "fetch and make the default model",
    "inspect": "describe a model folder",
    "convert": "store a model's weights in 16, 8 or 4 bits",
    "bench": "measure speed, cache and quality",
    "tune": "choose cache-aware routing for this machine by measuring",
    "test": "run Coli's own tests",
    "version": "show the version",
}
_ALIASES = {"-h": "help", "--help": "help", "--version": "version", "-V": "version"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status: 0, 1 for a failure, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = _ALIASES.get(words[0], words[0]) if words else None
    if name is None or name == "help":
        print(_usage(), end="", file=sys.stderr if name is None else sys.stdout)
        return 2 if name is None else 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}", 2)
    return _run(name, words[1:])


def _run(name: str, words: Sequence[str]) -> int:
    from coli_client import ColiError as ClientError
    from coli_server.errors import ColiError, ConfigurationError

    try:
        module = importlib.import_module(f"coli_server.cli.{name}")
        try:
            return int(module.main(words))
        finally:
            sys.stdout.flush()  # here, where a reader that is gone can be dealt with
    except ConfigurationError as error:
        return _fail(str(error), 2)
    except (ColiError, ClientError) as error:
        nobody = isinstance(error.__cause__, ConnectionRefusedError)
        return _fail(f"{error}; is a daemon running? `coli serve` starts one" if nobody else str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("coli"):
            raise
        extra = "dev" if name == "test" else "lm-eval" if package == "lm_eval" else "server"
        return _fail(f"{name} needs the Python package {package}: pip install 'coli[{extra}]'", 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _fail(message: str, status: int) -> int:
    print(f"coli: {message}", file=sys.stderr)
    return status


def _usage() -> str:
    lines = ["usage: coli <command> [options]", ""]
    lines += [f"  {name:<8} {help}" for name, help in COMMANDS.items()]
    return "\n".join([*lines, "", "coli <command> --help explains one of them.", ""])
