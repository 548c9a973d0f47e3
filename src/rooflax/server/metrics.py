"""GET /metrics: the engine's and the server's numbers as Prometheus reads them.

Names are vLLM's where the meaning is equal, so that its dashboards and autoscalers work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from rooflax.server.service import Service

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISHED = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


class Exporter:
    """Collects what requests were, and states it beside the engine's own numbers."""

    def __init__(self, service: Service):
        self._service, self._registry = service, CollectorRegistry(auto_describe=False)
        self._registry.register(self)  # type: ignore[arg-type]
        self._http = Counter(
            "rooflax:http_requests",
            "Answers by route and status.",
            labelnames=("route", "status"),
            registry=self._registry,
        )

    def answered(self, route: str, status: int) -> None:
        """A request to a route has ended."""
        self._http.labels(route, str(status)).inc()

    async def answer(self, request: Request) -> Response:
        """GET /metrics: numbers as Prometheus reads them."""
        return Response(generate_latest(self._registry), headers={"content-type": TYPE})

    def collect(self) -> Iterator[Metric]:
        """Collects the service's metrics."""
        service = self._service
        uptime = time.monotonic() - service.started_s
        yield _gauge("rooflax:uptime_seconds", "Time since the start.", [((), uptime)], ())
        state = [((name,), float(service.state == name)) for name in _STATES]
        yield _gauge("rooflax:state", "1 for the present state.", state, ("state",))
        yield _counter(
            "rooflax:cancelled_requests",
            "Requests that ended early, by cause.",
            service.cancelled,
            "cause",
        )
        yield _counter(
            "rooflax:rejected_requests",
            "Requests turned away whatever they ask, by code.",
            service.rejected,
            "code",
        )
        failed = {"": service.failed_calls}
        yield _counter(
            "rooflax:tool_parse_failures", "Texts that began as a call and were none.", failed
        )
        if service.engine is not None and service.state != "loading":
            yield from self._engine(service.engine.metrics())

    def _engine(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        labels = {"model_name": self._service.names[0], "engine": "0"}
        used, total = stats["blocks_used"], stats["blocks_total"]
        usage = max((u / t for u, t in zip(used, total, strict=True) if t), default=0.0)
        for what, text, value in (
            ("num_requests_running", "Sequences that run.", stats["num_running"]),
            ("num_requests_waiting", "Sequences that wait.", stats["num_waiting"]),
            ("kv_cache_usage_perc", "Used KV blocks, 1 is all.", usage),
        ):
            yield _with(GaugeMetricFamily(f"vllm:{what}", text, labels=list(labels)), labels, value)
        if stats["decode_roofline"] is not None:
            text = "Decoding as a share of what the machine allows, of about fifty dispatches."
            family = GaugeMetricFamily("rooflax:decode_roofline_ratio", text, labels=list(labels))
            yield _with(family, labels, stats["decode_roofline"])
        blocks = GaugeMetricFamily(
            "rooflax:kv_blocks", "KV blocks by layer group.", labels=[*labels, "group", "state"]
        )
        for group, (u, t) in enumerate(zip(used, total, strict=True)):
            for state, value in (("used", u), ("free", t - u)):
                blocks.add_metric([*labels.values(), str(group), state], value)
        yield blocks
        for what, (key, text) in _ENGINE_COUNTERS.items():
            family = CounterMetricFamily(what, text, labels=list(labels))
            yield _with(family, labels, stats[key])
        success = CounterMetricFamily(
            "vllm:request_success", "Ended requests.", labels=[*labels, "finished_reason"]
        )
        for reason, label in _FINISHED.items():
            success.add_metric([*labels.values(), label], stats["num_finished"].get(reason, 0))
        yield success
        for what, (key, text) in _ENGINE_HISTOGRAMS.items():
            yield _histogram(what, text, stats[key], labels)
        yield _waiting_for_capacity(stats["num_waiting"], labels)
        yield self._cache_config(stats, labels)
        if loras := stats.get("loras"):
            yield _loras(loras)

    def _cache_config(self, stats: Mapping[str, Any], labels: Mapping[str, str]) -> Metric:
        assert self._service.engine is not None
        config = {
            "block_size": str(stats["block_size"]),
            "num_gpu_blocks": str(sum(stats["blocks_total"])),
            "enable_prefix_caching": str(self._service.engine.llm.plan.prefix_caching),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up.", labels=[*labels, *config]
        )
        return _with(family, {**labels, **config}, 1)


_STATES = ("loading", "ready", "draining", "failed")
_ENGINE_COUNTERS = {
    "vllm:prompt_tokens": ("num_prompt_tokens", "Prompt tokens, cached ones included."),
    "vllm:prompt_tokens_cached": ("num_cached_tokens", "Prompt tokens from the prefix cache."),
    "vllm:generation_tokens": ("num_generated_tokens", "Tokens that were generated."),
    "vllm:num_preemptions": ("num_preemptions", "Sequences that made room and began again."),
    "vllm:prefix_cache_queries": ("num_prompt_tokens", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("num_cached_tokens", "Tokens found in the prefix cache."),
    "rooflax:steps": ("num_steps", "Steps of the engine."),
    "rooflax:draft_tokens": ("num_draft_tokens", "Tokens that were drafted."),
    "rooflax:accepted_tokens": ("num_accepted_tokens", "Drafts that the model accepted."),
    "rooflax:compilations_after_warmup": ("num_compilations", "Programs compiled while serving."),
    "rooflax:program_tokens": ("num_program_tokens", "Tokens that programs were run for."),
    "rooflax:padding_tokens": ("num_padding_tokens", "Of them, those that fill up a shape."),
    "rooflax:decode_seconds": ("decode_seconds", "Time in steps that only decode."),
    "rooflax:ideal_decode_seconds": ("ideal_decode_seconds", "The least the machine allows them."),
}
_ENGINE_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("ttft_s", "From a request to its first token."),
    "vllm:inter_token_latency_seconds": ("itl_s", "Between two tokens of a sequence."),
    "vllm:e2e_request_latency_seconds": ("e2e_s", "From a request to its end."),
    "vllm:request_queue_time_seconds": ("queue_s", "From a request to its first step."),
    "vllm:request_prefill_time_seconds": ("prefill_s", "From its first step to its first token."),
    "vllm:request_decode_time_seconds": ("decode_s", "From its first token to its last."),
    "vllm:request_inference_time_seconds": ("inference_s", "From its first step to its last."),
    "vllm:request_time_per_output_token_seconds": ("tpot_s", "Mean time of later tokens."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Tokens of a request's prompt."),
    "vllm:request_generation_tokens": ("output_tokens", "Tokens generated for a request."),
    "vllm:request_params_max_tokens": ("max_tokens", "The most tokens that a request allows."),
    "vllm:request_params_n": ("samples", "Answers that a request asks for."),
    "vllm:iteration_tokens_total": ("step_tokens", "Tokens of a step."),
    "rooflax:step_seconds": ("step_s", "Time of a step."),
}


def _waiting_for_capacity(num_waiting: int, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Waiting requests.", labels=[*labels, "reason"]
    )
    return _with(family, {**labels, "reason": "capacity"}, num_waiting)


def _loras(adapters: Mapping[str, Any]) -> Metric:
    """Adapters in use, by which routers choose a server; the newest value counts."""
    labels = {
        "max_lora": str(adapters["slots"]),
        "running_lora_adapters": ",".join(adapters["running"]),
        "waiting_lora_adapters": ",".join(adapters["waiting"]),
    }
    family = GaugeMetricFamily(
        "vllm:lora_requests_info", "Adapters in use, and when.", labels=list(labels)
    )
    return _with(family, labels, time.time())


def _with(family: Any, labels: Mapping[str, str], value: float) -> Metric:
    family.add_metric(list(labels.values()), value)
    return family


def _gauge(
    name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    for key, value in values:
        family.add_metric(list(key), value)
    return family


def _counter(name: str, text: str, values: Mapping[str, int], label: str | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family


def _histogram(name: str, text: str, stats: Mapping[str, Any], labels: Mapping[str, str]) -> Metric:
    buckets, count = [], 0
    for bound, number in zip([*stats["bounds"], "+Inf"], stats["counts"], strict=True):
        count += number
        buckets.append((str(bound), count))
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, stats["total"])
    return family
