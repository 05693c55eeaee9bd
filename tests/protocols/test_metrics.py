"""The formats of the metrics, and which of them a client gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flare.errors import RequestError
from flare.metrics import FirstResponse
from flare.protocols.endpoint import encode_json
from flare.protocols.metrics import FAMILIES, METRICS, choose_format, metrics, status
from tests.support.live_server import make_model
from tests.support.readings import make_reading

SCRAPER = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)

SPECIFIED = {
    "prefill_tokens": ("flare_prefill_tokens_total", 1001),
    "generated_tokens": ("flare_generated_tokens_total", 2002),
    "decode_weight_bytes": ("flare_decode_weight_bytes", 101),
    "verification_rounds": ("flare_verification_request_rounds_total", 29),
    "active": ("flare_active_requests", 2),
    "pending": ("flare_pending_requests", 3),
    "completed": ("flare_requests_completed_total", 20),
    "failed": ("flare_requests_failed_total", 1),
    "free_pages": ("flare_free_kv_pages", 50),
    "total_pages": ("flare_total_kv_pages", 60),
    "page_tokens": ("flare_kv_page_tokens", 16),
}
"""Of the specified fields those that can be counted yet: the metric's name, and its value in the reading."""


def text(**changes: Any) -> str:
    body, content_type = metrics(make_reading(**changes), query="", accept="")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return body.decode()


def samples(exposition: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a text by its name and labels, as Prometheus's own parser reads it."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(exposition):
        assert family.type in ("counter", "gauge"), family
        assert family.documentation.endswith("."), family
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found and sample.name.startswith("flare_")
            found[key] = sample.value
    return found


def test_the_text_is_what_prometheus_reads() -> None:
    exposition = text()
    found = samples(exposition)
    for name, value in SPECIFIED.values():
        assert found[(name, ())] == value
    assert found[("flare_http_requests_total", (("route", "/v1/chat/completions"), ("status", "429")))] == 1
    assert found[("flare_http_requests_total", (("route", "other"), ("status", "404")))] == 11
    assert found[("flare_graph_launches_total", (("kind", "step"),))] == 31
    assert found[("flare_graph_launches_total", (("kind", "sample"),))] == 30
    assert found[("flare_http_admission_used", ())] == 6
    assert found[("flare_http_admission_capacity", ())] == 1024
    assert found[("flare_first_response_seconds_total", ())] == 4.75
    assert exposition.endswith("\n") and "\n\n" not in exposition


def test_every_metric_is_declared_once_with_its_kind() -> None:
    exposition = text()
    names = [metric.name for metric in (*METRICS, *FAMILIES)]
    assert len(set(names)) == len(names)
    assert re.findall(r"^# TYPE (\S+) ", exposition, re.M) == names
    assert re.findall(r"^# HELP (\S+) ", exposition, re.M) == names
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", exposition, re.M))
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())


@pytest.mark.parametrize("alias", ['a"b', "a\\b", "a\nb", "a}b, c", "ünï", "\\n", "\ud800"])
def test_a_label_holds_any_name(alias: str) -> None:
    found = samples(text(model=make_model(id=alias)))
    labels = [dict(pairs) for (name, pairs) in found if name == "flare_build_info"]
    assert [label["model"] for label in labels] == [alias.replace("\ud800", "?")]


def test_the_json_object() -> None:
    body, content_type = metrics(make_reading(), query="format=json", accept="")
    assert content_type == "application/json"
    value = json.loads(body)
    for field, (_, number) in SPECIFIED.items():
        assert value[field] == number and type(value[field]) is int
    assert value["first_response"] == {
        "median_seconds": 0.25,
        "samples": 18,
        "window_seconds": 60,
        "capacity": 4096,
        "truncated": False,
    }
    assert set(value) == {metric.json_name for metric in METRICS} | {"first_response"}
    empty = json.loads(
        metrics(make_reading(first_response=FirstResponse(None, 0, 60, 9, False)), query="format=json", accept="")[0]
    )
    assert empty["first_response"]["median_seconds"] is None


