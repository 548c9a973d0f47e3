"""Tinker's routes over a running server: training, samples, errors, what a client may not do."""

import threading

import numpy as np
import pytest

from rooflax.llm import LLM
from rooflax.nn.execution import ExecutionOptions
from rooflax.rl.trainer import Trainer
from rooflax.server.run import ServerRunner
from rooflax.server.training.routes import PREFIX, make_training_app
from rooflax.server.training.service import TrainingEngine, TrainingService
from tests.support.server import tinker_bodies as bodies
from tests.support.server.live import serving

MODEL = "preset:qwen2.5-tiny"
ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def trains(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "runs"

    def load(_):
        options = ExecutionOptions(layers="unrolled")
        llm = LLM(MODEL, max_num_seqs=4, max_model_len=64, options=options, prefix_caching=False,
                  generation_config="none")  # fmt: skip
        return TrainingEngine(Trainer(llm, folder), MODEL)

    def make(settings, load):
        service = TrainingService(settings)
        return ServerRunner(settings, load, lambda _: None, service, make_training_app)

    with serving(load, make=make) as server:
        server.folder = folder
        yield server


def post(trains, path, body, status=200, **how):
    kind = {"content": body, "headers": PROTOBUF} if isinstance(body, bytes) else {"json": body}
    response = trains.http.post(f"{PREFIX}/{path}", **kind, **how)
    assert response.status_code == status, response.text
    return response.json()


def result(trains, promise):
    """What a request gave: JSON, or the bytes of a protocol buffer."""
    while True:
        response = trains.http.post(
            f"{PREFIX}/retrieve_future",
            json={"request_id": promise["request_id"], "allow_metadata_only": True},
        )
        if response.status_code != 408:
            break
        assert response.json()["type"] == "try_again"
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/x-protobuf":
        return response.content
    return response.json()


def ask(trains, path, body):
    return result(trains, post(trains, path, body))


@pytest.fixture
def session(trains):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    session_id = post(trains, "create_session", body)["session_id"]
    yield session_id
    post(trains, f"sessions/{session_id}/finish", {"status": "completed"})


@pytest.fixture
def run(trains, session):
    lora = {"rank": 3, "seed": 7, "train_mlp": True, "train_attn": True, "train_unembed": True}
    body = {
        "session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora,
        "optimizer_config": {"type": "adamw"}, "type": "create_model",
    }  # fmt: skip
    return ask(trains, "create_model", body)["model_id"]


def data(weight=1.0):
    ids = [5, 9, 3, 7, 11, 2]
    return [
        bodies.datum(ids, {"target_tokens": [*ids[1:], 4], "weights": [weight] * len(ids)}),
        bodies.datum([8], {"target_tokens": [1], "weights": [weight]}),
    ]


def step(trains, run):
    body = {"model_id": run, "adam_params": ADAM, "seq_id": next(bodies.numbers)}
    return ask(trains, "optim_step", body)


def sample_body(sampler, **changes):
    return {
        "sampling_session_id": sampler, "seq_id": next(bodies.numbers), "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 9, 3]}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
                            "seed": 3, "stop": []},
        "prompt_logprobs": True, "topk_prompt_logprobs": 0, "type": "sample",
    } | changes  # fmt: skip


