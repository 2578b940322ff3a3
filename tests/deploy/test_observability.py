"""Prometheus' and Grafana's files: they name what greenroom measures, and what they say of each other holds."""

from __future__ import annotations

import ast
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.core.generation import FinishReason
from tests.deploy.compose import ROOT, services

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
SOURCES = ROOT / "services" / "greenroom"
_METRIC = re.compile(r"\b(?:greenroom|process)_[a-z0-9_]+\b|\b[a-z_]+:[a-z0-9_]+:[a-z0-9_]+\b")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")
_COLUMNS = 24


def _rules(kind: str) -> list[dict[str, Any]]:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


@cache
def _dashboard() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "greenroom.json").read_text(encoding="utf-8"))
    return parsed


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def _expressions() -> dict[str, str]:
    """By where they stand."""
    found = {f"rule {rule.get('record') or rule['alert']}": rule["expr"] for rule in _rules("expr")}
    for panel in _panels():
        for target in panel["targets"]:
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    return found


@cache
def _measured() -> set[str]:
    """The names that the code can register: in every file that makes metrics, its prefixes with its words."""
    names: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "prometheus_client" not in text:
            continue
        words = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        strings = {word for word in words if isinstance(word, str) and re.fullmatch(r"[a-z0-9_]+", word)}
        prefixes = {word for word in strings if word.startswith("greenroom_") and word.endswith("_")}
        names |= strings | {prefix + word for prefix, word in itertools.product(prefixes, strings)}
    return names


def test_the_code_measures_what_the_test_thinks() -> None:
    """Or the next test would pass whatever the files say."""
    assert "greenroom_scheduler_active" in _measured()
    assert "greenroom_prompt_tokens" in _measured()
    assert "greenroom_predictor_lag" in _measured()
    assert "greenroom_expert_lookups" in _measured()
    assert "greenroom_expert_loopups" not in _measured()


@pytest.mark.parametrize(("where", "expression"), _expressions().items(), ids=_expressions())
def test_whatever_is_asked_for_is_measured(where: str, expression: str) -> None:
    recorded = {rule["record"] for rule in _rules("record")}
    known_of_processes = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    named = set(_METRIC.findall(re.sub(r'"[^"]*"', "", expression)))
    assert named or "up{" in expression
    for name in named:
        base = _SUFFIX.sub("", name)
        assert name in recorded | known_of_processes or {name, base} & _measured(), f"nothing measures {name}"


def test_reasons_that_are_asked_for_exist() -> None:
    said = set(re.findall(r'finished_reason="(\w+)"', "".join(_expressions().values())))
    assert said
    assert said <= {reason.value for reason in FinishReason}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in _rules("alert"):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


def test_alerts_and_records_have_names_of_their_own() -> None:
    names = [rule.get("alert") or rule["record"] for rule in _rules("expr")]
    assert len(names) == len(set(names))


def test_most_alerts_are_tried() -> None:
    """promtool runs these; here only that none is forgotten when one is renamed."""
    tried = {
        case["alertname"]
        for test in yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    }
    assert tried <= {rule["alert"] for rule in _rules("alert")}
    assert len(tried) >= 8


def test_every_service_is_scraped_where_it_answers() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    ports = {job["job_name"]: job["dns_sd_configs"][0]["port"] for job in jobs}
    for job in jobs:
        assert job["dns_sd_configs"][0]["names"] == [job["job_name"]]
    expected = {
        name: next((int(word.partition("=")[2]) for word in service["command"] if "--probe-port=" in word), 8000)
        for name, service in services().items()
        if service["image"].startswith("greenroom-") and service["restart"] != "no" and not service.get("profiles")
    }
    assert ports == expected


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "greenroom.yml").read_text())["providers"][0]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in services()["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    home = Path(services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (GRAFANA / "dashboards" / home.name).is_file()
    for panel in _panels():
        assert panel["datasource"]["uid"] == source["uid"]
        assert all(target["datasource"]["uid"] == source["uid"] for target in panel["targets"])


def test_the_dashboard_has_what_grafana_needs() -> None:
    dashboard = _dashboard()
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in _panels():
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(letters) == len(set(letters))
        assert all(target["expr"] for target in panel["targets"])


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in _dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= _COLUMNS
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]


def test_variables_that_are_used_are_there() -> None:
    defined = {variable["name"] for variable in _dashboard()["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$(\w+)", "".join(target["expr"] for panel in _panels() for target in panel["targets"])))
    assert used <= defined
