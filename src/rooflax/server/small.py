"""The routes that generate nothing: models, tokens, templates, health, what the server is."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rooflax import __version__
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.fields.sampling import OF_CHECKPOINT, SAMPLING
from rooflax.server.answers import Json
from rooflax.server.call_formats import HARMONY
from rooflax.server.errors import ApiError
from rooflax.server.fields import FieldTable
from rooflax.server.rendering import efforts, render
from rooflax.server.service import RETRY_LOADING_S, Service
from rooflax.server.tables import (
    CHAT,
    DETOKENIZE,
    LOAD_LORA,
    TEMPLATE,
    TOKENIZE,
    UNLOAD_LORA,
)

_FIELDS = CHAT.schema()["properties"]
SETTINGS = {name: _FIELDS[name] for name, one in SAMPLING.items() if one.on_page}
"""Numbers that a page lets people set, as /openapi.json describes them."""


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models."""
    data = [_card(service, name) for name in service.names]
    return Json({"object": "list", "data": data})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/{name}."""
    return Json(_card(service, service.resolve(request.path_params["name"])))


def _card(service: Service, name: str) -> dict[str, Any]:
    llm = service.ready().llm
    config = llm.info.config
    meta = {
        "n_vocab": config.vocab_size, "n_ctx": llm.max_model_len, "format": llm.format,
        "dtype": llm.plan.storage.dtype, "architecture": llm.info.family,
        "n_params": llm.model.num_parameters, "size": llm.plan.memory.weights,
    }  # fmt: skip
    folder = service.ready().loras.get(name)
    root, parent = (name, None) if folder is None else (str(folder), service.names[0])
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "rooflax",
        "root": root, "parent": parent, "max_model_len": llm.max_model_len, "meta": meta,
    }  # fmt: skip


def _ignored(service: Service) -> list[str] | None:
    return [] if service.settings.reports_unknown_fields else None


def _parsed(service: Service, table: FieldTable, body: Any) -> dict[str, Any]:
    fields = table.parse(body, ignored=_ignored(service))
    service.resolve(fields.get("model"))
    return fields


async def tokenize(service: Service, request: Request, body: Any) -> Response:
    """POST /tokenize: of a text or of a conversation."""
    fields, llm = _parsed(service, TOKENIZE, body), service.ready().llm
    sources = [name for name in ("prompt", "content", "messages") if name in fields]
    if len(sources) != 1:
        raise ApiError("Give one of prompt, content and messages.", param="prompt")
    if sources == ["messages"]:
        ids = (await render(service, fields)).ids
    else:
        special = fields.get("add_special_tokens", True)
        ids = await service.encode(fields[sources[0]], add_special_tokens=special)
    texts = None
    if fields.get("return_token_strs"):
        texts = [service.spelling.text(token) for token in ids]
    return Json(
        {
            "tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len,
            "token_strs": texts,
        }
    )  # fmt: skip


async def detokenize(service: Service, request: Request, body: Any) -> Response:
    """POST /detokenize."""
    fields = _parsed(service, DETOKENIZE, body)
    tokenizer = service.ready().llm.tokenizer
    ids = fields["tokens"]
    wrong = next((token for token in ids if token >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise ApiError(
            f"tokens holds {wrong}; this model knows 0 to {tokenizer.vocab_size - 1}.",
            param="tokens",
        )
    text = await service.in_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return Json({"prompt": text, "content": text})


async def apply_template(service: Service, request: Request, body: Any) -> Response:
    """POST /apply-template: the prompt that a conversation becomes."""
    fields = _parsed(service, TEMPLATE, body)
    prompt = await render(service, fields)
    decode = service.ready().llm.tokenizer.decode
    return Json({"prompt": await service.in_thread(decode, prompt.ids, skip_special_tokens=False)})


async def load_lora(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/load_lora_adapter, as vLLM's: one more adapter, from an allowed folder."""
    root = _lora_root(service)
    fields = LOAD_LORA.parse(body, ignored=_ignored(service))
    name, path = fields["lora_name"], fields["lora_path"]
    if name in service.base_names:
        raise ApiError(f"lora_name is {name[:80]!r}, the model's own.", param="lora_name")
    folder, is_inside = root, False
    with suppress(OSError, ValueError, RuntimeError):  # no file's name, or a loop of links
        folder = (root / path).resolve()
        is_there = folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file())
        files = [folder, *(folder.iterdir() if folder.is_dir() else ())]
        is_inside = is_there and all(file.resolve().is_relative_to(root) for file in files)
    if not is_inside:
        raise ApiError(
            "lora_path is no folder inside --allow-lora-loading, and no .gguf file there; a "
            "relative path begins in that folder, not where the server was started.",
            param="lora_path",
        )
    try:
        await service.ready().load_lora(name, folder)
    except (RequestError, CheckpointError, UnsupportedModelError) as error:
        param = error.param if isinstance(error, RequestError) else "lora_path"
        if param == "max_loras":
            raise ApiError(str(error), status=409, code="no_free_slot") from None
        said = str(error).replace(f"{root}{os.sep}", "").replace(str(root), "lora_path")
        raise ApiError(said, param=param) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/unload_lora_adapter: no new requests; answers once the open ones have ended."""
    _lora_root(service)
    name = UNLOAD_LORA.parse(body, ignored=_ignored(service))["lora_name"]
    if name not in service.ready().loras:
        message = f"There is no adapter {name[:80]!r}."
        raise ApiError(message, status=404, code="model_not_found", param="lora_name")
    await service.ready().unload_lora(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _lora_root(service: Service) -> Path:
    """The folder with the adapters that requests may load.

    Raises:
        ApiError: there is none.
    """
    if service.settings.lora_root is None:
        message = "This server loads no adapters; start it with --allow-lora-loading DIR."
        raise ApiError(message, status=404, code="route_not_found")
    return Path(service.settings.lora_root).resolve()


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 where the engine works; while loading, what it does just now."""
    state = service.state
    if state in ("ready", "draining"):
        return Json({"status": "ok", "state": state})
    if state == "loading":
        document = {"status": "loading", "progress": service.progress}
        return Json(document, status_code=503, headers={"Retry-After": str(RETRY_LOADING_S)})
    reason = "the engine has stopped" if service.failure else "the engine makes no steps"
    return Json({"status": "failed", "reason": reason}, status_code=503)


