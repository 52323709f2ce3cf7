"""The dashboard and the page of metrics name the series that exist, all of them, and their labels."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from redis_sync_aio.contrib import _series, prometheus

DASHBOARD = json.loads(files("redis_sync_aio.contrib").joinpath("dashboard.json").read_text("utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
PAGE = Path(__file__).parents[2] / "docs" / "operations" / "metrics.md"
NAME = r"\bredis_sync_aio_\w+"


def sampled() -> dict[str, set[str]]:
    """The names of all samples that are scraped, with their labels, by those of the metric."""
    suffixes = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "up_down_counter": ("",)}
    unit = {"histogram": "_seconds"}
    return {
        series.prometheus_name + unit.get(series.kind, "") + suffix: {
            *(attribute.replace(".", "_") for attribute in series.attributes),
            *(["le"] if suffix == "_bucket" else []),
        }
        for series in _series.ALL
        for suffix in suffixes[series.kind]
    }


def test_every_query_names_series_and_labels_that_exist() -> None:
    known = sampled()
    for expression in EXPRESSIONS:
        [name] = set(re.findall(NAME, expression))
        assert name in known, expression
        matchers = re.findall(r"(\w+)(?:=~|!=|=)\"", expression)
        grouped = [label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")]
        assert matchers
        assert {*matchers, *grouped} <= known[name], expression


def test_every_series_has_a_panel() -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(NAME, expression)}
    for series in _series.ALL:
        assert any(name.startswith(series.prometheus_name) for name in shown), series.name


def test_every_legend_shows_labels_that_its_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(",")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation does not lie next to these tests")
def test_the_page_lists_every_series_and_every_attribute() -> None:
    page = PAGE.read_text("utf-8")
    registry = CollectorRegistry()
    with prometheus.collect(registry):
        scraped = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    for name in (*(series.name for series in _series.ALL), *scraped):
        assert f"| `{name}` |" in page, name
    for attribute in {attribute for series in _series.ALL for attribute in series.attributes}:
        assert f"`{attribute}`" in page, attribute
        assert f"`{attribute.replace('.', '_')}`" in page, attribute
    assert set(re.findall(NAME, page)) <= {*scraped, *sampled(), "redis_sync_aio_acquire_duration_seconds"}
