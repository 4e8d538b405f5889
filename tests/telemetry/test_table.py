import dataclasses
import re

from coli_server.ranges import ROUTING
from coli_server.telemetry.counters import Counters
from coli_server.telemetry.table import FIGURES, HISTOGRAMS, SECTIONS, markdown

# What monitoring already relies on: no name may disappear. An `s` after a name: each session has it too.
PUBLISHED = """
version pid uptime_seconds model model_type mode ready draining
connections_current connections_total connections_rejected_total connections_rejected_address_total
sessions_current sessions_total sessions_evicted_total sessions_expired_total sessions_refused_total
sessions_unsaved_total busy_queue_total busy_connection_total busy_session_total queue_timeouts_total
engine_stalled engine_stalls_total
lines_too_long_total payloads_too_large_total half_command_timeouts_total idle_timeouts_total
auth_failures_total
requests_running requests_waiting requests_total s requests_stop_total s requests_length_total s
requests_cancelled_total s requests_deadline_total s requests_drained_total s requests_error_total s
prompt_tokens_total s generated_tokens_total s decode_steps s decode_seconds s tok_s s
ttft_ms_p50 ttft_ms_p99 itl_ms_p50 itl_ms_p99
cache_route s route_mode s route_j s route_m s route_p s route_alpha s route_lambda s route_scope s
route_capacity s route_prefill s pilot
route_slots s route_swaps s swap_pct s route_agree s route_rows s route_kl_sum s route_mass_sum s route_kl s
route_mass_kept s route_distinct_min route_distinct_median route_swap_run_max
lookups s hits_pin s hits_lru s misses s hit_pct s prefill_lookups s prefill_hits_pin s prefill_hits_lru s
prefill_misses s loads s load_bytes s load_errors load_seconds wait_seconds evictions
prefetch_issued prefetch_used prefetch_late prefetch_wasted prefetch_failed prefetch_in_flight
model_experts layers_resident cache_slots_per_layer cache_bytes cache_capacity_bytes pinned_experts
kv_bytes kv_capacity_bytes kv_evictions ram_bytes loop_tasks rss_bytes
protocol_errors_total slow_readers_total bytes_in_total bytes_out_total
event_loop_lag_ms_p99
"""


def test_every_published_name_is_a_figure_and_the_other_way_round() -> None:
    published = {name: bool(own) for name, own in re.findall(r"(\S{2,})( s\b)?", PUBLISHED)}
    assert {figure.name: figure.session for figure in FIGURES} == published


def test_names_are_unique_and_have_a_section() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert {figure.section for figure in FIGURES} == set(SECTIONS)


def test_every_counter_of_a_session_is_a_field_of_counters() -> None:
    fields = {field.name for field in dataclasses.fields(Counters)}
    assert {figure.name for figure in FIGURES if figure.session and figure.kind == "counter"} <= fields


def test_settings_among_the_figures_are_routing_options() -> None:
    names = {figure.name for figure in FIGURES if figure.kind == "setting"}
    # route_agree as a figure is the measured agreement, not the option of that name.
    assert names - {"pilot"} == set(ROUTING) - {"route_agree"}


def test_prometheus_names_are_legal_unique_and_end_in_total_exactly_for_counters() -> None:
    own = [figure for figure in FIGURES if figure.kind in ("counter", "gauge") and figure.prometheus]
    names = [figure.prometheus for figure in own] + [histogram.prometheus for histogram in HISTOGRAMS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"coli_[a-z_]+", name) for name in names)
    assert all(figure.prometheus.endswith("_total") == (figure.kind == "counter") for figure in own)


def test_quantiles_come_from_histograms_of_the_table() -> None:
    histograms = {histogram.prometheus for histogram in HISTOGRAMS}
    assert {figure.prometheus for figure in FIGURES if figure.kind == "quantile"} <= histograms


def test_markdown_has_a_row_for_each_figure() -> None:
    rows = re.findall(r"^\| `([a-z_0-9]+)` \|", markdown(), re.MULTILINE)
    assert sorted(rows) == sorted(figure.name for figure in FIGURES)
