"""GGUF files made by llama.cpp's own converter against the checkpoints that they were made from."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, SamplingParams, load, save
from rooflax.cli.main import main
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import dequantize, is_plain
from rooflax.loading.gguf_config import end_texts
from rooflax.loading.model_info import model_info
from rooflax.loading.tokenizer import Tokenizer
from rooflax.models.gguf import llama3_scaling, proportional_scaling
from rooflax.nn.rope import RopeScaling, inverse_frequencies
from tests import gguf_cases, goldens
from tests.marks import cases
from tests.support.loading.fixtures import TEXT
from tests.support.models.programs import full_logits

pytestmark = pytest.mark.oldest_jax

EXACT = {name: kinds[0] for name, kinds in gguf_cases.FILES.items() if kinds[0] in ("f32", "bf16")}
ROUNDED = [(n, kind) for n, kinds in gguf_cases.FILES.items() for kind in kinds if kind[0] == "q"]
BYTE_LEVEL = [name for name in EXACT if name != "llama2"]
TEXTS = [
    *TEXT[:3],
    "it's WE'LL I'VE don't\r\n\r\n  x = 12345678\n\n\n\tif (a||b) {}  ",
    "HelloWorld camelCaseXMLHttp ÀÉîõü e\u0301 ﬁ 漢字かな العربية हिन्दी \u00a0\u2003",
    "<|endoftext|><|eot_id|> a<|im_end|>b <|return|>",
    " leading and trailing ",
    "",
]


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """The checkpoint folder of a case, written once."""
    root = tmp_path_factory.mktemp("gguf")
    made = {}

    def get(name):
        if name not in made:
            made[name] = gguf_cases.write_original(root / name, name)
        return made[name]

    return get


def logits(model, rows=2, seq=41):
    ids = np.random.RandomState(3).randint(0, model.config.vocab_size, (rows, seq))
    return np.asarray(full_logits(model, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("name", cases(EXACT, nightly=["llama2", "llama3", "qwen2"]))
def test_a_float_file_computes_what_the_checkpoint_computes(name, original):
    ours, theirs = load(gguf_cases.gguf(name, EXACT[name])), load(original(name))
    assert ours.config == theirs.config
    np.testing.assert_allclose(logits(ours), logits(theirs), rtol=0, atol=1e-4)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), ours.weights, theirs.weights)
    assert all(jax.tree.leaves(same))


@pytest.mark.every_jax
@pytest.mark.parametrize("name", cases(EXACT, nightly=["gpt2", "llama2", "llama3", "qwen2"]))
def test_the_same_greedy_tokens(name, original):
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ours, theirs = (
        [c.tokens for c in LLM(where, dtype="float32").generate(goldens.prompts(), params)]
        for where in (gguf_cases.gguf(name, EXACT[name]), original(name))
    )
    assert ours == theirs


@pytest.mark.parametrize(("name", "kind"), ROUNDED)
def test_a_quantised_file_is_near_the_checkpoint(name, kind, original):
    """A swapped row or nibble would be far off: what rounding changes is small."""
    ours, theirs = load(gguf_cases.gguf(name, kind)), load(original(name))
    assert ours.config == theirs.config
    for a, b in zip(jax.tree.leaves(ours.weights), jax.tree.leaves(theirs.weights), strict=True):
        error, size = np.asarray(a) - np.asarray(b), np.asarray(b)
        assert np.linalg.norm(error) <= (0.01 if kind == "q8_0" else 0.12) * np.linalg.norm(size)


@pytest.mark.parametrize(("name", "kind"), ROUNDED)
def test_blocks_are_dequantised_as_llama_cpps_authors_do(name, kind):
    file = GGUFFile(gguf_cases.gguf(name, kind))
    reader = gguf.GGUFReader(gguf_cases.gguf(name, kind))
    seen = set()
    for tensor in reader.tensors:
        info = file.info(tensor.name)
        assert info.dtype == tensor.tensor_type.name and info.nbytes == tensor.n_bytes
        if not is_plain(info.dtype):
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            ours = dequantize(info.dtype, file.read(tensor.name))
            np.testing.assert_array_equal(ours, theirs.reshape(info.shape))
            seen.add(info.dtype)
    assert seen


def test_a_k_quant_file_holds_k_quants_and_what_llama_cpp_falls_back_to():
    file = GGUFFile(gguf_cases.gguf("llama_k", "q4_k_m"))
    kinds = {file.info(name).dtype for name in file.names()}
    assert {"Q4_K", "Q6_K", "F32"} < kinds and kinds & {"Q5_0", "Q8_0"}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_the_tokenizer_gives_the_checkpoints_ids(name):
    ours = Tokenizer(gguf_cases.gguf(name, EXACT[name]))
    theirs = Tokenizer(gguf_cases.FOLDER / name)
    assert ours.special_tokens == theirs.special_tokens
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.vocab_size == theirs.vocab_size
    assert ours.chat_templates == theirs.chat_templates
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode_plain(text) == theirs.encode_plain(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_sentencepiece_tokenizer_gives_sentencepieces_ids():
    tokenizer = Tokenizer(gguf_cases.gguf("llama2", "f32"))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip
    for text, ids in json.loads((gguf_cases.FOLDER / "llama2" / "ids.json").read_text()):
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<s>")[:1] == [1] and tokenizer.encode("a<s>")[-1] == 1


def test_a_tokenizers_files_are_read_back(tmp_path):
    for name, kind in EXACT.items():
        ours = Tokenizer(gguf_cases.gguf(name, kind))
        folder = tmp_path / name
        folder.mkdir()
        for file, content in ours.files().items():
            (folder / file).write_bytes(content)
        again = Tokenizer(folder)
        assert again.special_tokens == ours.special_tokens
        assert again.chat_templates == ours.chat_templates
        assert [again.encode(t) for t in TEXTS] == [ours.encode(t) for t in TEXTS]


def test_what_ends_a_sequence():
    info = model_info(gguf_cases.gguf("gpt_oss_mxfp4", "bf16"))
    tokenizer = info.tokenizer()
    ends = [tokenizer.id_to_token(i) for i in info.generation_defaults().eos_token_ids]
    assert sorted(ends) == ["<|call|>", "<|endoftext|>", "<|return|>"]
    assert model_info(gguf_cases.gguf("llama2", "f32")).generation_defaults().eos_token_ids == (2,)


def test_saving_needs_no_folder(tmp_path):
    path = gguf_cases.gguf("llama3", "f32")
    model = load(path)
    save(model, tmp_path / "saved", dtype="float32", files_from=path)
    again = load(tmp_path / "saved")
    assert again.config == model.config
    np.testing.assert_array_equal(logits(again), logits(model))
    text = "def main():<|eot_id|>"
    assert Tokenizer(tmp_path / "saved").encode(text) == Tokenizer(path).encode(text)


LLAMA3 = {
    "3.1": ("llama3", 8.0, 8192, 1.0, 4.0, 500_000.0, 128),
    "3.2": ("llama3", 32.0, 8192, 1.0, 4.0, 500_000.0, 64),
    "tiny": ("llama3", 8.0, 64, 1.0, 3.5, 500.0, 24),
}


@pytest.mark.parametrize("model", LLAMA3)
def test_llama3_scaling_is_recovered_from_its_divisors(model):
    *fields, theta, head_dim = LLAMA3[model]
    scaling = RopeScaling(*fields)
    plain = inverse_frequencies(head_dim, theta, None)
    divisors = (plain / inverse_frequencies(head_dim, theta, scaling)).astype(np.float32)
    found = llama3_scaling(divisors.astype(np.float64), plain)
    assert found == scaling.to_hf()


def test_divisors_that_no_llama3_scaling_makes_are_none():
    plain = inverse_frequencies(64, 10_000.0, None)
    assert llama3_scaling(np.linspace(1, 8, 32), plain) is None
    assert llama3_scaling(np.full(32, np.nan), plain) is None
    assert llama3_scaling(np.full(32, 8.0), plain) is None
    assert llama3_scaling(np.ones(32), plain) == {"rope_type": "default"}


def test_a_proportional_ropes_share_is_recovered_from_its_divisors():
    for size, share in ((512, 0.25), (64, 1.0), (24, 0.5)):
        scaling = RopeScaling("proportional", 2.0, share=share)
        plain, scaled = (inverse_frequencies(size, 1e6, s) for s in (None, scaling))
        with np.errstate(divide="ignore"):
            divisors = np.minimum(plain / scaled, 1e30)
        assert proportional_scaling(divisors, plain) == scaling.to_hf()
    for others in ([1, 2, 1e30, 1e30], [1, 1e30, 1, 1e30], [1, 1, 1, np.inf], [np.nan] * 4):
        assert proportional_scaling(np.array(others), np.ones(4)) is None


def test_inspect_shows_formats_and_bytes(capsys):
    path = gguf_cases.gguf("llama3", "q4_0")
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["weights"]["formats"]
    kinds = {entry["format"] for entry in found}
    assert "Q4_0" in kinds and "F32" in kinds
    file = GGUFFile(path)
    assert sum(entry["bytes"] for entry in found) == sum(
        file.info(name).nbytes for name in file.names()
    )


def test_verify_names_the_checkpoint(capsys):
    pytest.importorskip("transformers")
    assert main(["verify", str(gguf_cases.gguf("qwen2", "f32"))]) == 2
    assert "verify the checkpoint it was made from" in capsys.readouterr().err


def test_generate_speaks(capsys):
    path = str(gguf_cases.gguf("qwen2", "q4_0"))
    flags = ["-p", "def main", "-n", "4", "--temp", "0", "--json", "--quiet"]
    assert main(["generate", path, *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (("<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>"), 3),  # Phi-3
        (("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"), 3),  # GPT-OSS
        (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), 2),  # Gemma 3
        (("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_response>"), 3),  # Gemma 4
        (("<s>", "</s>", "[INST]"), 1),  # Mistral
    ],
)
def test_control_tokens_that_end_an_answer(control, ends):
    found = end_texts(control)
    assert len(found) == ends and set(found) < set(control)
    assert ("<|end|>" in found) == ("<|end|>" in control and "<|return|>" not in control)