def test_both_formats_agree() -> None:
    found = samples(text())
    value = json.loads(metrics(make_reading(), query="", accept="application/json")[0])
    assert {metric.name: found[(metric.name, ())] for metric in METRICS} == {
        metric.name: value[metric.json_name] for metric in METRICS
    }


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", "prometheus"),
        ("*/*", "prometheus"),
        (SCRAPER, "prometheus"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "prometheus"),
        ("application/json", "json"),
        ("application/json, text/plain, */*", "json"),
        ("text/plain, application/json", "prometheus"),
        ("text/plain;q=0.5, application/json;q=0.5", "prometheus"),
        ("application/json;q=0.5, text/plain;q=0.5", "json"),
        ("text/plain;q=0.5, application/json;q=0.6", "json"),
        ("application/json;q=0.5, text/plain", "prometheus"),
        ("*/*, application/json;q=0.9", "prometheus"),
        ("application/json, */*", "json"),
        ("*/*, application/json", "prometheus"),
        ("*/*;q=0.4, application/json", "json"),
        ("application/*, text/plain;q=0.9", "json"),
        ("text/*, application/json", "prometheus"),
        ("text/plain;q=0.9, application/*;q=0.95, application/json;q=0.1", "prometheus"),
        ("application/json;q=0", "prometheus"),
        ("application/json;q=0, text/plain;q=0", "prometheus"),
        ("text/plain;q=0, */*", "json"),
        ("APPLICATION/JSON ; Q=0.8 , TEXT/PLAIN ; q=0.7", "json"),
        ("application/json;charset=utf-8, text/plain;q=0.9", "json"),
        ("application/json;q=much, text/plain;q=0.1", "prometheus"),
        ("application/json;q=nan, text/plain;q=0.1", "prometheus"),
        ("application/json;q=7, text/plain;q=0.1", "prometheus"),
        (",,;;,", "prometheus"),
        ("image/png", "prometheus"),
    ],
)
def test_the_header_chooses(accept: str, wanted: str) -> None:
    assert choose_format("", accept) == wanted
    assert choose_format("beta=true", accept) == wanted
    assert choose_format("format=json", accept) == "json"
    assert choose_format("a=b&format=prometheus", accept) == "prometheus"


@pytest.mark.parametrize(
    "query",
    [
        "format=",
        "format",
        "format=JSON",
        "format=text",
        "format=xml&a=b",
        "format=json&format=prometheus",
        "format=%0a",
        "format=%ff",
    ],
)
def test_another_format_is_refused(query: str) -> None:
    with pytest.raises(RequestError) as caught:
        choose_format(query, "application/json")
    assert (caught.value.status, caught.value.param) == (400, "format")
    assert str(caught.value).startswith("format: ") and str(caught.value).isprintable()


def test_status_tells_the_state_and_no_content() -> None:
    value = json.loads(encode_json(status(make_reading(), closing=False)))
    assert value["status"] == "ok"
    assert value["requests"] == {"submitted": 36, "completed": 20, "cancelled": 9, "failed": 1}
    assert (value["engine"]["active"], value["engine"]["waiting"]) == (2, 3)
    assert value["admission"] == {"used": 6, "capacity": 1024}
    assert value["target"] == {"kind": "cpu", "device": "generic"}
    assert value["cpu_fallback"] == {
        "allowed": True,
        "total": 43,
        "events": [{"cause": "the first cause", "count": 41}, {"cause": "another", "count": 2}],
    }
    refused = status(make_reading(fallbacks=(), fallbacks_allowed=False), closing=False)["cpu_fallback"]
    assert refused == {"allowed": False, "total": 0, "events": []}
    assert status(make_reading(), closing=True)["status"] == "stopping"


def test_the_documentation_lists_every_metric_and_no_other(repository: Path) -> None:
    page = (repository / "docs/metrics.md").read_text()
    table = page.partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(flare_\w+)` \| (\w+) \| (?:`(\w+)`|) *\|", table, re.M)
    declared = [(metric.name, metric.kind, metric.json_name) for metric in METRICS]
    assert rows == declared + [(family.name, family.kind, "") for family in FAMILIES]
    for family in FAMILIES:
        row = next(line for line in table.splitlines() if f"`{family.name}`" in line)
        assert all(f"`{label}`" in row for label in family.labels), row
