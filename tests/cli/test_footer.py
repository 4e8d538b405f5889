from coli_client import Result
from coli_server.cli.footer import Hits, footer


def result(**fields: object) -> Result:
    values = {"tokens": 32, "tok_s": 28.314, "hit_pct": 81.2, "mode": "max-rank", "scope": "shared"}
    values |= {
        "swap_pct": 3.1,
        "route_swaps": 231,
        "route_slots": 7440,
        "route_agree": 96.9,
        "route_kl": 0.041,
    }
    return Result(id="1", text="", finish="length", prompt_tokens=5, **(values | fields))  # type: ignore[arg-type]


def test_with_routing_everything_is_shown() -> None:
    assert footer(result(), Hits(pin=1000, lru=5040)) == (
        "32 tok | 28.31 tok/s | hit 81.2% (pin 13.4 + lru 67.8) | swap 3.1% (231/7440)"
        " | route_agree 96.9% | route_kl 0.0410"
    )


def test_with_stock_routing_the_line_says_so() -> None:
    stock = result(mode="stock", swap_pct=0.0, route_swaps=0, route_slots=0, route_agree=None, route_kl=None)
    assert (
        footer(stock, Hits(lru=10)) == "32 tok | 28.31 tok/s | hit 81.2% (pin 0.0 + lru 81.2) | stock routing"
    )


def test_with_stock_routing_and_meters_on_what_they_measured_is_shown() -> None:
    metered = result(mode="stock", swap_pct=0.0, route_swaps=0, route_agree=100.0, route_kl=0.0)
    assert footer(metered, Hits()).endswith("| swap 0.0% (0/7440) | route_agree 100.0% | route_kl 0.0000")


def test_with_meters_off_their_names_are_left_out() -> None:
    assert footer(result(route_agree=None, route_kl=None), Hits()).endswith("| swap 3.1% (231/7440)")


def test_one_token_has_no_decoding_and_no_lookups() -> None:
    one = result(tokens=1, tok_s=0.0, hit_pct=0.0, swap_pct=0.0, route_swaps=0, route_slots=0)
    assert footer(one, Hits()).startswith(
        "1 tok | 0.00 tok/s | hit 0.0% (pin 0.0 + lru 0.0) | swap 0.0% (0/0)"
    )
