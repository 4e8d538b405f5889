"""All cases of tests/data/route_select.jsonl, alone and in batches, and proof that they can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coli_server.routing import RoutePolicy, Selection, select

Case = dict[str, Any]
Rows = list[Case]


def arguments(case: Case, rows: Rows) -> dict[str, Any]:
    """The arguments that route `rows` (cases of one E and family) under the policy of `case`."""
    policy = case["policy"]
    resident = np.zeros((len(rows), len(case["scores"])), np.bool_)
    for i, row in enumerate(rows):
        resident[i, row["resident"]] = True
    return {
        "scores": np.array([row["scores"] for row in rows], np.float32),
        "weights": np.array([row["weights"] for row in rows], np.float32),
        "resident": resident,
        "k": case["K"],
        "policy": RoutePolicy(
            policy["mode"],
            j=policy["J"],
            m=policy["M"],
            p=policy["P"],
            alpha=policy["alpha"],
            lam=policy["lam"],
        ),
        "logits": np.array([row["logits"] for row in rows], np.float32)
        if case["scoring"] == "softmax"
        else None,
        "span": policy["span"],
        "renormalize": policy["renorm"],
        "scale": policy["scale"],
    }


def fits(selection: Selection, row: int, expect: dict[str, Any]) -> bool:
    return (
        selection.experts[row].tolist() == expect["experts"]
        and selection.true[row].tolist() == expect["true"]
        and bool(np.all(np.abs(selection.weights[row] - expect["weights"]) < 1e-5))
        and int(selection.swaps[row]) == expect["swaps"]
        and int(selection.agree[row]) == expect["agree"]
        and abs(float(selection.kl[row]) - expect["kl"]) < 1e-6
        and abs(float(selection.mass_kept[row]) - expect["mass_kept"]) < 1e-6
    )


def test_one_token_at_a_time(cases: Rows) -> None:
    wrong = [case["id"] for case in cases if not fits(select(**arguments(case, [case])), 0, case["expect"])]
    assert len(cases) == 240
    assert wrong == []


def test_batched_with_other_tokens(
    cases: Rows, same_bytes: Callable[[Selection, int, Selection, int], bool]
) -> None:
    """Each case among all others of its shape: its own row fits, and every row has its lone bytes."""
    for case in cases:
        rows = [
            other
            for other in cases
            if len(other["scores"]) == len(case["scores"]) and other["scoring"] == case["scoring"]
        ]
        together = select(**arguments(case, rows))
        assert fits(together, rows.index(case), case["expect"]), case["id"]
        for i in range(0, len(rows), 7):
            alone = select(**arguments(case, [rows[i]]))
            assert same_bytes(together, i, alone, 0), (case["id"], rows[i]["id"])


def test_one_residency_row_serves_all_tokens(
    cases: Rows, same_bytes: Callable[[Selection, int, Selection, int], bool]
) -> None:
    for case in cases:
        given = arguments(case, [case] * 3)
        together = select(**{**given, "resident": given["resident"][0]})
        assert fits(together, 2, case["expect"]), case["id"]
        assert same_bytes(together, 0, together, 2)


def _without(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fault(given: dict[str, Any]) -> dict[str, Any]:
        p = given["policy"]
        fields = {name: getattr(p, name) for name in ("mode", "j", "m", "p", "alpha", "lam")}
        return {**given, "policy": RoutePolicy(**{**fields, **changes})}

    return fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(_without(mode="off"), id="lever silently off"),
        pytest.param(_without(j=0), id="true top-J not kept"),
        pytest.param(_without(m=4096, p=0.0), id="no window"),
        pytest.param(_without(p=0.0), id="P ignored"),
        pytest.param(_without(alpha=1.0), id="alpha ignored"),
        pytest.param(_without(lam=0.0), id="lambda ignored"),
        pytest.param(lambda given: {**given, "renormalize": True}, id="always renormalised"),
        pytest.param(lambda given: {**given, "scale": 1.0}, id="no scaling factor"),
        pytest.param(lambda given: {**given, "logits": None}, id="bonus on probabilities"),
        pytest.param(lambda given: {**given, "weights": given["scores"]}, id="biased scores as weights"),
        pytest.param(lambda given: {**given, "scores": given["weights"]}, id="ranked without the bias"),
        pytest.param(lambda given: {**given, "resident": ~given["resident"]}, id="residency inverted"),
    ],
)
def test_the_cases_notice(fault: Callable[[dict[str, Any]], dict[str, Any]], cases: Rows) -> None:
    assert not all(fits(select(**fault(arguments(case, [case]))), 0, case["expect"]) for case in cases)
