"""What deploy/ ships fits the daemon, and its tools accept it where they are installed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from coli_server.settings import SETTINGS, TOKENS, read_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KNOWN = {setting.env for setting in SETTINGS.values()} | {TOKENS, "COLI_TOKEN", "COLI_CACHE"}
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "docker/compose.yml").read_text("utf-8"))
MANIFESTS: list[dict[str, Any]] = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yml"))
    for document in yaml.safe_load_all(path.read_text("utf-8"))
]
(POD,) = (one["spec"]["template"]["spec"] for one in MANIFESTS if one["kind"] == "StatefulSet")
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize(
    "path",
    [p for p in DEPLOY.rglob("*") if p.is_file() and "__pycache__" not in p.parts],
    ids=lambda p: p.name,
)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    assert set(re.findall(r"\b(?:COLI_[A-Z_]+|CACHE_ROUTE|ROUTE_[JM])\b", text)) <= KNOWN
    flags = {setting.flag for setting in SETTINGS.values()}
    named = set(re.findall(r"(?<![\w-])--(?:drain|ram|step|queue|config)[a-z-]*", text))
    assert named <= flags


def test_every_yaml_file_is_yaml() -> None:
    for path in DEPLOY.rglob("*.yml"):
        assert all(yaml.safe_load_all(path.read_text("utf-8"))), path


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd" / name, "utf-8")
    return parser


def test_the_unit_speaks_the_daemons_notifications_and_waits_for_its_drain() -> None:
    service = unit("coli.service")["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"].removesuffix("s")) >= 10
    assert int(service["TimeoutStopSec"].removesuffix("s")) > float(SETTINGS["drain_seconds"].default or 0)
    assert unit("coli.socket")["Socket"]["ListenStream"] == SETTINGS["listen"].default


def test_the_configuration_file_of_the_unit_is_read() -> None:
    assert read_config(str(DEPLOY / "systemd/coli.conf"))["COLI_RAM"] == "8G"


def test_systemd_accepts_the_units_and_finds_them_hardened_where_it_is_installed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    text = (DEPLOY / "systemd/coli.service").read_text("utf-8")
    assert "NoNewPrivileges=yes" in text
    if analyze is None:
        return
    # Programs are looked for when a unit is verified: this one is installed elsewhere here.
    (tmp_path / "coli.service").write_text(re.sub(r"/opt/coli/\S+/coli", "/bin/sh", text))
    shutil.copy(DEPLOY / "systemd/coli.socket", tmp_path)
    units = [str(tmp_path / "coli.service"), str(tmp_path / "coli.socket")]
    done = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = [analyze, "security", "--offline=true", "--threshold=25", units[0]]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_haproxy_accepts_its_configuration_where_it_is_installed() -> None:
    config = DEPLOY / "haproxy/haproxy.cfg"
    assert "balance hash" in config.read_text("utf-8")
    if haproxy := shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin"):
        done = subprocess.run([haproxy, "-c", "-f", str(config)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_image_runs_as_nobody_special_and_keeps_its_data_in_a_volume() -> None:
    lines = DOCKERFILE.splitlines()
    final = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER coli" in final
    assert "VOLUME /var/lib/coli" in final
    assert "/healthz" in DOCKERFILE
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists(), name
        assert f"!{name}" in (DEPLOY.parent / ".dockerignore").read_text().splitlines()


def test_compose_mounts_files_that_exist_and_opens_ports_to_this_machine_only() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / "docker" / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_pod_is_probed_at_the_pages_of_the_metrics_port_and_has_time_to_drain() -> None:
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} == {"/healthz", "/readyz"}
    assert probes["liveness"] == {"path": "/healthz", "port": "metrics"}
    environment = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
    assert POD["terminationGracePeriodSeconds"] > float(environment["COLI_DRAIN_SECONDS"])
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    names = {port["name"] for port in CONTAINER["ports"]}
    monitored = [
        p for one in MANIFESTS if one["kind"] == "PodMonitor" for p in one["spec"]["podMetricsEndpoints"]
    ]
    assert {p["port"] for p in monitored} <= names


def test_kubernetes_schemas_accept_the_manifests_where_they_are_installed() -> None:
    assert {one["kind"] for one in MANIFESTS} == {
        "Service",
        "PodDisruptionBudget",
        "StatefulSet",
        "PodMonitor",
    }
    if find_spec("kubernetes_validate"):
        import kubernetes_validate

        for one in MANIFESTS:
            if one["kind"] != "PodMonitor":  # of the Prometheus operator, not of Kubernetes itself
                kubernetes_validate.validate(one, "1.30", strict=True)
