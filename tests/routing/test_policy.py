"""RoutePolicy: what it accepts, what it refuses, how it describes itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from coli_server.errors import ConfigurationError
from coli_server.routing import PolicyError, RoutePolicy, RoutingError


def test_defaults_are_the_stock_router() -> None:
    policy = RoutePolicy()
    assert policy == RoutePolicy(
        mode="off",
        j=2,
        m=12,
        p=0.0,
        alpha=1.0,
        lam=0.1,
        scope="shared",
        capacity=0,
        prefill=False,
        agree=None,
    )
    assert not policy.active


def test_a_policy_cannot_change_and_can_be_a_key() -> None:
    policy = RoutePolicy("max-rank")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.j = 3  # type: ignore[misc]
    assert {policy: 1}[RoutePolicy("max-rank")] == 1


@pytest.mark.parametrize(
    ("setting", "fields", "accepted"),
    [
        ("ROUTE_MODE", {"mode": "on"}, "off, max-rank or cache-prior"),
        ("ROUTE_MODE", {"mode": True}, "off, max-rank or cache-prior"),
        ("ROUTE_MODE", {"mode": "Max-Rank"}, "off, max-rank or cache-prior"),
        ("ROUTE_J", {"j": -1}, "[0, 2147483647]"),
        ("ROUTE_J", {"j": True}, "[0, 2147483647]"),
        ("ROUTE_J", {"j": 2.0}, "[0, 2147483647]"),
        ("ROUTE_J", {"j": "2"}, "[0, 2147483647]"),
        ("ROUTE_J", {"j": 2**31}, "[0, 2147483647]"),
        ("ROUTE_J", {"j": None}, "[0, 2147483647]"),
        ("ROUTE_M", {"m": 0}, "[1, 2147483647]"),
        ("ROUTE_M", {"m": False}, "[1, 2147483647]"),
        ("ROUTE_M", {"m": math.nan}, "[1, 2147483647]"),
        ("ROUTE_P", {"p": 1.0}, "[0, 1)"),
        ("ROUTE_P", {"p": -1e-9}, "[0, 1)"),
        ("ROUTE_P", {"p": math.nan}, "[0, 1)"),
        ("ROUTE_P", {"p": True}, "[0, 1)"),
        ("ROUTE_P", {"p": "0.5"}, "[0, 1)"),
        ("ROUTE_ALPHA", {"alpha": 0.0}, "(0, 1]"),
        ("ROUTE_ALPHA", {"alpha": 1.0000001}, "(0, 1]"),
        ("ROUTE_ALPHA", {"alpha": math.nan}, "(0, 1]"),
        ("ROUTE_LAMBDA", {"lam": -0.1}, "[0, 1]"),
        ("ROUTE_LAMBDA", {"lam": math.inf}, "[0, 1]"),
        ("ROUTE_LAMBDA", {"lam": 1j}, "[0, 1]"),
        ("ROUTE_SCOPE", {"scope": "global"}, "shared or session"),
        ("ROUTE_CAPACITY", {"capacity": -1}, "[0, 2147483647]"),
        ("ROUTE_CAPACITY", {"capacity": 1.5}, "[0, 2147483647]"),
        ("ROUTE_PREFILL", {"prefill": 1}, "0 or 1"),
        ("ROUTE_AGREE", {"agree": "auto"}, "auto, 0 or 1"),
        ("ROUTE_AGREE", {"agree": 0}, "auto, 0 or 1"),
    ],
)
def test_a_bad_value_is_refused_by_name(setting: str, fields: dict[str, Any], accepted: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        RoutePolicy(**fields)
    (value,) = fields.values()
    message = str(refusal.value)
    assert message.startswith(f"{setting} is {value!r}: ")
    assert accepted in message
    assert "\n" not in message
    assert refusal.value.code == "BAD_OPTION"
    assert isinstance(refusal.value, RoutingError)
    assert isinstance(refusal.value, ConfigurationError)


@pytest.mark.parametrize(
    "fields",
    [
        {"j": 0},
        {"j": 2**31 - 1},
        {"m": 1},
        {"m": 2**31 - 1},
        {"p": 0},
        {"p": 0.999999},
        {"alpha": 1},
        {"alpha": 5e-324},
        {"lam": 0},
        {"lam": 1},
        {"capacity": 2**31 - 1},
        {"agree": False},
    ],
)
def test_the_ends_of_the_ranges_are_accepted(fields: dict[str, Any]) -> None:
    RoutePolicy("max-rank", **fields)


def test_numbers_of_other_types_become_plain_ones() -> None:
    policy = RoutePolicy("max-rank", j=np.int32(1), m=np.int64(4), p=0, alpha=np.float32(0.5))  # type: ignore[arg-type]
    assert [type(v) for v in (policy.j, policy.m, policy.p, policy.alpha)] == [int, int, float, float]
    assert policy == RoutePolicy("max-rank", j=1, m=4, alpha=0.5)


def test_meters_follow_the_mode_unless_told() -> None:
    assert [RoutePolicy(mode).meters for mode in ("off", "max-rank", "cache-prior")] == [False, True, True]
    assert RoutePolicy(agree=True).meters
    assert not RoutePolicy("max-rank", agree=False).meters


def test_session_capacity_defaults_to_half_of_the_experts_and_never_under_k() -> None:
    assert RoutePolicy().session_capacity(8, 64) == 32
    assert RoutePolicy().session_capacity(8, 15) == 8
    assert RoutePolicy().session_capacity(4, 15) == 7
    assert RoutePolicy(capacity=3).session_capacity(8, 64) == 3


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (RoutePolicy(j=5, scope="session"), "stock"),
        (RoutePolicy("max-rank"), "max-rank,J=2,M=12,shared"),
        (
            RoutePolicy("max-rank", p=0.9, alpha=0.5, scope="session"),
            "max-rank,J=2,P=0.9,alpha=0.5,session",
        ),
        (RoutePolicy("cache-prior"), "cache-prior,lambda=0.1,J=2,shared"),
        (RoutePolicy("cache-prior", j=0, lam=1.0), "cache-prior,lambda=1,J=0,shared"),
        (
            RoutePolicy("max-rank", m=24, scope="session", capacity=8, prefill=True),
            "max-rank,J=2,M=24,session,capacity=8,prefill",
        ),
        (RoutePolicy("max-rank", p=0.9999999), "max-rank,J=2,P=0.9999999,shared"),
    ],
)
def test_describe_says_what_is_on(policy: RoutePolicy, words: str) -> None:
    assert policy.describe() == words
