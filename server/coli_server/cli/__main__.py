"""`python -m coli_server.cli`: what the launcher runs."""

import sys

from coli_server.cli import main

sys.exit(main())
