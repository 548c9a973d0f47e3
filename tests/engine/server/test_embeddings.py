"""/v1/embeddings and /v1/rerank, with real engines of tiny checkpoints."""

import base64
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from rooflax import LLM, AsyncLLM
from rooflax.server import tables
from tests import encoder_cases, goldens
from tests.engine.server.test_apis import mutated
from tests.engine.test_embedding import TEXTS, add_modules
from tests.pooling_cases import NORMALIZE, SCORE, pooling, write_modules
from tests.support.product.snippets import snippets
from tests.support.server.live import serving

pytestmark = pytest.mark.oldest_jax

EMBED = {
    "input": ["x", "y z"], "dimensions": 5, "encoding_format": "float", "prompt_name": "query",
    "cache_salt": "s", "user": "u", "truncate_prompt_tokens": 20,
}  # fmt: skip
SCORE_BODY = {
    "query": "x", "documents": ["y", {"text": "z"}], "top_n": 1, "return_documents": True,
    "instruction": "i", "max_tokens_per_doc": 1,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, reference = tmp_path_factory.mktemp("pooling"), goldens.committed("qwen3")
    embeds = goldens.write_checkpoint(root / "embeds", "qwen3", reference)
    scores = goldens.write_checkpoint(root / "scores", "qwen3", reference)
    add_modules(embeds, pooling("lasttoken"), NORMALIZE)
    add_modules(scores, (SCORE, {"true_token_id": 17, "false_token_id": 40}))
    (scores / "chat_template.jinja").write_text(TEMPLATE)
    return embeds, scores


@pytest.fixture(scope="module")
def embeds(folders):
    with serving(lambda report: AsyncLLM(folders[0], max_num_seqs=4)) as server:
        yield server


@pytest.fixture(scope="module")
def scores(folders):
    with serving(lambda report: AsyncLLM(folders[1], max_num_seqs=2)) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(folders):
    return LLM(folders[0]).embed(TEXTS)


def vectors(found):
    assert found.status_code == 200, found.text
    assert [line["index"] for line in found.json()["data"]] == list(
        range(len(found.json()["data"]))
    )
    return np.array([line["embedding"] for line in found.json()["data"]])


def test_embeddings_of_texts_and_of_ids(embeds, folders, wanted):
    found = embeds.post("/v1/embeddings", {"input": TEXTS})
    np.testing.assert_allclose(vectors(found), wanted, atol=1e-6)
    ids = [LLM(folders[0]).encode(text) for text in TEXTS]
    usage = {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert found.json()["usage"] == usage
    np.testing.assert_allclose(
        vectors(embeds.post("/v1/embeddings", {"input": ids})), wanted, atol=1e-6
    )
    for one in (TEXTS[0], ids[0]):
        found = embeds.post("/v1/embeddings", {"input": one, "user": "u", "cache_salt": "s"})
        np.testing.assert_allclose(vectors(found), wanted[:1], atol=1e-6)


def test_fields_of_embeddings(embeds, folders):
    body = {"input": TEXTS, "dimensions": 5, "encoding_format": "base64", "prompt_name": "query"}
    found = embeds.post("/v1/embeddings", body).json()["data"]
    read = np.stack([np.frombuffer(base64.b64decode(line["embedding"]), "<f4") for line in found])
    again = LLM(folders[0]).embed(TEXTS, dimensions=5, prompt_name="query")
    np.testing.assert_allclose(read, again, atol=1e-6)


def test_openais_client_embeds(embeds, wanted):
    with openai.OpenAI(base_url=f"{embeds.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS)
    np.testing.assert_allclose([line.embedding for line in found.data], wanted, atol=1e-6)


def test_the_pages_client_embeds(embeds, capsys):
    (code,) = [s.code for s in snippets("docs/embedding.md", "python") if "openai" in s.code]
    name = httpx.get(f"{embeds.url}/v1/models").json()["data"][0]["id"]
    for old, new in {"http://127.0.0.1:8000": embeds.url, "all-MiniLM-L6-v2": name}.items():
        code = code.replace(old, new)
    namespace: dict = {}
    exec(code, namespace)
    namespace["client"].close()
    size = len(namespace["answer"].data[0].embedding)
    assert capsys.readouterr().out.startswith(f"{size} ")


def test_many_clients_get_their_own_vectors(embeds, wanted):
    def one(index):
        texts = [TEXTS[index % 3]] * (1 + index % 7)
        return vectors(embeds.post("/v1/embeddings", {"input": texts}))

    with ThreadPoolExecutor(8) as pool:
        for index, found in enumerate(pool.map(one, range(40))):
            assert len(found) == 1 + index % 7
            same = np.tile(wanted[index % 3], (len(found), 1))
            np.testing.assert_allclose(found, same, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"] * (tables.MAX_TEXTS + 1)}, "input"),
        ({"input": ["x", 5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[10**9]]}, "input"),
        ({"input": "x " * 500}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 55}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "prompt_name": "no"}, "prompt_name"),
        ({"input": ["x", [5, 6]], "prompt_name": "query"}, "prompt_name"),
        ({"input": "x", "truncate": True}, "truncate"),
    ],
)
def test_what_cannot_be_embedded_is_rejected_with_its_field(embeds, body, param):
    found = embeds.post("/v1/embeddings", body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


def test_rerank_gives_the_best_first(scores, folders):
    documents = ["x + y", "a longer document", "z"]
    wanted = LLM(folders[1]).rerank("what is x", documents)
    found = scores.post("/v1/rerank", {"query": "what is x", "documents": documents}).json()
    order = [line["index"] for line in found["results"]]
    assert order == sorted(range(3), key=lambda index: -wanted[index])
    given = [line["relevance_score"] for line in found["results"]]
    assert given == pytest.approx([wanted[index] for index in order], abs=1e-6)
    assert found["usage"]["total_tokens"] > 0
    body = {
        "query": "what is x", "documents": [{"text": text} for text in documents],
        "top_n": 1, "return_documents": True, "instruction": "be strict",
    }  # fmt: skip
    (line,) = scores.post("/rerank", body).json()["results"]
    told = LLM(folders[1]).rerank("what is x", documents, instruction="be strict")
    assert line["relevance_score"] == pytest.approx(max(told), abs=1e-6)
    assert line["document"] == {"text": documents[line["index"]]}


def test_coheres_newer_route_cuts_documents(scores, folders):
    llm, long = LLM(folders[1]), "a longer document, which is cut"
    ids, places = llm.tokenizer.encode_offsets(long)
    assert len(ids) > 3
    wanted = llm.rerank("what is x", [long[: places[3][0]], "z"])
    body = {"query": "what is x", "documents": [long, "z"], "max_tokens_per_doc": 3}
    found = scores.post("/v2/rerank", body).json()["results"]
    given = {line["index"]: line["relevance_score"] for line in found}
    assert [given[0], given[1]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": [{"title": "y"}]}, "document"),
        ({"query": "x", "documents": [5]}, "documents"),
        ({"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
    ],
)
def test_what_cannot_be_scored_is_rejected_with_its_field(scores, body, param):
    found = scores.post("/v1/rerank", body)
    assert found.status_code == 400 and found.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_no_body_is_a_fault_of_ours(embeds, scores, path):
    rng = random.Random(path)
    server, whole = (embeds, EMBED) if path == "/v1/embeddings" else (scores, SCORE_BODY)
    for _ in range(150):
        body = whole
        for _ in range(rng.choice((1, 1, 2, 3))):
            body = mutated(body, rng)
        headers = {"content-type": "application/json"}
        found = server.http.post(path, content=json.dumps(body), headers=headers)
        assert found.status_code in (200, 400, 404), (body, found.text)


def test_a_model_does_only_what_it_was_made_for(embeds, scores):
    assert embeds.post("/v1/rerank", {"query": "x", "documents": ["y"]}).status_code == 501
    assert scores.post("/v1/embeddings", {"input": "x"}).status_code == 501
    for server in (embeds, scores):
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat)):
            found = server.post(path, body)
            assert found.status_code == 400 and "it writes none" in found.json()["error"]["message"]
        assert "it writes none" not in server.post("/tokenize", chat).text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = encoder_cases.write(tmp_path_factory.mktemp("encoder") / "embeds", "bert")
    write_modules(folder, pooling("mean_tokens", 60), NORMALIZE)
    with serving(lambda report: AsyncLLM(folder, max_num_seqs=4)) as server:
        yield server, LLM(folder)


