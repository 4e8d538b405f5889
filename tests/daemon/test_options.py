from coli_server.daemon.options import daemon_options, layered, policy_of, sampling_of
from coli_server.engine.api import SamplingOptions
from coli_server.protocol.options import OPTIONS
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings, policy_arguments


def test_every_option_has_a_value_without_anybody_setting_one() -> None:
    options = daemon_options(Settings())
    assert set(options) == set(OPTIONS)
    assert policy_of(options) == RoutePolicy()
    assert sampling_of(options) == SamplingOptions()


def test_a_request_wins_over_its_session_and_a_session_over_the_daemon() -> None:
    options = layered({"max": 1}, {"max": 2, "temp": 0.5}, daemon_options(Settings(route_j=3)))
    assert (options["max"], options["temp"], options["route_j"]) == (1, 0.5, 3)


def test_options_of_a_request_do_not_change_when_its_session_does() -> None:
    session = {"max": 2}
    options = layered({}, session)
    session["max"] = 3
    assert options["max"] == 2


def test_cache_route_turns_the_route_mode_on_and_the_mode_alone_does_not() -> None:
    daemon = daemon_options(Settings(route_mode="cache-prior", route_lambda=0.5))
    assert policy_of(layered({"cache_route": True}, daemon)).mode == "cache-prior"
    assert policy_of(layered({"cache_route": True}, daemon)).lam == 0.5
    assert policy_of(layered({"route_mode": "max-rank"}, daemon)).mode == "off"


def test_the_policy_of_the_daemons_options_is_that_of_its_settings() -> None:
    settings = Settings(cache_route=True, route_j=1, route_m=5, route_alpha=0.5, route_agree=False)
    assert policy_of(daemon_options(settings)) == RoutePolicy(**policy_arguments(settings))
