"""Watch a daemon with a memcached client: STAT answers as memcached's `stats` does.

`pip install pymemcache`, then `python memcached_monitor.py 127.0.0.1:7311`. Prints one line and ends with
status 0 when all is well, 1 when the daemon is not ready, 2 when it does not answer: as monitoring systems
want their checks.
"""

from __future__ import annotations

import sys

from pymemcache import MemcacheError
from pymemcache.client.base import Client


def check(address: str) -> tuple[int, str]:
    """The status and the line for the daemon at HOST:PORT."""
    host, _, port = address.rpartition(":")
    client = Client((host, int(port)), connect_timeout=5, timeout=5)
    try:
        told = client.stats()
    except (MemcacheError, OSError) as error:
        return 2, f"no answer from {address}: {error}"
    finally:
        client.close()
    figures = {
        name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in told.items()
    }
    shown = ("requests_running", "requests_waiting", "tok_s", "hit_pct", "swap_pct", "mode")
    words = " ".join(f"{name}={figures[name]}" for name in shown)
    ready = str(figures["ready"]) == "1"
    return (0, f"ready {words}") if ready else (1, f"not ready {words}")


if __name__ == "__main__":
    status, line = check(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7311")
    print(line)
    sys.exit(status)
