"""The routes of Tinker's API, as far as one model on one machine has them.

Source: tinker 0.38.0, the client (routes, bodies and answers).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rooflax.completion import Completion
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.loading.tokenizer import LONG_TEXT
from rooflax.rl.run_store import SAMPLER, WEIGHTS
from rooflax.rl.runs import AdamSettings, LoraShape
from rooflax.rl.trainer import check_sample
from rooflax.server import small
from rooflax.server.answers import ClientLeft, Json
from rooflax.server.app import Guard, answered, get_route, read_body, said
from rooflax.server.errors import ApiError, as_api_error
from rooflax.server.json_body import read_json
from rooflax.server.metrics import Exporter
from rooflax.server.training import wire
from rooflax.server.training.service import TrainingService
from rooflax.server.training.work import Result, Task

PREFIX = "/api/v1"
WAIT_S = 20.0
"""Seconds that a request for a result waits for it."""
MOST_SAMPLES, MOST_RANK = 1024, 512
EXPERTS = "The model has experts, which get no adapters here; attention, dense MLPs and head do."
LARGEST_SEED = 2**32 - 1


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON body; a key that is not here is rejected by its name."""

    type: str | None = None


class ClientConfig(Body):
    sdk_version: str = ""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    session_id: str


class LoraBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None


class OfModel(Body):
    model_id: str


class OptimStep(Body):
    model_id: str
    adam_params: dict[str, float] | None = None
    optimizer_params: dict[str, Any] | None = None
    seq_id: int | None = None


class SaveWeights(Body):
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Body):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    tokens: list[int] = []


class Prompt(Body):
    chunks: list[Chunk]


class Sampling(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Body):
    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: str
    num_samples: int = 1
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class Retrieve(Body):
    request_id: str
    allow_metadata_only: bool = False


Endpoint = Callable[[TrainingService, Any], Awaitable[Response] | Response]


def client_config(service: TrainingService, body: ClientConfig) -> Response:
    """Switches of the client: requests in order, without compression, of a size that is read."""
    most = service.settings.max_body_bytes
    return Json(
        {
            "parallel_fwdbwd_chunks": False,
            "fwdbwd_max_chunk_bytes_count": most * 3 // 4,
            "fwdbwd_dispatch_bytes_semaphore_size": 8 * most,
        }
    )


def dynamic_config(service: TrainingService, body: ClientConfig) -> Response:
    return Json({"refresh_interval_sec": 3600})


def create_session(service: TrainingService, body: CreateSession) -> Response:
    session_id = secrets.token_hex(8)
    service.trainer.begin(session_id)
    told = EXPERTS if service.trainer.has_experts else None
    return Json({"type": "create_session", "session_id": session_id, "info_message": told})


def heartbeat(service: TrainingService, body: OfSession) -> Response:
    try:
        service.trainer.session(body.session_id)
    except RequestError as error:  # by 410 the client's heart stops
        raise ApiError(str(error), status=410, code="session_unknown") from None
    return Json({"type": "session_heartbeat"})


def create_model(service: TrainingService, body: CreateModel) -> Response:
    service.check_base(body.base_model)
    _check_optimizer(body.optimizer_config)
    if body.lora_config is None:
        raise ApiError("lora_config is missing; this server trains LoRA adapters.")
    given = body.lora_config
    if not 0 < given.rank <= MOST_RANK:
        raise ApiError(
            f"rank is {given.rank}; it must be from 1 to {MOST_RANK}.", param="lora_config"
        )
    seed = secrets.randbits(32) if given.seed is None else _seed(given.seed)
    shape = LoraShape(
        rank=given.rank,
        seed=seed,
        train_mlp=given.train_mlp,
        train_attn=given.train_attn,
        train_unembed=given.train_unembed,
    )
    model_id = _new_model_id(body.session_id, body.model_seq_id)
    trainer = service.trainer
    trainer.session(body.session_id)

    def create() -> Result:
        trainer.create(model_id, shape)
        return {"type": "create_model", "model_id": model_id}

    return _promised(service, create, model_id=model_id, seq_id=0)


def get_info(service: TrainingService, body: OfModel) -> Response:
    run = service.trainer.run(body.model_id)
    info = service.trainer.llm.info
    name = service.names[0]
    data = {"arch": info.family, "model_name": name, "tokenizer_id": service.tokenizer_id}
    return Json(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": body.model_id,
            "model_name": name,
            "is_lora": True,
            "lora_rank": run.shape.rank,
        }
    )


