"""docs/CACHE_ROUTE.md: its example and its table of settings say what the code does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy, select

TEXT = (Path(__file__).parents[2] / "docs" / "CACHE_ROUTE.md").read_text("utf-8")
FIELDS = {"J": "j", "M": "m", "P": "p", "alpha": "alpha", "lambda": "lam"}


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below the table heading that begins with `heading`."""
    lines = TEXT[TEXT.index(f"\n{heading}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def policy(words: str) -> RoutePolicy:
    mode, *settings = words.split()
    fields = dict(word.split("=") for word in settings)
    numbers = {FIELDS[k]: float(v) if k in ("P", "alpha", "lambda") else int(v) for k, v in fields.items()}
    return RoutePolicy(mode, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", table("| settings | chosen"), ids=lambda row: row[0])
def test_the_example_by_hand_is_right(row: list[str]) -> None:
    mass, logits = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32)
    resident = np.zeros(8, np.bool_)
    ranked = table("| rank | expert")
    for _, expert, w, z, here in ranked:
        mass[0, int(expert)], logits[0, int(expert)], resident[int(expert)] = (
            float(w),
            float(z),
            here == "yes",
        )
    words, chosen, weights, swaps, reads, kl, kept = row
    got = select(mass, mass, resident, 4, policy(words), logits=logits, renormalize=True)
    experts = got.experts[0]
    assert [cells[1] for cells in ranked[:4]] == [str(e) for e in got.true[0]]
    assert " ".join(map(str, experts)) == chosen
    assert " ".join(f"{w:.3f}" for w in got.weights[0]) == weights
    assert (str(got.swaps[0]), str(np.count_nonzero(~resident[experts]))) == (swaps, reads)
    assert (f"{got.kl[0]:.3f}", f"{got.mass_kept[0]:.3f}") == (kl, kept)


def test_every_setting_is_there_with_its_range_and_default() -> None:
    rows = {
        name.strip("`"): (default.strip("`"), accepted) for name, default, accepted, _ in table("| setting |")
    }
    assert {name: accepted for name, (_, accepted) in rows.items()} == {
        name.upper(): str(accepted) for name, accepted in ROUTING.items()
    }
    defaults = {name.lower(): ROUTING[name.lower()].parse(word) for name, (word, _) in rows.items()}
    assert defaults.pop("cache_route") is False
    renamed = {
        f"route_{n}": n for n in ("mode", "j", "m", "p", "alpha", "agree", "scope", "capacity", "prefill")
    }
    renamed["route_lambda"] = "lam"
    assert RoutePolicy("max-rank") == RoutePolicy(**{renamed[n]: v for n, v in defaults.items()})  # type: ignore[arg-type]
