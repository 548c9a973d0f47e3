"""Bytes that each device of a mesh would hold: the documents' 42 and 21 GB, counted and divided."""

from __future__ import annotations

from benchmarks.founding import text
from rooflax.loading.model_info import model_info
from rooflax.models.memory import estimate
from rooflax.nn.shards import Shards, parse_mesh
from rooflax.nn.storage import Storage

TOKENS = 8192
GPT_OSS, LLAMA = "preset:gpt-oss-20b", "preset:llama-3.1-70b"
MXFP4 = "MXFP4 experts, the rest bfloat16"
MESHES = {
    (GPT_OSS, "bfloat16"): ("tensor=8", "expert=8", "tensor=2,expert=4"),
    (GPT_OSS, "fp8"): ("tensor=8", "expert=8", "tensor=2,expert=4"),
    (GPT_OSS, MXFP4): ("expert=8", "tensor=2,expert=4", "stage=4"),
    (LLAMA, "bfloat16"): ("tensor=8", "tensor=4,stage=2", "stage=8"),
    (LLAMA, "fp8"): ("tensor=8", "tensor=4,stage=2", "stage=8"),
}
THEIRS = {(GPT_OSS, "bfloat16"): "42 GB, a TPU v2-8", (GPT_OSS, "fp8"): "21 GB, a TPU v6e"}


def storage_of(model: str, width: str) -> Storage:
    """The widths of a row; MXFP4 as the published GPT-OSS checkpoint has it."""
    if width != MXFP4:
        return Storage("bfloat16", None if width == "bfloat16" else "fp8-a16")
    info = model_info(model)
    found = info.config.slots()
    return Storage("bfloat16", kept={s.name: "mxfp4-a16" for s in found if s.weight.num_stacked})


def counted() -> list[tuple[str, ...]]:
    """The table's rows: of one device, and of each mesh."""
    rows = []
    for (model, width), meshes in MESHES.items():
        info, storage = model_info(model), storage_of(model, width)
        for mesh in (None, *meshes):
            need = estimate(
                info.config,
                storage=storage,
                kv_dtype="bfloat16",
                rows=1,
                tokens=TOKENS,
                max_model_len=TOKENS,
                shards=Shards() if mesh is None else parse_mesh(mesh),
            )
            theirs = "" if mesh else THEIRS.get((model, width), "")
            name, what = (info.name, width) if mesh is None else ("", "")
            where = mesh or "one device"
            rows.append((name, what, theirs, where, _gb(need.weights), _gb(need.kv_cache)))
    return rows


def markdown() -> str:
    head = ("model", "weights as", "theirs", "mesh", "weights on each", "KV cache on each")
    return "\n\n".join(
        [
            "## Memory of large models, whole and on a mesh",
            text.table(head, counted()),
            text.bullets(
                [
                    (
                        "Counted from the weight tables, as `rooflax inspect --mesh` does; nothing "
                        "of this size was loaded. The RoPE table is among the weights."
                    ),
                    (
                        f"The KV cache is that of one sequence of {TOKENS:,} tokens in bfloat16; "
                        "GPT-OSS keeps 128 of them in every other layer."
                    ),
                    (
                        "`expert` leaves attention, embedding and head whole on every device, "
                        "`stage` embedding and head; `tensor` leaves norms and the router."
                    ),
                    "MXFP4 is not split over tensor=8: 2,880 / 8 = 360 inputs cut a group of 32.",
                ]
            ),
        ]
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