def test_an_encoder_is_served(encoder):
    server, llm = encoder
    wanted = llm.embed(TEXTS)
    many = vectors(server.post("/v1/embeddings", {"input": TEXTS * 9}))
    np.testing.assert_allclose(many, np.tile(wanted, (9, 1)), atol=1e-6)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS)
    np.testing.assert_allclose([line.embedding for line in found.data], wanted, atol=1e-6)
    long = {"input": "x " * 500}
    found = server.post("/v1/embeddings", long)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input")
    cut = llm.embed(long["input"], truncate_prompt_tokens=20)
    found = server.post("/v1/embeddings", long | {"truncate_prompt_tokens": 20})
    np.testing.assert_allclose(vectors(found), cut, atol=1e-6)
    assert found.json()["usage"]["total_tokens"] == 20
    found = server.post("/v1/embeddings", long | {"truncate_prompt_tokens": 0})
    assert found.json()["error"]["param"] == "truncate_prompt_tokens"
    found = server.post("/v1/completions", {"prompt": "x"})
    assert found.status_code == 400 and "it writes none" in found.json()["error"]["message"]
    assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_a_cross_encoder_is_served(tmp_path):
    folder = encoder_cases.write(tmp_path / "scores", "xlm_roberta", scores=True)
    wanted = LLM(folder).rerank("what is x", TEXTS)
    with serving(lambda report: AsyncLLM(folder, max_num_seqs=2)) as server:
        body = {"query": "what is x", "documents": TEXTS}
        found = server.post("/v1/rerank", body).json()["results"]
        order = sorted(range(len(TEXTS)), key=lambda index: -wanted[index])
        assert [line["index"] for line in found] == order
        scores = [line["relevance_score"] for line in found]
        assert scores == pytest.approx(sorted(wanted, reverse=True), abs=1e-6)
        long = {"query": "x", "documents": ["y " * 500]}
        assert server.post("/v1/rerank", long).status_code == 400
        cut = server.post("/v1/rerank", long | {"truncate_prompt_tokens": -1})
        assert cut.status_code == 200 and cut.json()["usage"]["total_tokens"] == 120