def forward_backward(service: TrainingService, body: wire.ForwardRequest) -> Response:
    trainer = service.trainer
    trainer.run(body.model_id)

    def forward() -> Result:
        outcome = trainer.forward(
            body.model_id,
            body.loss_fn,
            body.data,
            body.settings,
            backward=not body.forward_only,
        )
        return wire.write_outcome(outcome)

    return _promised(
        service,
        forward,
        model_id=body.model_id,
        seq_id=body.seq_id or None,
        num_bytes=body.num_bytes,
    )


def optim_step(service: TrainingService, body: OptimStep) -> Response:
    if body.optimizer_params is not None:
        raise ApiError("optimizer_params is given; this server has AdamW, by adam_params.")
    unknown = (body.adam_params or {}).keys() - vars(AdamSettings()).keys()
    if unknown:
        raise ApiError(f"adam_params has {min(unknown)[:80]!r}, which AdamW does not know.")
    settings = AdamSettings(**(body.adam_params or {}))
    trainer = service.trainer
    trainer.run(body.model_id)
    return _promised(
        service,
        lambda: {"metrics": trainer.step(body.model_id, settings)},
        model_id=body.model_id,
        seq_id=body.seq_id,
    )


def save_weights(service: TrainingService, body: SaveWeights) -> Response:
    name = _name(body.path)
    trainer = service.trainer
    trainer.run(body.model_id)

    def save() -> Result:
        path = trainer.save(body.model_id, WEIGHTS, name, overwrites=body.overwrite)
        return {"type": "save_weights", "path": path}

    return _promised(service, save, model_id=body.model_id, seq_id=body.seq_id)


def save_for_sampler(service: TrainingService, body: SaveForSampler) -> Response:
    if body.kind != "snapshot":
        raise ApiError(f"kind is {body.kind[:80]!r}; this server has snapshot.", param="kind")
    trainer, model_id = service.trainer, body.model_id
    trainer.run(model_id)
    answer = {"type": "save_weights_for_sampler"}
    if body.path is not None:
        name = _name(body.path)

        def save() -> Result:
            return answer | {"path": trainer.save(model_id, SAMPLER, name)}

        return _promised(service, save, model_id=model_id, seq_id=body.seq_id)
    if body.sampling_session_seq_id is None:
        raise ApiError("Give path, or sampling_session_seq_id.", param="path")
    session_id = model_id.partition(":")[0]
    sampler_id = f"{session_id}:sample:{body.sampling_session_seq_id}"

    def publish() -> Result:
        trainer.publish(model_id, sampler_id)
        return answer | {"sampling_session_id": sampler_id}

    return _promised(service, publish, model_id=model_id, seq_id=body.seq_id)


def load_weights(service: TrainingService, body: LoadWeights) -> Response:
    _check_optimizer(body.optimizer_config)
    if body.base_model is not None:
        service.check_base(body.base_model)
    model_id = body.model_id
    if model_id is None:
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError("Give model_id, or session_id and model_seq_id.", param="model_id")
        service.trainer.session(body.session_id)
        model_id = _new_model_id(body.session_id, body.model_seq_id)
    else:
        service.trainer.run(model_id)
    trainer = service.trainer

    def load() -> Result:
        trainer.load(model_id, body.path, has_optimizer=body.optimizer)
        return {"type": "load_weights", "path": body.path, "model_id": model_id}

    seq_id = 0 if body.model_id is None else body.seq_id
    return _promised(service, load, model_id=model_id, seq_id=seq_id)


async def create_sampler(service: TrainingService, body: CreateSampler) -> Response:
    if body.base_model is not None:
        service.check_base(body.base_model)
    trainer = service.trainer
    trainer.session(body.session_id)
    sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    if body.model_path is None:
        trainer.open_sampler(sampler_id, None)
    else:  # beside what the worker does, for which a client would not wait
        await service.in_thread(trainer.open_sampler, sampler_id, body.model_path)
    return Json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


