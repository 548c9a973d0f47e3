"""Several adapters beside one model: each row has its own, or none, whoever else is there."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import openai
import pytest

from rooflax import LLM, AsyncLLM, ExecutionOptions, RequestError
from rooflax.engine.compilation import count_compilations
from rooflax.engine.sampling_params import SamplingParams
from rooflax.loading.adapters import open_adapter
from rooflax.loading.gguf_adapter_save import save_gguf_adapter
from rooflax.loading.model_info import model_info
from rooflax.models.adapters import targets
from rooflax.models.presets import CHAT_NAME
from rooflax.ops.linear.adapter_slots import AdapterSlots
from rooflax.server.service import Service
from rooflax.server.settings import Settings
from tests import goldens
from tests.support.loading.adapters import write_adapter
from tests.support.server.live import serving

pytestmark = pytest.mark.oldest_jax

MAGNITUDES = np.ones(104, np.float32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
ATTENTION = [
    f"model.layers.{i}.self_attn.{part}_proj" for i in range(3) for part in ("q", "v", "o")
]


@pytest.fixture(scope="module")
def base(case):
    return case("llama_gqa").folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Folders by name; ranks and layers differ."""
    root, info = tmp_path_factory.mktemp("adapters"), model_info(base)
    made = {
        "all": write_adapter(root / "all", info, [m for m in _modules() if "lm_head" not in m]),
        "few": write_adapter(root / "few", info, ATTENTION[:4], seed=1, r=2),
        "late": write_adapter(root / "late", info, ATTENTION, seed=2, r=3),
        "head": write_adapter(root / "head", info, ["lm_head"]),
        "large": write_adapter(root / "large", info, ATTENTION, r=9),
        "dora": write_adapter(
            root / "dora",
            info,
            ["model.layers.0.mlp.up_proj"],
            use_dora=True,
            tensors={
                "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": MAGNITUDES
            },
        ),
    }
    return {name: str(folder) for name, folder in made.items()}


def _modules():
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
    parts += ("mlp.gate", "mlp.up", "mlp.down")
    return [f"model.layers.{i}.{part}_proj" for i in range(3) for part in parts]


@pytest.fixture(scope="module")
def server(base, adapters):
    loras = [f"{name}={adapters[name]}" for name in ("all", "few")]
    llm = AsyncLLM(base, max_num_seqs=8, loras=loras, max_loras=3)
    yield llm
    asyncio.run(llm.shutdown())


def asked(server, *pairs, **how):
    """The completions of (prompt, adapter), all at once."""

    async def run():
        each = [server.generate(p, GREEDY, lora=lora, **how) for p, lora in pairs]
        return [found[0] for found in await asyncio.gather(*each)]

    return asyncio.run(run())


def said(completion):
    return completion.tokens, completion.logprobs


def test_a_mixed_batch_equals_each_alone_to_the_bit(server):
    prompts = goldens.prompts()
    pairs = [(p, lora) for p in prompts[:2] for lora in (None, "all", "few")]
    together = asked(server, *pairs)
    alone = [asked(server, pair, cache_salt="apart")[0] for pair in pairs]
    assert [said(c) for c in together] == [said(c) for c in alone]
    assert len({c.tokens for c in together[:3]}) == 3


def test_rows_without_an_adapter_are_those_of_a_server_without(server, base):
    plain = AsyncLLM(base, max_num_seqs=8)
    pairs = [(prompt, None) for prompt in goldens.prompts()]
    mixed = asked(server, *pairs, (goldens.prompts()[0], "all"), cache_salt="other")
    assert [said(c) for c in mixed[:3]] == [said(c) for c in asked(plain, *pairs)]
    asyncio.run(plain.shutdown())


