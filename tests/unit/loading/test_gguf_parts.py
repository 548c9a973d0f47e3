"""GGUF files in several parts, and folders of GGUF files."""

import shutil
import struct

import numpy as np
import pytest

from rooflax.errors import CheckpointError, RooflaxError, UnsupportedModelError
from rooflax.loading.gguf import TYPES, GGUFFile, _Cursor, open_gguf
from rooflax.loading.model_info import model_info
from rooflax.loading.tokenizer import Tokenizer
from tests import gguf_cases
from tests.unit.loading.test_gguf_hostile import architecture, build, pair, tensor, text, u32

WHOLE = gguf_cases.gguf("llama3", "q8_0")
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def u16(key, value):
    return pair(key, 2, struct.pack("<H", value))


def metadata_of(file):
    """The bytes of a file's keys and values, and how many there are."""
    cursor = _Cursor(file.path, file._map, 16)
    count = cursor.number("<u8")
    start = cursor.position
    for _ in range(count):
        key = cursor.string()
        cursor.value(key, cursor.number("<u4"))
    return file._map[start : cursor.position], count


def part(file, names, pairs, num_pairs):
    infos, data = [], b""
    for name in names:
        info = file.info(name)
        infos.append(tensor(name, info.shape[::-1], NUMBERS[info.dtype], len(data)))
        data += file.read(name).tobytes()
        data += b"\0" * (-len(data) % 32)
    return build([pairs], infos, data, counts=(len(infos), num_pairs))


def write_parts(folder, count=3, *, stem="m", first_is_empty=False, keys=None):
    """The whole file in parts, as llama-gguf-split names and writes them."""
    file = GGUFFile(WHOLE)
    names = file.names()
    metadata, num = metadata_of(file)
    cuts = np.array_split(np.arange(len(names)), count - first_is_empty)
    cuts = [[], *cuts] if first_is_empty else cuts
    paths = []
    for number, cut in enumerate(cuts):
        split = {"no": number, "count": count, "tensors.count": len(names)} | (keys or {})
        pairs = b"".join(
            u32(f"split.{key}", value) if key == "tensors.count" else u16(f"split.{key}", value)
            for key, value in split.items()
            if value is not None
        )
        have = sum(value is not None for value in split.values())
        own = (metadata, num) if number == 0 else (b"", 0)
        paths.append(folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf")
        tensors = [names[i] for i in cut]
        paths[-1].write_bytes(part(file, tensors, own[0] + pairs, own[1] + have))
    return paths


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("first_is_empty", [False, True])
@pytest.mark.parametrize("stem", ["m", "Q4-00001-of-00002 x"])
def test_any_part_opens_the_whole(tmp_path, named, first_is_empty, stem):
    paths = write_parts(tmp_path, stem=stem, first_is_empty=first_is_empty)
    whole, found = model_info(WHOLE), model_info(str(paths[named]))
    assert (found.family, found.config) == (whole.family, whole.config)
    assert found.gguf is not None and found.gguf.path == paths[0]
    ours, theirs = found.weights(), whole.weights()
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert ours.info(name) == theirs.info(name)
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
        ours.prefetch(name)
        ours.release(name)
    assert found.generation_defaults() == whole.generation_defaults()
    for tokenizer in (found.tokenizer(), Tokenizer(paths[named])):
        assert tokenizer.encode("Hello world") == whole.tokenizer().encode("Hello world")


def test_parts_may_be_links_as_in_the_hub_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    for path in write_parts(tmp_path):
        path.rename(tmp_path / "blobs" / path.name[:7])
        path.symlink_to(tmp_path / "blobs" / path.name[:7])
    assert len(open_gguf(path).names()) == len(GGUFFile(WHOLE).names())


def test_parts_that_are_missing_are_named(tmp_path):
    paths = write_parts(tmp_path, 5)
    paths[2].unlink()
    said = r"is one of 5 parts; beside it, 1 are missing: m-00003-of-00005\.gguf\.$"
    with pytest.raises(CheckpointError, match=said):
        model_info(paths[0])
    for path in (*paths[1:2], *paths[3:]):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"4 are missing: m-00002.* m-00004\S+ \.\.\.\.$"):
        model_info(paths[0])


def replaced(keys):
    return lambda folder: write_parts(folder, keys=keys)


def renamed(folder):
    paths = write_parts(folder)
    paths[0].rename(folder / "one.gguf")
    return [folder / "one.gguf"]


def swapped(folder):
    paths = write_parts(folder)
    paths[1].rename(folder / "x")
    paths[2].rename(paths[1])
    (folder / "x").rename(paths[2])
    return paths