def sample(service: TrainingService, body: Sample) -> Response:
    for name in (
        "topk_prompt_logprobs",
        "topk_sample_logprobs",
        "target_prompt_logprobs",
        "prompt_alt_tokens_k",
        "record_stability_info",
        "base_model",
        "model_path",
    ):
        if getattr(body, name):
            raise ApiError(f"{name} is given, which this server does not have.", param=name)
    if not 0 < body.num_samples <= MOST_SAMPLES:
        raise ApiError(
            f"num_samples is {body.num_samples}; it must be from 1 to {MOST_SAMPLES}.",
            param="num_samples",
        )
    if any(chunk.type not in (None, "encoded_text") for chunk in body.prompt.chunks):
        raise ApiError("prompt holds an image or sound; the model reads text.", param="prompt")
    model = service.trainer.sampler(body.sampling_session_id)
    ids = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    params = _params(body)
    check_sample(service.trainer.llm, ids, params)
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 0 < last < len(ids)):
        raise ApiError(
            "prompt_logprobs_last_n needs prompt_logprobs, and is from 1 to the prompt's tokens "
            "less one.",
            param="prompt_logprobs_last_n",
        )
    make = partial(_sampled, keeps=len(ids) - 1 if last is None else last)
    key = None if body.seq_id is None else ("sample", body.sampling_session_id, body.seq_id)
    request_id = service.work.submit(Task(sample=(model, ids, params, make), key=key))
    names = [f"{request_id}:{number}" for number in range(body.num_samples)]
    return Json({"request_id": request_id, "sample_sequence_ids": names})


def _params(body: Sample) -> SamplingParams:
    given, stop = body.sampling_params, body.sampling_params.stop
    texts = [stop] if isinstance(stop, str) else [s for s in stop or () if isinstance(s, str)]
    ids = [] if isinstance(stop, str) else [s for s in stop or () if isinstance(s, int)]
    fields: dict[str, Any] = {
        "max_tokens": given.max_tokens,
        "seed": secrets.randbits(32) if given.seed is None else _seed(given.seed),
        "temperature": given.temperature,
        "top_k": max(given.top_k, 0),
        "top_p": given.top_p,
        "stop": tuple(texts),
        "stop_token_ids": tuple(ids),
        "ignore_eos": stop == [],
        "n": body.num_samples,
        "logprobs": 0,
        "prompt_logprobs": 0 if body.prompt_logprobs else None,
    }
    stated = {name: value for name, value in fields.items() if value is not None}
    return SamplingParams(**stated).with_defaults({})


def _sampled(completions: Sequence[Completion], *, keeps: int) -> bytes:
    """The result of a request for samples.

    Args:
        keeps: so many of the prompt's last tokens have a log-probability.
    """
    failed = next((one.error for one in completions if one.error is not None), None)
    if failed is not None:
        raise RequestError(failed)
    samples = [
        wire.Sampled(
            one.tokens, [each.logprob for each in one.logprobs or ()], one.finish_reason == "stop"
        )
        for one in completions
    ]
    first, prompt = completions[0], None
    if first.prompt_logprobs is not None:
        prompt = np.full(len(first.prompt_tokens), np.nan)
        prompt[1:] = [each.logprob for each in first.prompt_logprobs]
        prompt[: len(prompt) - keeps] = np.nan
    return wire.write_samples(samples, prompt, first.num_cached_tokens)


async def retrieve(service: TrainingService, body: Retrieve) -> Response:
    try:
        result = await service.work.result(body.request_id, WAIT_S)
    except ApiError as error:
        if error.code == "request_unknown":
            raise
        return _failed(error)
    except Exception as error:
        return _failed(as_api_error(error))
    if result is None:
        again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return Json(again, status_code=408)
    if isinstance(result, bytes):
        return Response(result, media_type=wire.CONTENT_TYPE)
    return Json(result)


def _failed(error: ApiError) -> Response:
    category = "user" if error.status < 500 else "server"
    return Json({"error": str(error), "category": category})


def telemetry(service: TrainingService, body: Any) -> Response:
    """Takes what the client reports of itself, of which nothing is kept."""
    return Json({"status": "accepted"})


POSTS: Mapping[str, tuple[Endpoint, type | None]] = {
    "client/config": (client_config, ClientConfig),
    "client/dynamic_config": (dynamic_config, ClientConfig),
    "create_session": (create_session, CreateSession),
    "session_heartbeat": (heartbeat, OfSession),
    "telemetry": (telemetry, None),
    "create_model": (create_model, CreateModel),
    "get_info": (get_info, OfModel),
    "forward_backward": (forward_backward, wire.ForwardRequest),
    "optim_step": (optim_step, OptimStep),
    "save_weights": (save_weights, SaveWeights),
    "save_weights_for_sampler": (save_for_sampler, SaveForSampler),
    "load_weights": (load_weights, LoadWeights),
    "create_sampling_session": (create_sampler, CreateSampler),
    "asample": (sample, Sample),
    "retrieve_future": (retrieve, Retrieve),
}
"""Endpoints by their paths, with what their bodies are; None is not looked at."""


