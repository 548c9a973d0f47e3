"""The worker of training requests: order, batches, failures that stay apart, what is kept."""

import asyncio
import threading

import pytest

from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.server.errors import ApiError
from rooflax.server.training import work as module
from rooflax.server.training.work import Task, Work


class Sampler:
    """Stands for a trainer: gives back each request's ids; a batch with 13 in it fails whole."""

    def __init__(self):
        self.batches, self.may_begin = [], threading.Event()

    def sample(self, model, requests):
        self.may_begin.wait(30)
        self.batches.append(len(requests))
        if any(13 in ids for ids, _ in requests):
            raise RequestError("13 does not fit.")
        return [[ids] for ids, _ in requests]


@pytest.fixture
def worker():
    sampler = Sampler()
    made = Work(sampler)
    made.sampler = sampler
    yield made
    sampler.may_begin.set()
    made.end()


def task(number, model="m", make=lambda group: {"ids": group[0]}, **more):
    return Task(sample=(model, [number], SamplingParams(), make), **more)


def result(worker, request_id):
    return asyncio.run(worker.result(request_id, 30.0))


def test_samples_of_one_sampler_run_together_and_fail_alone(worker):
    def fails(group):
        raise RequestError("its logits are not finite.")

    first = worker.submit(task(0))  # is being done, while the others come
    ids = [worker.submit(task(n)) for n in (1, 13, 2)]
    broken, other = worker.submit(task(3, make=fails)), worker.submit(task(4, model="n"))
    worker.sampler.may_begin.set()
    assert [result(worker, each) for each in (first, ids[0], ids[2], other)] == [
        {"ids": [n]} for n in (0, 1, 2, 4)
    ]
    with pytest.raises(RequestError, match="13 does not fit"):
        result(worker, ids[1])
    with pytest.raises(RequestError, match="not finite"):
        result(worker, broken)
    assert worker.sampler.batches in ([1, 4, 1, 1, 1, 1, 1], [5, 1, 1, 1, 1, 1, 1])


def test_the_same_request_again_is_one(worker):
    worker.sampler.may_begin.set()
    first, again, other = (worker.submit(task(5, key=("s", n))) for n in (1, 1, 2))
    assert first == again != other
    assert result(worker, first) == result(worker, first)


def test_what_waits_is_bounded(worker, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    worker.submit(task(1))  # is being done
    worker.submit(Task(dict, num_bytes=60))
    with pytest.raises(ApiError) as caught:
        worker.submit(Task(dict, num_bytes=60))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    with pytest.raises(ApiError) as caught:
        result(worker, "nobody")
    assert caught.value.status == 410


def test_who_stops_waiting_leaves_the_result_to_others(worker):
    request_id = worker.submit(task(7))
    assert asyncio.run(worker.result(request_id, 0.05)) is None
    worker.sampler.may_begin.set()
    assert result(worker, request_id) == {"ids": [7]}


def test_at_the_end_what_waits_fails(worker):
    worker.submit(task(1))
    waiting = worker.submit(Task(dict))
    threading.Timer(0.2, worker.sampler.may_begin.set).start()
    worker.end()
    with pytest.raises(RequestError, match="was stopped"):
        result(worker, waiting)
