"""POST /v1/embeddings, /v1/rerank and /v2/rerank: vectors and scores of texts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from rooflax.server.call import ApiCall
from rooflax.server.errors import ApiError
from rooflax.server.service import Service
from rooflax.server.tables import EMBEDDINGS, MAX_TEXTS, RERANK

if TYPE_CHECKING:
    from rooflax.embedding import Embedder

Encode = Callable[["Embedder"], list[list[int]]]


async def embeddings(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/embeddings: vectors of texts."""
    _check(service, scores=False)
    call = ApiCall.of(service, request, EMBEDDINGS, body, "embd")
    texts, dimensions = _texts(call.fields["input"]), call.fields.get("dimensions")
    embedder = service.ready().llm.embedder
    embedder.check_dimensions(dimensions)
    is_packed = call.fields.get("encoding_format") == "base64"
    options = call.fields.get("prompt_name"), None, call.fields.get("truncate_prompt_tokens")
    embedder.longest(options[2])

    async def answer() -> dict[str, Any]:
        done = await _pooled(call, lambda e: [e.text_ids(t, *options) for t in texts], len(texts))
        vectors = embedder.vectors(done, dimensions, None)
        encoded = [_packed(vector) if is_packed else vector.tolist() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(encoded)]
        return {"object": "list", "data": data, "model": call.model, "usage": _usage(call)}

    return await call.whole(answer())


async def rerank(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/rerank and /v2/rerank: scores of documents, with the bodies of Cohere and Jina."""
    _check(service, scores=True)
    call = ApiCall.of(service, request, RERANK, body, "rerank")
    fields, embedder = call.fields, service.ready().llm.embedder
    documents = [
        text if isinstance(text, str) else text.get("text") for text in fields["documents"]
    ]
    if not 1 <= len(documents) <= MAX_TEXTS:
        message = f"There are {len(documents)} documents; 1 to {MAX_TEXTS} are taken."
        raise ApiError(message, param="documents")
    query = fields["query"]
    options = fields.get("instruction"), fields.get("truncate_prompt_tokens")
    embedder.longest(options[1])
    most = fields.get("max_tokens_per_doc")

    def encoded(embedder: Embedder) -> list[list[int]]:
        texts = documents
        if most is not None and all(isinstance(text, str) for text in documents):
            texts = [embedder.beginning(text, most) for text in documents]
        return [embedder.pair_ids(query, text, *options) for text in texts]

    async def answer() -> dict[str, Any]:
        scores = embedder.scores(await _pooled(call, encoded, len(documents)))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [{"index": i, "relevance_score": scores[i]} for i in order[: fields.get("top_n")]]
        if fields.get("return_documents"):
            results = [r | {"document": {"text": documents[r["index"]]}} for r in results]
        return {"id": call.id, "model": call.model, "results": results, "usage": _usage(call)}

    return await call.whole(answer())


def _check(service: Service, *, scores: bool) -> None:
    """
    Raises:
        ApiError: 501, the model does not do that.
    """
    pooling = service.ready().llm.info.pooling
    if pooling is None or pooling.scores != scores:
        what = "score documents" if scores else "embed texts"
        raise ApiError(f"This server's model does not {what}.", status=501, code="not_implemented")


def _texts(listed: str | list[Any]) -> list[str | list[int]]:
    """
    Raises:
        ApiError: they are too many, or of different kinds.
    """
    if isinstance(listed, str) or (listed and all(isinstance(item, int) for item in listed)):
        return [listed]
    if any(isinstance(item, int) for item in listed):
        raise ApiError("input mixes token ids with other texts.", param="input")
    if not 1 <= len(listed) <= MAX_TEXTS:
        raise ApiError(f"There are {len(listed)} texts; 1 to {MAX_TEXTS} are taken.", param="input")
    return listed


async def _pooled(call: ApiCall, encode: Encode, count: int) -> Any:
    """The texts' sequences, each with its vector."""
    service, engine = call.service, call.service.ready()
    with service.reserved(min(count, service.slots), call.owner):
        ids = await service.in_thread(encode, engine.llm.embedder)
        call.usage.prompt_tokens = sum(map(len, ids))
        with service.prompt_tokens(call.usage.prompt_tokens, call.owner):
            done = await engine.pool(ids, cache_salt=call.cache_salt)
    if any(sequence.finish_reason == "abort" for sequence in done):
        raise ApiError("The server stopped before the answer ended.", status=503, code="draining")
    return done


def _usage(call: ApiCall) -> dict[str, int]:
    tokens = call.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _packed(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