def make_training_app(service: TrainingService) -> ASGIApp:
    """The application of one service."""
    routes = [
        Route(f"{PREFIX}/{path}", _post(service, *post), methods=["POST"])
        for path, post in POSTS.items()
    ]
    routes += [
        Route(f"{PREFIX}/healthz", get_route(service, _healthz), methods=["GET"]),
        Route(
            f"{PREFIX}/get_server_capabilities", get_route(service, _capabilities), methods=["GET"]
        ),
        Route(f"{PREFIX}/samplers/{{name:path}}", get_route(service, _sampler), methods=["GET"]),
        Route(f"{PREFIX}/sessions/{{name}}/finish", get_route(service, _finish), methods=["POST"]),
        Route("/health", get_route(service, small.health), methods=["GET"]),
        Route("/ready", get_route(service, small.ready), methods=["GET"]),
        Route("/version", get_route(service, small.version), methods=["GET"]),
    ]
    inner = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _no_route, Exception: answered, ApiError: answered},
    )
    inner.router.redirect_slashes = False
    return Guard(inner, service, Exporter(service))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    return said(
        request,
        ApiError(
            f"{request.method} {path!r} is not of the part of Tinker's API that this server has.",
            status=error.status_code,
            code="route_not_found",
        ),
    )


def _post(
    service: TrainingService, endpoint: Endpoint, kind: type | None
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            if kind not in (Retrieve, OfSession):  # what is done can be had while it drains
                service.ready()
            body: Any = None
            if kind is wire.ForwardRequest:
                data = await read_body(request, service, wire.CONTENT_TYPE)
                body = await service.in_thread(wire.read_forward, data)
            else:
                data = await read_body(request, service)
                is_long = len(data) > LONG_TEXT
                read = await service.in_thread(read_json, data) if is_long else read_json(data)
                body = read if kind is None else _converted(read, kind)
            result = endpoint(service, body)
            return result if isinstance(result, Response) else await result
        except ClientLeft:
            raise
        except Exception as error:
            return said(request, error)

    return answer


def _converted(value: Any, kind: type) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"The body is not what this route takes: {error}.") from None


async def _healthz(service: TrainingService, request: Request) -> Response:
    service.ready()
    return Json({"status": "ok"})


async def _capabilities(service: TrainingService, request: Request) -> Response:
    llm = service.ready().llm
    models = [
        {
            "model_name": name,
            "max_context_length": llm.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        for name in service.names
    ]
    return Json({"supported_models": models})


async def _sampler(service: TrainingService, request: Request) -> Response:
    name = request.path_params["name"]
    service.trainer.sampler(name)
    return Json({"sampler_id": name, "base_model": service.names[0]})


async def _finish(service: TrainingService, request: Request) -> Response:
    service.trainer.end(request.path_params["name"])
    return Json({})


def _promised(
    service: TrainingService,
    do: Callable[[], Result],
    *,
    model_id: str,
    seq_id: int | None = None,
    num_bytes: int = 0,
) -> Response:
    """The answer to a request whose result is asked for later.

    Args:
        seq_id: the request's number among those of its run; one that is sent again has the same.
        num_bytes: of its data.
    """
    key = None if seq_id is None else ("run", model_id, seq_id)
    request_id = service.work.submit(Task(do, key=key, num_bytes=num_bytes))
    return Json({"request_id": request_id, "model_id": model_id})


def _new_model_id(session_id: str, number: int) -> str:
    if number < 0:
        raise ApiError(f"model_seq_id is {number}; it must be 0 or more.", param="model_seq_id")
    return f"{session_id}:train:{number}"


def _name(path: str | None) -> str:
    if not path:
        raise ApiError("path is missing; give the name to save under.", param="path")
    return path


def _seed(seed: int) -> int:
    if not 0 <= seed <= LARGEST_SEED:
        raise ApiError(f"seed is {seed}; it must be from 0 to {LARGEST_SEED}.", param="seed")
    return seed


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise ApiError(f"optimizer_config is {kind!r:.80}; this server has adamw.")