async def ready(service: Service, request: Request) -> Response:
    """GET /ready: 200 where requests are taken."""
    state = service.state
    return Json({"status": state}, status_code=200 if state == "ready" else 503)


async def version(service: Service, request: Request) -> Response:
    """GET /version."""
    build = await service.in_thread(_build)
    return Json({"version": __version__, "build": build, "jax": metadata.version("jax")})


@cache
def _build() -> str:
    """Tells copies of one version apart: a digest of the package's Python code."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


async def tokenizer_info(service: Service, request: Request) -> Response:
    """GET /tokenizer_info: for evaluations that render chats themselves; by --tokenizer-info."""
    if not service.settings.tells_tokenizer:
        raise ApiError(
            "The server was started without --tokenizer-info.", status=404, code="route_not_found"
        )
    tokenizer = service.ready().llm.tokenizer
    named = tokenizer.special_tokens
    return Json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named.get("bos_token"),
            "eos_token": named.get("eos_token"),
            "pad_token": named.get("pad_token"),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.ready().llm.max_model_len,
            "chat_template": tokenizer.chat_template,
        }
    )


async def props(service: Service, request: Request) -> Response:
    """GET /props: settings for a chat page; `decode_roofline` is as in /metrics, or null."""
    llm = service.ready().llm
    template = llm.tokenizer.chat_template
    format = service.format
    reasons = format.name == HARMONY or (
        format.reasoning is not None and format.reasoning.open.strip() in (template or "")
    )
    defaults = SamplingParams().with_defaults(llm.processor.default_values())
    settings = {name: getattr(defaults, name) for name in OF_CHECKPOINT}
    return Json(
        {
            "default_generation_settings": settings,
            "chat_settings": llm.processor.chat_values(),
            "settings": SETTINGS,
            "total_slots": service.slots,
            "model_alias": service.names[0],
            "n_ctx": llm.max_model_len,
            "decode_roofline": service.ready().metrics()["decode_roofline"],
            "chat_template_caps": {
                "chat": template is not None,
                "tools": template is not None,
                "reasoning": reasons,
                "efforts": efforts(service),
            },
            "modalities": {"vision": False, "audio": False},
            "build_info": f"rooflax {__version__}",
        }
    )
