"""GGUF files that are cut off, damaged or made to deceive: one sentence, never anything else."""

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax import load
from rooflax.errors import CheckpointError, RooflaxError, UnsupportedModelError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_config import gguf_generation_defaults, read_gguf_config
from rooflax.loading.model_info import model_info
from rooflax.loading.tokenizer import Tokenizer
from tests import gguf_cases

SMALL = gguf_cases.gguf("llama3", "q4_0")
HEADER = SMALL.read_bytes()


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def u32(key, value):
    return pair(key, 4, struct.pack("<I", value))


def tensor(name="w", shape=(32,), kind=0, offset=0):
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def build(pairs=(), tensors=(), data=b"", *, version=3, counts=None, magic=b"GGUF", align=32):
    """A file of these parts, whether they fit together or not."""
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


F32 = b"\0" * 128
BIG = 2**63
MALFORMED = {
    "empty": (b"", "is empty"),
    "magic": (build(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (build(version=1), "version 1"),
    "version 9": (build(version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut in the counts": (b"GGUF\3\0\0\0\0", "cut off"),
    "tensors overflow": (build(counts=(2**64 - 1, 0)), "claims 18446744073709551615 tensors"),
    "metadata overflows": (build(counts=(0, BIG)), "claims 9223372036854775808 metadata"),
    "key beyond the end": (build([struct.pack("<Q", 60_000) + b"a" * 40]), "cut off"),
    "key of any length": (build([struct.pack("<Q", BIG) + b"a" * 40]), "claims 92233"),
    "value beyond the end": (build([pair("a", 8, struct.pack("<Q", BIG))]), "claims 92233"),
    "key twice": (build([u32("a", 1), u32("a", 2)]), "key 'a' twice"),
    "key not UTF-8": (build([u32(b"\xff", 1)]), "not UTF-8"),
    "unknown value type": (build([pair("a", 13, b"\0" * 8)]), "unknown type 13"),
    "array of arrays": (build([pair("a", 9, struct.pack("<IQ", 9, 1) + b"\0" * 60)]), "array of"),
    "array overflows": (build([pair("a", 9, struct.pack("<IQ", 4, 2**62))]), "elements of 'a'"),
    "strings overflow": (build([pair("a", 9, struct.pack("<IQ", 8, 2**61))]), "elements of 'a'"),
    "string in an array": (
        build([pair("a", 9, struct.pack("<IQQ", 8, 1, BIG) + b"\0" * 60)]),
        "claims 92233",
    ),
    "alignment 0": (build([u32("general.alignment", 0)]), "alignment is 0"),
    "alignment 48": (build([u32("general.alignment", 48)]), "alignment is 48"),
    "alignment of text": (build([pair("general.alignment", 8, text("32"))]), "alignment is '32'"),
    "no dimensions": (build([], [tensor(shape=())], F32), "0 dimensions"),
    "five dimensions": (build([], [tensor(shape=(1,) * 5)], F32), "5 dimensions"),
    "an empty axis": (build([], [tensor(shape=(32, 0))], F32), r"shape \[0, 32\]"),
    "unknown type": (build([], [tensor(kind=36)], F32), "type 36"),
    "half a block": (build([], [tensor(shape=(48,), kind=8)], F32), "multiple of 32"),
    "size overflows": (build([], [tensor(shape=(BIG, BIG))], F32), "cut off"),
    "size wraps to 0": (build([], [tensor(shape=(2**32, 2**32))], F32), "cut off"),
    "tensor twice": (build([], [tensor(), tensor(offset=128)], F32 * 2), "tensor 'w' twice"),
    "misaligned": (build([], [tensor(offset=8)], F32 * 2), "no multiple of 32"),
    "overlap": (build([], [tensor("a"), tensor("b", offset=64)], F32 * 2), "overlap"),
    "gap": (build([], [tensor("a"), tensor("b", offset=192)], F32 * 3), "belong to no tensor"),
    "offset overflows": (build([], [tensor(offset=2**64 - 32)], F32), "belong to no tensor"),
    "beyond the end": (build([], [tensor(shape=(64,))], F32), "cut off"),
    "pickle": (b"\x80\x04.............", "begins with"),
}


@pytest.fixture
def opened(tmp_path):
    def write(content):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_rejected_with_the_reason(case, opened):
    content, reason = MALFORMED[case]
    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(opened(content))


def test_a_sound_file_is_read(opened):
    values = np.arange(64, dtype=np.float32)
    pairs = [
        u32("a", 7), pair("b", 6, struct.pack("<f", 1e-5)), pair("c", 7, b"\1"),
        pair("d", 9, struct.pack("<IQ", 8, 2) + text("x") + text("\u00e9")),
        pair("e", 9, struct.pack("<IQ2h", 3, 2, -1, 300)),
    ]  # fmt: skip
    tensors = [tensor("two", (2, 16), offset=128), tensor("one")]
    file = GGUFFile(opened(build(pairs, tensors, values.tobytes())))
    assert file.metadata["a"] == 7 and file.metadata["b"] == 1e-5 and file.metadata["c"] is True
    assert file.metadata["d"] == ["x", "\u00e9"] and file.metadata["e"].tolist() == [-1, 300]
    assert file.names() == ["two", "one"]
    np.testing.assert_array_equal(file.read("two"), values[32:].reshape(16, 2))
    assert not file.read("one").flags.writeable
    file.release("one")
    np.testing.assert_array_equal(file.read("one"), values[:32])
    with pytest.raises(CheckpointError, match="no tensor 'three'"):
        file.info("three")


def test_a_missing_file_and_another_suffix(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="no such folder or file"):
        model_info(tmp_path / "none.gguf")
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"give the folder .* or a \.gguf file"):
        model_info(other)


def architecture(name, *more):
    return [pair("general.architecture", 8, text(name)), *more]


REFUSED = {
    "architecture": (
        architecture("mamba"),
        "architecture 'mamba'.*not one of the \\d+ that .*computes\\. What .*docs/models.md",
    ),
    "no architecture": ([u32("a", 1)], "architecture None"),
    "unknown key": (architecture("llama", u32("llama.novel_trick", 1)), "'llama.novel_trick'"),
    "experts": (architecture("qwen2", u32("qwen2.expert_count", 8)), "qwen2.expert_count = 8"),
    "layer by layer": (
        architecture("llama", pair("llama.block_count", 9, struct.pack("<IQI", 4, 1, 1))),
        "layer by layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_rejected_by_name(case, opened):
    pairs, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        model_info(opened(build(pairs)))


def test_a_key_is_ignored_when_the_caller_says_so(opened):
    path = opened(build(architecture("llama", u32("llama.novel_trick", 1))))
    with pytest.raises(CheckpointError, match="vocab_size|num_attention_heads|hidden_size"):
        model_info(path, ignore_config_keys=["llama.novel_trick"])


def replaced(before, after):
    """The small file with some of its bytes replaced by others of the same number."""
    before, after = (v.encode() if isinstance(v, str) else v for v in (before, after))
    assert len(before) == len(after) and before in HEADER
    return HEADER.replace(before, after)


def eos(token_id):
    key = text("tokenizer.ggml.eos_token_id") + struct.pack("<I", 4)
    start = HEADER.index(key) + len(key)
    return HEADER[:start] + struct.pack("<I", token_id) + HEADER[start + 4 :]


TOKENIZERS = {
    "pre-tokenizer": (replaced("llama-bpe", "llama-bpf"), "pre-tokenizer 'llama-bpf'"),
    "kind": (replaced(text("gpt2"), text("gptX")), "kind 'gptX'"),
    "token id": (eos(2**31), "eos_token_id = 2147483648, but 281 tokens"),
    "no merges": (replaced("tokenizer.ggml.merges", "tokenizer.ggml.merged"), "no merges"),
    "no tokens": (replaced("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"), "no tokens"),
    "merge": (replaced("\u0120 \u0120", "\u0120x\u0120"), "not two pieces"),
    "token twice": (replaced(text("!") + text('"'), text("!") + text("!")), "a token twice"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_do_not_hold_together(case, opened):
    content, reason = TOKENIZERS[case]
    with pytest.raises(RooflaxError, match=reason):
        model_info(opened(content)).tokenizer()


@pytest.mark.parametrize(("key", "start"), [("model", "gpt2"), ("pre", "llama-bpe")])
def test_names_of_tokenizers_of_any_length_are_one_sentence(key, start, opened):
    file = GGUFFile(opened(HEADER))
    assert file.metadata[f"tokenizer.ggml.{key}"] == start
    file.metadata |= {f"tokenizer.ggml.{key}": "x" * 100_000}
    with pytest.raises(UnsupportedModelError, match="'xxx") as caught:
        Tokenizer(file)
    assert len(str(caught.value)) < 1000


def test_a_newline_that_is_no_token_is_named_in_one_line(opened):
    file = GGUFFile(opened(HEADER))
    merges = ["\n \n", *file.metadata["tokenizer.ggml.merges"]]
    file.metadata |= {"tokenizer.ggml.merges": merges}
    with pytest.raises(CheckpointError, match="does not hold together") as caught:
        Tokenizer(file)
    assert "\n" not in str(caught.value)


STRINGS = struct.pack("<IQ", 8, 1) + text("llama")
NUMBERS = struct.pack("<IQ2I", 4, 2, 1, 2)
ARRAYS = {
    "architecture": ([pair("general.architecture", 9, STRINGS)], "the architecture .'llama'."),
    "architectures": ([pair("general.architecture", 9, NUMBERS)], "the architecture array"),
}


VALUES = (
    1e308, 1e-300, float("inf"), float("nan"), -1, 0.0, 2.5, 2**32 - 1, 2**63, True, "x" * 100_000,
    ["x" * 100_000], np.zeros(0, np.int32), np.array([1, 2]), np.arange(20_000),
)  # fmt: skip
MORE_KEYS = (
    "rope.scaling.attn_factor", "rope.scaling.factor", "attention.head_count_kv", "block_count",
    "nextn_predict_layers", "attention.sliding_window", "attention.recurrent_layers",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["llama3.f32", "lfm2.bf16", "qwen3_5.bf16", "gemma4.bf16", "deepseek_v2.bf16", "olmo3.bf16"],
)
def test_any_value_of_any_key_is_read_or_rejected_in_one_sentence(name):
    file = GGUFFile(gguf_cases.FOLDER / f"{name}.gguf")
    arch, sound = file.metadata["general.architecture"], file.metadata
    yarn = {f"{arch}.rope.scaling.{key}": value for key, value in
            (("type", "yarn"), ("factor", 4.0), ("attn_factor", 1.5))}  # fmt: skip
    keys = [key for key in sound if not key.startswith(("tokenizer.", "general.sampling."))]
    keys += ["general.sampling.temp", *(f"{arch}.{key}" for key in MORE_KEYS)]
    for base in (sound, sound | yarn):
        for key in dict.fromkeys(keys):
            for value in VALUES:
                file.metadata = base | {key: value}
                try:
                    read_gguf_config(file)
                    gguf_generation_defaults(file)
                except RooflaxError as error:
                    said = str(error)
                    assert len(said) < 900 and "\n" not in said, (key, f"{value!r:.20}")
                    assert said.endswith("."), said


WANTED = {
    "llama3.f32": (), "gpt2.f32": (), "lfm2.bf16": (), "granite.bf16": ("logit_scale",),
    "cohere2.bf16": ("logit_scale", "sliding_window"), "gemma4.bf16": ("sliding_window",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "end"),
    [(name, end) for name, own in WANTED.items() for end in ("context_length", "_epsilon", *own)],
)
def test_keys_that_llama_cpp_wants_of_every_file_are_required(name, end):
    """A family's default in their place is another model without a word."""
    file = GGUFFile(gguf_cases.FOLDER / f"{name}.gguf")
    file.metadata = {key: value for key, value in file.metadata.items() if not key.endswith(end)}
    with pytest.raises(CheckpointError, match=rf"has no \S+{end}, which"):
        read_gguf_config(file)


@pytest.mark.parametrize(
    ("name", "key", "wanted"),
    [
        ("granite", "granite.attention.scale", {"attention_multiplier": 0.5}),
        ("gemma3", "gemma3.attention.sliding_window", {"layer_types": {"full_attention"}}),
    ],
)
def test_keys_that_are_absent_are_what_llama_cpp_takes(name, key, wanted):
    """src/models/ of llama.cpp; families' own defaults are others."""
    file = GGUFFile(gguf_cases.kept(name))
    file.metadata = {k: value for k, value in file.metadata.items() if k != key}
    _, config, raw = read_gguf_config(file)
    found = {hf: set(raw[hf]) if isinstance(raw[hf], list) else raw[hf] for hf in wanted}
    assert found == pytest.approx(wanted) if name != "gemma3" else found == wanted
    assert name != "gemma3" or {layer.attention.window for layer in config.layers} == {None}


def test_a_count_of_layers_of_which_lists_are_made_has_a_limit(opened):
    """The layers of a Granite 4, of which the metadata has the count alone."""
    pairs = architecture("granite", pair("granite.rope.scaling.finetuned", 7, b"\0"))
    for count in (0, 10_001, 2**32 - 1):
        with pytest.raises(CheckpointError, match=f"block_count = {count}; .* from 1 to 10000"):
            model_info(opened(build([*pairs, u32("granite.block_count", count)])))


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_where_one_value_belongs(case, opened):
    pairs, reason = ARRAYS[case]
    with pytest.raises(RooflaxError, match=reason):
        model_info(opened(build(pairs)))


def opens(path: Path) -> None:
    """Everything that is read of a file; nothing but a RooflaxError may come of it."""
    with contextlib.suppress(RooflaxError):
        info = model_info(path)
        info.tokenizer().encode("def main():")
        info.generation_defaults()
        load(info)
        load(info, dtype=None)


def _boundaries():
    """Where something begins or ends in the small file: each length, key and offset."""
    file = GGUFFile(SMALL)
    data = min(file._begins.values())
    ends = [file._begins[n] + file.info(n).nbytes for n in file.names()]
    spread = np.linspace(0, data, 60).astype(int).tolist()
    return sorted({*spread, *range(64), data - 1, data, *(end - 1 for end in ends)})


@pytest.mark.parametrize("length", _boundaries())
def test_a_file_cut_off_anywhere_is_rejected(length, opened):
    with pytest.raises(CheckpointError, match="valid GGUF|cannot read|is empty"):
        model_info(opened(HEADER[:length]))


flips = st.lists(
    st.tuples(st.integers(0, len(HEADER) - 1), st.integers(0, 255)), min_size=1, max_size=4
)


first_flips = st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=3)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """Opens the small file with some of its bytes replaced."""
    path = tmp_path_factory.mktemp("flips") / "x.gguf"

    def opened(flips):
        content = bytearray(HEADER)
        for position, value in flips:
            content[position] = value
        path.unlink(missing_ok=True)  # else what is mapped of the last one would change
        path.write_bytes(content)
        opens(path)

    return opened


@settings(max_examples=40, deadline=None)
@given(flips=flips)
def test_flipped_bytes_give_a_rejection_or_a_model(flips, flipped):
    flipped(flips)


@settings(max_examples=80, deadline=None)
@given(flips=first_flips)
def test_flipped_bytes_of_the_first_metadata(flips, flipped):
    flipped(flips)