def test_a_client_trains_saves_and_samples(trains, run, session):
    info = post(trains, "get_info", {"model_id": run, "type": "get_info"})
    assert (info["is_lora"], info["lora_rank"]) == (True, 3)
    assert info["model_data"]["tokenizer_id"] == MODEL
    losses = []
    for _ in range(4):
        loss, logprobs = bodies.outcome(
            ask(trains, "forward_backward", bodies.forward_body(run, data()))
        )
        assert [len(each) for each in logprobs] == [6, 1]
        assert loss == pytest.approx(-sum(each.sum() for each in logprobs), rel=1e-4)
        losses.append(loss)
        assert step(trains, run)["metrics"]["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True)
    saved = ask(trains, "save_weights", {"model_id": run, "path": "last", "overwrite": False})
    assert saved["path"] == f"tinker://{run}/weights/last"
    sampler = ask(
        trains, "save_weights_for_sampler", {"model_id": run, "sampling_session_seq_id": 0}
    )["sampling_session_id"]
    promise = post(trains, "asample", sample_body(sampler))
    assert len(promise["sample_sequence_ids"]) == 2
    found, prompt = bodies.samples(result(trains, promise))
    assert [len(tokens) for tokens, _, _ in found] == [5, 5]
    assert all(reason == 1 for _, _, reason in found)
    assert np.isnan(prompt).tolist() == [True, False, False]
    for tokens, logprobs, _ in found:
        ids = [5, 9, 3, *tokens]
        one = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        only = bodies.forward_body(run, [bodies.datum(ids[:-1], one)], forward_only=True)
        _, (trained,) = bodies.outcome(ask(trains, "forward_backward", only))
        np.testing.assert_allclose(trained[2:], logprobs, atol=1e-5)
        np.testing.assert_allclose(trained[:2], prompt[1:], atol=1e-5)
    body = {
        "session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True,
        "type": "load_weights",
    }  # fmt: skip
    again = ask(trains, "load_weights", body)["model_id"]
    assert again == f"{session}:train:1"
    forward = bodies.forward_body(again, data(), forward_only=True)
    loss, _ = bodies.outcome(ask(trains, "forward_backward", forward))
    forward = bodies.forward_body(run, data(), forward_only=True)
    assert loss == bodies.outcome(ask(trains, "forward_backward", forward))[0]


def test_samples_of_saved_weights_and_of_the_model_alone(trains, run, session):
    path = ask(trains, "save_weights_for_sampler", {"model_id": run, "path": "s"})["path"]
    found = []
    for number, given in enumerate(({"model_path": path}, {"base_model": MODEL})):
        body = {"session_id": session, "sampling_session_seq_id": 5 + number} | given
        made = post(trains, "create_sampling_session", body)["sampling_session_id"]
        assert trains.http.get(f"{PREFIX}/samplers/{made}").json()["sampler_id"] == made
        found.append(bodies.samples(ask(trains, "asample", sample_body(made)))[0])
    # B is zero before the first step, so that the adapter changes nothing.
    assert [tokens for tokens, _, _ in found[0]] == [tokens for tokens, _, _ in found[1]]


def test_stop_tokens_end_a_sample_and_are_in_it(trains, run, session):
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    made = post(trains, "create_sampling_session", body)["sampling_session_id"]
    params = {"max_tokens": 8, "temperature": 0.0, "stop": []}
    ((tokens, _, _),), _ = bodies.samples(
        ask(trains, "asample", sample_body(made, sampling_params=params, num_samples=1))
    )
    params["stop"] = [tokens[2]]
    ((cut, _, reason),), _ = bodies.samples(
        ask(trains, "asample", sample_body(made, sampling_params=params, num_samples=1))
    )
    assert cut == tokens[: tokens.index(tokens[2]) + 1]
    assert reason == 0


def test_requests_of_many_clients_at_once_are_answered_alike(trains, run):
    sampler = ask(
        trains, "save_weights_for_sampler", {"model_id": run, "sampling_session_seq_id": 9}
    )["sampling_session_id"]
    alone = bodies.samples(ask(trains, "asample", sample_body(sampler)))[0]
    answers = []

    def client():
        answers.append(bodies.samples(ask(trains, "asample", sample_body(sampler)))[0])

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[tokens for tokens, _, _ in one] for one in answers] == [
        [tokens for tokens, _, _ in alone]
    ] * 6


def test_requests_without_a_seed_differ(trains, run, session):
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    made = post(trains, "create_sampling_session", body)["sampling_session_id"]
    params = {"max_tokens": 8, "temperature": 1.0, "stop": []}
    drawn = {
        tuple(
            bodies.samples(ask(trains, "asample", sample_body(made, sampling_params=params)))[0][0][
                0
            ]
        )
        for _ in range(3)
    }
    assert len(drawn) == 3


def test_a_session_that_ended_is_gone(trains):
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    name = post(trains, "create_session", body)["session_id"]
    assert post(trains, "session_heartbeat", {"session_id": name}) == {"type": "session_heartbeat"}
    post(trains, f"sessions/{name}/finish", {})
    gone = post(trains, "session_heartbeat", {"session_id": name}, status=410)
    assert "it ended" in gone["error"]["message"]


def test_a_request_that_is_sent_again_counts_once(trains, run):
    """As clients do after a lost connection."""
    body = bodies.forward_body(run, data())
    first, again = (post(trains, "forward_backward", body) for _ in range(2))
    assert first == again
    norm = step(trains, run)["metrics"]["grad_norm"]
    ask(trains, "forward_backward", bodies.forward_body(run, data()))
    ask(trains, "forward_backward", bodies.forward_body(run, data()))
    assert step(trains, run)["metrics"]["grad_norm"] > 1.5 * norm
    sampled = sample_body(
        ask(trains, "save_weights_for_sampler", {"model_id": run, "sampling_session_seq_id": 3})[
            "sampling_session_id"
        ]
    )
    assert post(trains, "asample", sampled) == post(trains, "asample", sampled)


