"""GET /metrics: every number of a reading, as Prometheus text or as one JSON object. GET /v1/flare/status: the same for
people, grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from flare import __version__
from flare.errors import RequestError
from flare.metrics import Reading
from flare.protocols.endpoint import encode_json
from flare.protocols.refusals import shown

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_TYPE = "application/json"

ENGINE_FIELDS = (
    "slots",
    "active",
    "waiting",
    "free_pages",
    "total_pages",
    "page_tokens",
    "steps",
    "samples",
    "prefill_tokens",
    "recomputed_tokens",
    "generated_tokens",
    "decode_rounds",
    "preemptions",
)
"""What the status shows of the engine. Not its ends of requests: output that could not be used fails after them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric without labels. `field` is its name in the JSON object; our own have the name without `flare_`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Reading], int | float]
    field: str = ""

    @property
    def json_name(self) -> str:
        return self.field or self.name.removeprefix("flare_")


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name that labels tell apart; only in the text. `read` gives the labels' values and the number."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Reading], Iterable[tuple[tuple[object, ...], int]]]


def _counter(name: str, help: str, read: Callable[[Reading], int | float], field: str = "") -> Metric:
    return Metric(f"flare_{name}_total", "counter", help, read, field)


def _gauge(name: str, help: str, read: Callable[[Reading], int | float], field: str = "") -> Metric:
    return Metric(f"flare_{name}", "gauge", help, read, field)


METRICS = (
    _counter(
        "prefill_tokens",
        "Prompt tokens that completed prefill, each once.",
        lambda r: r.engine.prefill_tokens,
        "prefill_tokens",
    ),
    _counter(
        "generated_tokens",
        "Generated tokens, terminating tokens and tokens behind a stop string included.",
        lambda r: r.engine.generated_tokens,
        "generated_tokens",
    ),
    _gauge(
        "decode_weight_bytes",
        "Bytes of weights that one decode step reads.",
        lambda r: r.model.decode_weight_bytes,
        "decode_weight_bytes",
    ),
    _counter(
        "verification_request_rounds",
        "Tokens of requests beyond their first one: a request's part in a decode step.",
        lambda r: r.engine.decode_rounds,
        "verification_rounds",
    ),
    _gauge("active_requests", "Slots of the model with a live request.", lambda r: r.engine.active, "active"),
    _gauge("pending_requests", "Requests that wait for a slot of the model.", lambda r: r.engine.waiting, "pending"),
    _counter("requests_submitted", "Requests handed to the model, one for each choice.", lambda r: r.submitted),
    _counter("requests_completed", "Requests that ended well.", lambda r: r.completed, "completed"),
    _counter("requests_cancelled", "Requests whose client gave them up.", lambda r: r.cancelled),
    _counter(
        "requests_failed",
        "Requests that the model could not take, or that failed in it or in their output.",
        lambda r: r.failed,
        "failed",
    ),
    _counter(
        "reasoning_budget_cuts",
        "Requests whose reasoning was closed because its budget was used up.",
        lambda r: r.engine.forced,
        "reasoning_budget_cuts",
    ),
    _counter(
        "scored_prompt_tokens", "Prompt tokens whose log probabilities were computed.", lambda r: r.engine.scored_tokens
    ),
    _counter("masked_tokens", "Tokens that were drawn under a grammar's mask.", lambda r: r.engine.masked_tokens),
    _counter("mask_seconds", "Seconds that the masks of grammars took.", lambda r: r.engine.mask_seconds),
    _gauge("free_kv_pages", "KV pages that nobody holds.", lambda r: r.engine.free_pages, "free_pages"),
    _gauge("total_kv_pages", "KV pages of the pool.", lambda r: r.engine.total_pages, "total_pages"),
    _gauge("kv_page_tokens", "Token positions of one KV page.", lambda r: r.engine.page_tokens, "page_tokens"),
    _gauge("slots", "Requests that the model runs at a time.", lambda r: r.engine.slots),
    _counter("preemptions", "Times that a request lost its KV pages to an older one.", lambda r: r.engine.preemptions),
    _counter(
        "recomputed_tokens", "Tokens to be computed again after a preemption.", lambda r: r.engine.recomputed_tokens
    ),
    _counter(
        "cpu_fallback",
        "Times that a node or a whole step ran on the processor for want of a kernel or of a device.",
        lambda r: r.fallbacks_total,
    ),
    _counter("first_responses", "Answers whose first text was offered.", lambda r: r.first_responses),
    _counter(
        "first_response_seconds",
        "Seconds from HTTP admission to the first text of these answers.",
        lambda r: round(r.first_response_seconds, 6),
    ),
    _gauge("http_admission_used", "Choices in the server.", lambda r: r.load.admission_used),
    _gauge("http_admission_capacity", "Choices that the server admits at a time.", lambda r: r.load.admission_capacity),
    _gauge("http_body_bytes", "Bytes of request bodies being read or decoded.", lambda r: r.load.body_bytes),
    _gauge(
        "http_body_bytes_capacity",
        "Bytes of request bodies that may be held at a time.",
        lambda r: r.load.body_bytes_capacity,
    ),
    _gauge("http_connections", "Open HTTP connections.", lambda r: r.load.connections),
    _gauge("http_connections_capacity", "HTTP connections that may be open.", lambda r: r.load.connections_capacity),
    _gauge("healthy", "1 while the model can run requests, else 0.", lambda r: int(r.engine.healthy)),
    _gauge("uptime_seconds", "Seconds since the server started.", lambda r: round(r.uptime_seconds, 3)),
)

