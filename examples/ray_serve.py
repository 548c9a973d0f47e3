"""Deploys rooflax's own server on Ray Serve: OpenAI's API over replicas.

    pip install 'ray[serve]==2.60.0' 'rooflax[serve]' mmh3
    serve run examples.ray_serve:app model=Qwen/Qwen3-0.6B

Keys come from ROOFLAX_API_KEY in the environment of the replicas. A client that sends x-session-id
stays with one replica, whose prefix cache has its conversation. A replica answers /metrics for
itself alone; Ray's own metrics count the requests of all.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

SLOTS, WAITING, DRAIN_S = 16, 64, 30.0
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.deployment(
    max_ongoing_requests=SLOTS + WAITING,  # beyond that the router waits, the server says 429
    max_queued_requests=64,  # per proxy; beyond that it answers 503
    health_check_period_s=5,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=1,
    graceful_shutdown_timeout_s=DRAIN_S + 10,
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": SLOTS},
    ray_actor_options={"num_cpus": 1},
)
@serve.ingress()
class Server:
    """One model, as `rooflax serve` has it."""

    def __init__(self, model: str, settings: dict[str, Any]):
        from rooflax import AsyncLLM
        from rooflax.server.service import Service
        from rooflax.server.settings import Settings

        keys = tuple(filter(None, os.environ.get("ROOFLAX_API_KEY", "").split(",")))
        limits = Settings(api_keys=keys, max_waiting=WAITING, drain_s=DRAIN_S)
        self.service = Service(limits)
        engine = AsyncLLM(model, max_waiting=WAITING, **{"max_num_seqs": SLOTS, **settings})
        self.service.is_loaded(engine)

    def __serve_build_asgi_app__(self) -> Any:
        from rooflax.server.app import make_app

        return make_app(self.service)

    def check_health(self) -> None:
        """Ray replaces a replica whose engine died or makes no steps."""
        if self.service.state == "failed":
            raise RuntimeError(self.service.failure or "the engine makes no steps")

    async def __del__(self) -> None:
        """After the open requests, or when their time is over."""
        if self.service.engine is not None:
            await self.service.engine.shutdown(drain=False)


def app(args: dict[str, Any]) -> serve.Application:
    """The application of `serve run`: model=NAME, and settings of AsyncLLM as JSON, such as 8."""
    import json

    settings = {name: json.loads(value) for name, value in args.items() if name != "model"}
    return Server.bind(args.get("model", "rooflax-chat-5m"), settings)