def twice(folder):
    paths = write_parts(folder, 2)
    names = GGUFFile(WHOLE).names()
    pairs = u16("split.no", 1) + u16("split.count", 2) + u32("split.tensors.count", len(names))
    paths[1].write_bytes(part(GGUFFile(WHOLE), names, pairs, 3))
    return paths


def of_another(folder):
    paths = write_parts(folder)
    shutil.copy(WHOLE, paths[1])
    return paths


def damaged(folder):
    paths = write_parts(folder)
    paths[2].write_bytes(paths[2].read_bytes()[:-64])
    return paths


def huge(folder):
    path = folder / "m-00001-of-65535.gguf"
    path.write_bytes(build(architecture("llama", u16("split.count", 65535))))
    return [path]


def numbers(folder):
    path = folder / "x.gguf"
    path.write_bytes(
        build(architecture("llama", pair("split.count", 9, struct.pack("<IQ2I", 4, 2, 1, 2))))
    )
    return [path]


HOSTILE = {
    "renamed": (renamed, "is one of 3 parts, whose names must end in -00001-of-00003.gguf"),
    "swapped": (swapped, "says that it is part 3 of 3; its name says 2 of 3"),
    "another count": (replaced({"count": 4}), "is one of 4 parts, whose names must end"),
    "all first": (replaced({"no": 0}), "says that it is part 1 of 3; its name says 2 of 3"),
    "more tensors": (replaced({"tensors.count": 2**31}), "has 2147483648 tensors in all"),
    "fewer tensors": (replaced({"tensors.count": 1}), "has 1 tensors in all its parts, which hold"),
    "a tensor twice": (twice, r"m-00002-of-00002.gguf has the tensor .* again"),
    "no part": (of_another, "says that it is part 1 of 1; its name says 2 of 3"),
    "damaged": (damaged, r"m-00003-of-00003.gguf is not a valid GGUF file: .* cut off"),
    "huge": (huge, "is one of 65535 parts; beside it, 65534 are missing"),
    "numbers": (numbers, "split.count is not one whole number"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_parts_that_are_not_of_one_file_are_rejected(tmp_path, case):
    write, said = HOSTILE[case]
    with pytest.raises(CheckpointError, match=said) as caught:
        model_info(write(tmp_path)[0])
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_a_file_of_one_part_keeps_any_name(tmp_path):
    (path,) = write_parts(tmp_path, 1)
    assert model_info(path.rename(tmp_path / "x.gguf")).family == "llama"
    (path,) = write_parts(tmp_path, 1, keys={"count": 0, "no": None})
    assert model_info(path).family == "llama"


@pytest.mark.parametrize("with_config", [False, True])
def test_a_folder_with_one_model_opens(tmp_path, with_config):
    """Also one that is split, and beside files of other kinds."""
    if with_config:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_parts(tmp_path)
    (tmp_path / "mmproj-F16.gguf").write_bytes(build(architecture("clip")))
    (tmp_path / "m.imatrix.gguf").write_bytes(b"x")
    (tmp_path / "README.md").write_text("x")
    found = model_info(tmp_path)
    assert found.config == model_info(WHOLE).config and found.folder is not None
    assert found.folder.name == "m-00001-of-00003.gguf"
    adapter = [pair("general.type", 8, text("adapter")), *architecture("llama")]
    (tmp_path / "lora.gguf").write_bytes(build(adapter))
    assert model_info(tmp_path).config == found.config


def test_a_folder_with_several_models_names_them(tmp_path):
    write_parts(tmp_path)
    for name in ("a", "b"):
        shutil.copy(WHOLE, tmp_path / f"{name}.gguf")
    said = rf"holds 3 models: a.gguf, b.gguf, m-00001-of-00003.gguf; name one .* {tmp_path}/a.gguf"
    with pytest.raises(CheckpointError, match=said):
        model_info(tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    (only / "mmproj.gguf").write_bytes(build(architecture("clip")))
    with pytest.raises(CheckpointError, match="has mmproj.gguf, which is no model of its own"):
        model_info(only)
    (only / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no model_type"):
        model_info(only)
    (only / "pipe.gguf").mkdir()
    with pytest.raises(RooflaxError):
        model_info(only)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("adapter", "an adapter, which is no model; name its base model, and give the file as"),
        ("mmproj", "the image or audio part of a model"),
        ("imatrix", "an importance matrix"),
        ("vocab", "a vocabulary without weights"),
    ],
)
def test_files_that_are_no_models_say_what_they_are(tmp_path, kind, said):
    pairs = [pair("general.type", 8, text(kind)), *architecture("llama")]
    (tmp_path / "x.gguf").write_bytes(build(pairs))
    with pytest.raises(UnsupportedModelError, match=said):
        model_info(tmp_path / "x.gguf")