FAMILIES = (
    Family(
        "flare_graph_launches_total",
        "counter",
        "Graphs that ran to their end.",
        ("kind",),
        lambda r: [(("step",), r.engine.steps), (("sample",), r.engine.samples)],
    ),
    Family(
        "flare_http_requests_total",
        "counter",
        "HTTP requests by route and status; 499 where the client left before an answer began.",
        ("route", "status"),
        lambda r: sorted(r.http.items()),
    ),
    Family(
        "flare_build_info",
        "gauge",
        "Always 1; the labels say what runs.",
        ("version", "model", "core"),
        lambda r: [((__version__, r.model.id, r.model.fingerprint), 1)],
    ),
)


def metrics(reading: Reading, *, query: str, accept: str) -> tuple[bytes, str]:
    """Returns the body and its content type. `query` is the raw query string; `accept` joins the Accept headers by commas.

    Raises RequestError for a `format` that is not known.
    """
    if choose_format(query, accept) == "json":
        return encode_json(json_object(reading)), JSON_TYPE
    return prometheus_text(reading), TEXT_TYPE


def choose_format(query: str, accept: str) -> Literal["json", "prometheus"]:
    """Returns the format: `format` in the query, else the one whose media type the header prefers, else text.

    Of a type's ranges the most specific counts; at equal quality the one whose range comes first.
    """
    asked = {value for name, value in parse_qsl(query, keep_blank_values=True) if name == "format"}
    if asked == {"json"}:
        return "json"
    if asked == {"prometheus"}:
        return "prometheus"
    if asked:
        seen = repr(shown(asked.pop())) if len(asked) == 1 else f"{len(asked)} values"
        raise RequestError(f"format: {seen}; ask for json or for prometheus", param="format")
    ranges = _media_ranges(accept)
    text, json = _preference(ranges, "text/plain"), _preference(ranges, "application/json")
    return "json" if json > text else "prometheus"


def _media_ranges(accept: str) -> list[tuple[str, float]]:
    """Media ranges and their qualities, in their order; a range whose quality is no number is left out."""
    ranges = []
    for item in accept.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = -1.0
        if name and 0.0 <= quality <= 1.0:
            ranges.append((name, quality))
    return ranges


def _preference(ranges: list[tuple[str, float]], media_type: str) -> tuple[float, int]:
    """Returns the quality of a type and, of its range, the place counted from the end: a greater pair is preferred."""
    for name in (media_type, media_type.partition("/")[0] + "/*", "*/*"):
        found = [(quality, -place) for place, (range_, quality) in enumerate(ranges) if range_ == name]
        if found:
            quality, place = max(found)
            return (quality, place) if quality else (0.0, -len(ranges))
    return 0.0, -len(ranges)


def prometheus_text(reading: Reading) -> bytes:
    """Returns the reading in the text exposition format 0.0.4."""
    lines: list[str] = []
    for metric in METRICS:
        lines += (f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}")
        lines.append(f"{metric.name} {metric.read(reading)}")
    for family in FAMILIES:
        lines += (f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}")
        for values, number in family.read(reading):
            labels = ",".join(
                f'{label}="{_escaped(value)}"' for label, value in zip(family.labels, values, strict=True)
            )
            lines.append(f"{family.name}{{{labels}}} {number}")
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def json_object(reading: Reading) -> dict[str, Any]:
    """Returns the metrics without labels, and the window of first responses."""
    values: dict[str, Any] = {metric.json_name: metric.read(reading) for metric in METRICS}
    return values | {"first_response": reading.first_response}


def status(reading: Reading, *, closing: bool) -> dict[str, Any]:
    """Returns what `GET /v1/flare/status` answers: counts and bounds, nothing of any request's content."""
    engine, load, model = reading.engine, reading.load, reading.model
    state = "stopping" if closing else "ok" if engine.healthy else "failed"  # in the order of Generator.check_ready
    return {
        "status": state,
        "version": __version__,
        "uptime_seconds": round(reading.uptime_seconds, 3),
        "model": {"id": model.id, "root": model.root, "core": model.fingerprint},
        "target": {"kind": model.target, "device": model.device},
        "engine": {name: getattr(engine, name) for name in ENGINE_FIELDS},
        "requests": {
            "submitted": reading.submitted,
            "completed": reading.completed,
            "cancelled": reading.cancelled,
            "failed": reading.failed,
        },
        "first_response": reading.first_response,
        "admission": {"used": load.admission_used, "capacity": load.admission_capacity},
        "bodies": {"used_bytes": load.body_bytes, "capacity_bytes": load.body_bytes_capacity},
        "connections": {"used": load.connections, "capacity": load.connections_capacity},
        "cpu_fallback": {
            "allowed": reading.fallbacks_allowed,
            "total": reading.fallbacks_total,
            "events": [{"cause": cause, "count": count} for cause, count in reading.fallbacks],
        },
    }
