"""Run the daemon until SIGTERM or SIGINT. It can serve when it has said READY on stderr.

A flag wins over its environment variable, which wins over the default.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from coli_server.cli.arguments import make_parser
from coli_server.settings import TOKENS, add_arguments, environment, load


def main(words: Sequence[str]) -> int:
    parser = make_parser("serve", __doc__)
    add_arguments(parser)
    flags = vars(parser.parse_args(words))
    settings = load(flags, os.environ)
    # What is expensive to import comes after what can be refused at once.
    from coli_server import daemon
    from coli_server.models import model_folder

    model = str(model_folder(settings.model))

    def configure() -> daemon.Configuration:
        environ = environment(flags, os.environ)
        return daemon.Configuration(replace(load(flags, environ), model=model), environ.get(TOKENS, ""))

    return daemon.run(configure)