def test_an_error_is_the_clients_and_nobody_elses(trains, run):
    wrong = [bodies.datum([5, 9], {"target_tokens": [1, 10**9], "weights": [1.0, 1.0]})]
    bad = post(trains, "forward_backward", bodies.forward_body(run, wrong))
    good = post(trains, "forward_backward", bodies.forward_body(run, data()))
    failed = result(trains, bad)
    assert failed["category"] == "user"
    assert "no token id" in failed["error"]
    assert bodies.outcome(result(trains, good))[0] > 0
    failed = ask(trains, "save_weights", {"model_id": run, "path": "../x"})
    assert "no path of saved weights" in failed["error"]
    gone = post(trains, "retrieve_future", {"request_id": "nobody"}, status=410)
    assert gone["error"]["code"] == "request_unknown"


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("create_model", {"base_model": "other"}, "There is no model 'other'"),
        ("create_model", {"lora_config": None}, "lora_config is missing"),
        ("create_model", {"lora_config": {"rank": 0}}, "rank is 0"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, "this server has adamw"),
        ("create_model", {"session_id": "gone"}, "There is no session 'gone'"),
        ("create_model", {"surprise": 1}, "unknown field `surprise`"),
        ("create_model", {"model_seq_id": "x"}, "model_seq_id"),
        ("create_model", {"model_seq_id": -1}, "model_seq_id is -1"),
        ("asample", {"num_samples": 0}, "num_samples is 0"),
        ("asample", {"num_samples": 10**6}, "num_samples is 1000000"),
        ("asample", {"topk_sample_logprobs": 3}, "topk_sample_logprobs is given"),
        ("asample", {"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ("asample", {"sampling_session_id": "s:sample:1"}, "There is no session"),
        ("asample", {"prompt": {"chunks": [{"type": "image"}]}}, "image or sound"),
        ("asample", {"prompt": {"chunks": []}}, "prompt"),
        ("asample", {"prompt": {"chunks": [{"tokens": [-1]}]}}, "token"),
        ("asample", {"prompt": {"chunks": [{"tokens": [1] * 64}]}}, "64"),
        ("asample", {"sampling_params": {"top_p": 2.0}}, "top_p"),
        ("asample", {"sampling_params": {"seed": -1}}, "seed is -1"),
        ("optim_step", {"adam_params": {"beta3": 1.0}}, "beta3"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate is -1"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "AdamW"),
        ("optim_step", {"model_id": "nobody:train:0"}, "There is no session"),
        ("save_weights_for_sampler", {"kind": "inflight"}, "this server has snapshot"),
        ("save_weights_for_sampler", {"path": None}, "sampling_session_seq_id"),
        ("save_weights", {"path": None}, "path is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_at_once(trains, run, session, path, changes, message):
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    given = {
        "create_model": {"session_id": session, "model_seq_id": 3, "base_model": MODEL,
                         "lora_config": {"rank": 2}},
        "optim_step": {"model_id": run, "adam_params": ADAM},
        "save_weights": {"model_id": run, "path": "x"},
        "save_weights_for_sampler": {"model_id": run, "path": "x"},
        "asample": {},
    }[path]  # fmt: skip
    if path == "asample":
        made = post(trains, "create_sampling_session", sampler)["sampling_session_id"]
        given = sample_body(made)
    error = post(trains, path, given | changes, status=400)["error"]
    assert message in error["message"]


def test_bodies_that_are_no_protocol_buffers(trains, run):
    whole = bodies.forward_body(run, data())
    for cut in range(0, len(whole) - 1, 7):
        response = trains.http.post(
            f"{PREFIX}/forward_backward", content=whole[:cut], headers=PROTOBUF
        )
        assert response.status_code in (200, 400), cut
    assert post(trains, "forward_backward", b"\xff" * 40, status=400)["error"]["code"] == (
        "invalid_protobuf"
    )
    post(trains, "forward_backward", {"model_id": run}, status=415)


def test_routes_that_it_does_not_have(trains):
    for path in ("/v1/chat/completions", "/api/v1/create_custom_loss"):
        assert trains.http.post(path, json={}).status_code == 404
    assert trains.http.get(f"{PREFIX}/healthz").json() == {"status": "ok"}
    assert trains.http.get("/health").status_code == 200
    (model,) = trains.http.get(f"{PREFIX}/get_server_capabilities").json()["supported_models"]
    assert model["model_name"] == MODEL
    config = post(trains, "client/config", {"sdk_version": "0.38.0"})
    assert config["fwdbwd_max_chunk_bytes_count"] < trains.service.settings.max_body_bytes
    assert config["parallel_fwdbwd_chunks"] is False
