"""Protocol buffers of Tinker's API: read as its client writes them, malformed ones rejected."""

import contextlib
import random

import numpy as np
import pytest

from rooflax.rl.runs import Outcome
from rooflax.server.errors import ApiError
from rooflax.server.training import wire
from tests.support.server import tinker_bodies as bodies

DATA = [
    bodies.datum([1, 70000, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, -2.5]}),
    bodies.datum([5], {"target_tokens": [6], "logprobs": [-1.5], "advantages": [2.0]}),
]


def test_a_request_is_read_whole():
    body = bodies.forward_body("s:train:0", DATA, "ppo", settings={"clip_low_threshold": 0.7})
    found = wire.read_forward(body)
    assert (found.model_id, found.loss_fn) == ("s:train:0", "ppo")
    assert found.seq_id == next(bodies.numbers) - 1
    assert found.settings == {"clip_low_threshold": 0.7}
    assert not found.forward_only
    first, second = found.data
    assert first.tokens.tolist() == [1, 70000, 3]
    assert first.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert first.inputs["weights"].tolist() == [0.0, 1.0, -2.5]
    assert set(second.inputs) == {"target_tokens", "logprobs", "advantages"}
    assert wire.read_forward(bodies.forward_body("m", DATA, forward_only=True)).forward_only


def test_fields_that_are_not_known_are_skipped():
    more = bodies.field(99, b"x") + bodies.whole(98, 7) + bodies.varint(8 * 97 + 5) + b"abcd"
    found = wire.read_forward(more + bodies.forward_body("m", DATA) + more)
    assert len(found.data) == 2


def test_any_change_of_a_body_is_read_or_rejected():
    body = bodies.forward_body("m", DATA, settings={"beta": 0.5})
    draw = random.Random(0)
    for _ in range(3000):
        changed = bytearray(body)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        changed = bytes(changed[: draw.randint(0, len(changed))])
        with contextlib.suppress(ApiError):
            wire.read_forward(changed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bodies.field(3, bodies.field(1, bodies.field(2, b"png"))), "image or sound"),
        (bodies.field(3, bodies.field(1, bodies.field(1, bodies.field(1, b"abc")))), "ends within"),
        (
            bodies.field(
                3,
                bodies.field(
                    2, bodies.field(1, b"weights") + bodies.field(2, bodies.field(2, b""))
                ),
            ),
            "sparse",
        ),
        (
            bodies.field(
                3,
                bodies.field(
                    2,
                    bodies.field(1, b"weights")
                    + bodies.field(2, bodies.field(4, bytes([2, 3])) + bodies.whole(3, 1)),
                ),
            ),
            r"shape \[2, 3\]",
        ),
        (
            bodies.field(
                3,
                bodies.field(2, bodies.field(1, b"weights") + bodies.field(2, bodies.whole(3, 4))),
            ),
            "has the type 4",
        ),
        (
            bodies.field(7, bodies.field(1, b"k") + bodies.field(2, bodies.field(2, b"x"))),
            "is no number",
        ),
        (b"\x0b", "no protocol buffer"),
        (b"\x80" * 11, "no protocol buffer"),
    ],
)
def test_what_is_not_taken_is_named(body, message):
    with pytest.raises(ApiError, match=message):
        wire.read_forward(body)


def test_results_are_written_as_the_client_reads_them():
    rows = [np.array([-1.0, -2.5], np.float32), np.array([-0.5], np.float32)]
    loss, logprobs = bodies.outcome(wire.write_outcome(Outcome(4.0, rows)))
    assert loss == 4.0
    assert [each.tolist() for each in logprobs] == [[-1.0, -2.5], [-0.5]]
    samples = [wire.Sampled((1, 300), (-0.25, -3.0), is_stopped=True), wire.Sampled((), (), False)]
    found, prompt = bodies.samples(wire.write_samples(samples, [float("nan"), -2.0], 5))
    assert [(tokens, reason) for tokens, _, reason in found] == [([1, 300], 0), ([], 1)]
    assert found[0][1].tolist() == [-0.25, -3.0]
    assert np.isnan(prompt[0])
    assert prompt[1] == -2.0
    assert bodies.samples(wire.write_samples([], None, 0))[1] is None