@pytest.mark.parametrize("name", ["all", "few"])
def test_a_slot_computes_what_the_adapter_alone_does(server, base, adapters, name):
    found = asked(server, (goldens.prompts()[2], name))[0]
    alone = LLM(base, lora=adapters[name]).generate(goldens.prompts()[2], GREEDY)[0]
    assert found.tokens == alone.tokens
    for one, other in zip(found.logprobs, alone.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_cached_prompts_are_apart_by_adapter(server):
    prompt = [7] * 64
    params = replace(GREEDY, max_tokens=2)

    async def cached(lora):
        return (await server.generate(prompt, params, lora=lora))[0].num_cached_tokens

    first = [asyncio.run(cached(lora)) for lora in (None, "all", "few")]
    again = [asyncio.run(cached(lora)) for lora in (None, "all", "few")]
    assert first == [0, 0, 0]
    assert all(count > 0 for count in again)


def test_another_adapter_compiles_nothing(server, base, adapters):
    prompt = goldens.prompts()[1]
    with count_compilations() as counts:
        asyncio.run(server.load_lora("late", adapters["late"]))
        found, before = asked(server, (prompt, "late"), (prompt, "all"))
    assert counts.compilations == 0
    assert found.tokens == LLM(base, lora=adapters["late"]).generate(prompt, GREEDY)[0].tokens
    assert before.tokens != found.tokens
    assert set(server.loras) == {"all", "few", "late"}
    with pytest.raises(RequestError, match="There is an adapter 'late' already"):
        asyncio.run(server.load_lora("late", adapters["late"]))
    with pytest.raises(RequestError, match="All 3 slots hold adapters"):
        asyncio.run(server.load_lora("more", adapters["few"]))


def test_adapters_that_load_at_once_do_not_undo_each_other(base, adapters):
    async def both():
        loads = (llm.load_lora(name, adapters[name]) for name in ("few", "late"))
        await asyncio.gather(*loads)
        for name in ("", "x" * 201, "a\nb"):
            with pytest.raises(RequestError, match="An adapter's name has 1 to 200 characters"):
                await llm.load_lora(name, adapters["few"])
        await llm.shutdown()

    llm = AsyncLLM(base, max_num_seqs=2, loras=[f"all={adapters['all']}"], max_loras=3)
    asyncio.run(both())
    assert set(llm.loras) == {"all", "few", "late"}


def test_what_is_loaded_does_not_change_with_its_files(base, adapters, tmp_path):
    """Nor do cached prompts of another adapter that had the name before."""
    folder, prompt = shutil.copytree(adapters["few"], tmp_path / "few"), [7] * 64
    llm = AsyncLLM(base, max_num_seqs=2, loras=[f"few={folder}"], max_loras=2)
    wanted = said(asked(llm, (prompt, "few"))[0])
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    asyncio.run(llm.load_lora("beside", adapters["few"]))
    assert said(asked(llm, (prompt, "few"), cache_salt="new")[0]) == wanted
    again = asked(llm, (prompt, "few"), (prompt, "beside"))
    assert [one.num_cached_tokens > 0 for one in again] == [True, False]
    assert said(again[0]) == said(again[1]) == wanted
    metrics = llm._thread.engine.metrics
    asyncio.run(llm.unload_lora("few"))
    metrics.adapters_running = [1, 2]  # a step that began before still has it
    assert llm.metrics()["loras"]["running"] == ["beside"]
    other = write_adapter(tmp_path / "other", model_info(base), ATTENTION[:4], seed=9, r=2)
    asyncio.run(llm.load_lora("few", other))
    last = asked(llm, (prompt, "few"))[0]
    assert last.num_cached_tokens == 0 and said(last) != wanted
    asyncio.run(llm.shutdown())


def test_stacked_layers_that_adapters_change_in_other_places(base, tmp_path):
    """Queries and values of one layer, queries alone of the next."""
    options, info = ExecutionOptions(layers="scan"), model_info(base)
    folders = {
        name: write_adapter(tmp_path / name, info, ATTENTION[:4], seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    loras = [f"{name}={folder}" for name, folder in folders.items()]
    llm = AsyncLLM(base, max_num_seqs=2, loras=loras, options=options)
    prompt = goldens.prompts()[1]
    for name, folder in folders.items():
        alone = LLM(base, lora=folder, options=options).generate(prompt, GREEDY)[0]
        assert asked(llm, (prompt, name))[0].tokens == alone.tokens
    asyncio.run(llm.shutdown())


def test_fused_layers(case, tmp_path):
    base = case("phi3").folder
    info = model_info(base)
    modules = [m for m in targets(info.family, info.config) if "qkv_proj" in m or "gate_up" in m]
    folder, prompt = write_adapter(tmp_path / "a", info, modules), goldens.prompts()[1]
    llm = AsyncLLM(base, max_num_seqs=1, loras=[f"a={folder}"])
    served, alone = asked(llm, (prompt, "a"))[0], LLM(base, lora=folder).generate(prompt, GREEDY)[0]
    assert modules and served.tokens == alone.tokens
    for one, other in zip(served.logprobs, alone.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    asyncio.run(llm.shutdown())


@pytest.mark.parametrize(("quantize", "dtype"), [(None, "float32"), ("int8", "bfloat16")])
def test_the_plan_counts_what_slots_hold(base, adapters, quantize, dtype):
    """Beside weights of few bits half as much; a row has its bits alone there too."""
    loras = [f"{name}={adapters[name]}" for name in ("all", "few")]
    llm = AsyncLLM(base, max_num_seqs=4, loras=loras, max_loras=3, quantize=quantize)
    leaves = jax.tree.leaves(llm.llm.model.weights, is_leaf=lambda w: isinstance(w, AdapterSlots))
    slots = [(w.a, w.b) for w in leaves if isinstance(w, AdapterSlots)]
    assert {array.dtype.name for pair in slots for array in pair} == {dtype}
    assert llm._bank is not None
    assert llm._bank.nbytes == sum(a.nbytes + b.nbytes for a, b in slots)
    pairs = [(goldens.prompts()[0], name) for name in (None, "all", "few")]
    alone = [asked(llm, pair, cache_salt="apart")[0] for pair in pairs]
    assert [said(c) for c in asked(llm, *pairs)] == [said(c) for c in alone]
    assert len({c.logprobs for c in alone}) == 3
    asyncio.run(llm.shutdown())


def test_an_unknown_adapter_is_named(server):
    with pytest.raises(RequestError, match=r"lora is 'none'; there is all, few"):
        asked(server, (goldens.prompts()[0], "none"))


@pytest.mark.parametrize(
    ("loras", "how", "message"),
    [
        (["few"], {}, "loras has 'few.*must be NAME=DIR"),
        (["a={few}", "a={all}"], {}, "loras names 'a' twice"),
        (["a={head}"], {}, "adapter a changes the head, which is not served beside others"),
        (["a={dora}"], {}, "adapter a is a DoRA, which is not served beside others"),
        (["a={few}", "b={all}"], {"max_loras": 1}, "max_loras is 1, and 2 adapters are given"),
        (["a={large}"], {"max_lora_rank": 4}, "max_lora_rank is 4, and an adapter has 9"),
        ([], {"max_lora_rank": 2}, "max_lora_rank is for `loras` and `max_loras`"),
    ],
)
def test_adapters_that_cannot_be_served(base, adapters, loras, how, message):
    given = [one.format(**adapters) for one in loras]
    with pytest.raises(RequestError, match=message):
        AsyncLLM(base, loras=given, **how)


def test_openais_client_names_adapters_as_models(tmp_path):
    info = model_info(CHAT_NAME)
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, info, ATTENTION, seed=seed)
    loras = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4, loras=loras)) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        cards = {card.id: card.model_dump() for card in client.models.list().data}
        assert list(cards) == [CHAT_NAME, "one", "two"]
        assert cards["one"]["parent"] == CHAT_NAME
        assert cards["one"]["root"] == str(tmp_path / "one")
        texts = {}
        for name in cards:
            how = {"max_tokens": 12, "temperature": 0.0, "prompt": "def add(a, b):"}
            answer = client.completions.create(model=name, **how)
            assert answer.model == name
            texts[name] = answer.choices[0].text
        assert len(set(texts.values())) == 3
        with client.completions.create(
            model="two", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            text = served.http.get("/metrics").text
        said = 'max_lora="2",running_lora_adapters="two",waiting_lora_adapters=""'
        assert f"vllm:lora_requests_info{{{said}}}" in text
        with pytest.raises(openai.NotFoundError, match="one, two"):
            client.completions.create(model="three", prompt="x")


def test_requests_load_and_unload_adapters_of_an_allowed_folder(base, adapters, tmp_path):
    root = Path(adapters["late"]).parent
    (root / "out").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    info = model_info(base)
    save_gguf_adapter(info, open_adapter(adapters["late"], info), root / "late.gguf", "F32")
    settings = {"lora_root": str(root), "served_names": ("tiny",)}

    def post(what, name, **more):
        return served.http.post(f"/v1/{what}_lora_adapter", json={"lora_name": name} | more)

    def said(model):
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
        answer = served.http.post("/v1/completions", json=body)
        return answer.status_code, answer.json().get("choices")

    def make(_):
        return AsyncLLM(base, max_num_seqs=2, max_loras=1)

    with serving(make, **settings) as served:
        alone = said("tiny")
        linked = root / "linked"
        linked.mkdir()
        for file in (root / "late").iterdir():
            (linked / file.name).symlink_to(tmp_path / file.name)
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "empty").mkdir()
        wrong = "..", "/", "out", "loop", "linked", "missing", "late/adapter_config.json", "x.gguf"
        empty = str(tmp_path / "empty")
        for path in (*wrong, "../empty", "out/empty", empty, "\0", "x" * 999):
            answer = post("load", "late", lora_path=path)
            assert answer.status_code == 400 and "no folder inside" in answer.text, path
            assert "a relative path begins in that folder" in answer.text
        assert post("load", "tiny", lora_path="late").status_code == 400
        assert post("load", "d", lora_path="dora").status_code == 400
        write_adapter(root / "biased", info, ATTENTION, bias="all")
        answer = post("load", "d", lora_path="biased")
        assert answer.status_code == 400 and "has bias = 'all', which" in answer.text
        answer = post("load", "late", lora_path="late")
        assert answer.text == "Success: LoRA adapter 'late' added successfully."
        answer = post("load", "more", lora_path="few")
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "no_free_slot"
        late = said("late")
        assert late[0] == 200 and late != alone
        body = {
            "model": "late",
            "prompt": "x",
            "max_tokens": 60,
            "stream": True,
            "ignore_eos": True,
        }
        with served.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            with ThreadPoolExecutor(1) as beside:
                gone = beside.submit(post, "unload", "late")
                while said("late")[0] != 404:
                    pass
                rest = [line for line in lines if line.startswith("data: ")]
                assert rest[-1] == "data: [DONE]"  # the open answer ended as it would have
                assert gone.result().text == "Success: LoRA adapter 'late' removed successfully."
        assert post("unload", "late").status_code == 404
        assert post("load", "late", lora_path="late.gguf").status_code == 200
        assert said("tiny") == alone and said("late") == late
    with serving(make) as served:
        assert post("load", "late", lora_path="late").status_code == 404
        assert post("unload", "late").status_code == 404


def test_no_adapter_takes_the_models_name(tmp_path):
    folder = write_adapter(tmp_path / "a", model_info(CHAT_NAME), ATTENTION)
    llm = AsyncLLM(CHAT_NAME, max_num_seqs=1, loras=[f"{CHAT_NAME}={folder}"])
    service = Service(Settings())
    with pytest.raises(RequestError, match=f"--lora {CHAT_NAME} has the name of the model"):
        service.is_loaded(llm)
    asyncio.run(llm.shutdown())
