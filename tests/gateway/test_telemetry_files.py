"""Dashboards and alert rules as files: they parse, and every metric they ask for is one that we export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from django.conf import settings

from gateway.metrics import GatewayCounters, render

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = ROOT / "deploy/prometheus/rules.yml"
RUNBOOK = ROOT / "docs/operations.md"
NAME = re.compile(r"\b(?:rubato|gen_ai)_[a-z_]+\b|\bup\b")
LABELS = {"gen_ai_request_model"}
COMPARED = {"at": "2026-11-29T12:00:00+00:00"}


def exported() -> set[str]:
    """Every sample name that can stand on the page."""
    page = render([], GatewayCounters(), compared=COMPARED, now_s=1_795_953_630.0, names_tenants=True).decode()
    names = {"up"}  # Prometheus' own
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries(dashboard: Path) -> Iterator[str]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$worker", ".+")


EXPRESSIONS = [
    *((rule["alert"], rule["expr"]) for rule in alerts()),
    *((path.stem, expression) for path in DASHBOARDS for expression in queries(path)),
]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=lambda part: str(part)[:40])
def test_each_query_is_promql_over_series_that_we_export(where: str, expression: str) -> None:
    promql_parser.parse(expression)  # raises ValueError with the place
    asked = set(NAME.findall(expression)) - LABELS

    assert asked
    assert asked <= exported()


def test_each_alert_says_what_is_wrong_and_where_the_runbook_tells_what_to_do() -> None:
    anchors = set(re.findall(r'<a id="([a-z-]+)"></a>', RUNBOOK.read_text()))
    for rule in alerts():
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["labels"]["runbook"] in anchors, rule["alert"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_panels_of_a_dashboard_have_titles_and_do_not_overlap(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_compose_mounts_files_that_exist_and_gives_prometheus_the_token() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]

    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] if not source.startswith(".") else (ROOT / source).exists(), volume
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/metrics_token"
    assert services["prometheus"]["secrets"] == ["metrics_token"]
    assert "RUBATO_METRICS_TOKEN" in services["gateway"]["environment"]
    folder = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/rubato.yml").read_text())["providers"][0]
    assert any(folder["options"]["path"] in volume for volume in services["grafana"]["volumes"])


def test_compose_has_a_worker_for_a_cpu_and_one_for_a_gpu_that_record_where_the_desk_looks() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    workers = {name: service for name, service in services.items() if "gpu_worker" in service.get("command", ())}
    assert {name: service["profiles"] for name, service in workers.items()} == {
        "worker": ["cpu"],
        "worker-cuda": ["cuda"],
    }
    assert "deploy" not in workers["worker"]
    (device,) = workers["worker-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    recorded = settings.RUBATO_RECORDED_DIR.removeprefix(str(settings.DATA_DIR))
    for service in (*workers.values(), services["gateway"]):
        assert f"recorded:/data{recorded}" in service["volumes"]
    assert all(f"--record=/data{recorded}" in worker["command"] for worker in workers.values())
