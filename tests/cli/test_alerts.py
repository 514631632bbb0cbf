"""The alerts in Prometheus' own hands, where it is installed (Debian's package `prometheus`)."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CASES = Path(__file__).with_name("alerts.yaml")


def promtool(*arguments: object) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool here (Debian: apt install prometheus)")
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_prometheus_takes_the_files() -> None:
    promtool("check", "rules", DEPLOY / "alerts.yaml")
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus.yaml")


def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", CASES)


def test_each_alert_has_a_case_of_firing_and_one_of_silence() -> None:
    asked = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]
    for fires in (True, False):
        assert {each["alertname"] for each in asked if bool(each["exp_alerts"]) == fires} == set(alerts())
