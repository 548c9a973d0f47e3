"""The simulator of replicas: no request is lost, steps cost what was measured."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from tools import simulate
from tools.simulate import MIXES, Costs, Replica, best_split, evaluate, figures, requests

SHORT = {name: replace(mix, seconds=16.0) for name, mix in MIXES.items()}


def test_steps_cost_what_was_measured():
    costs = Costs()
    assert costs.decode(1, 0) - costs.dispatch_s == pytest.approx(4.93e-3)
    assert costs.decode(1, 0, 8) == pytest.approx(costs.dispatch_s + 8 * 4.93e-3)
    assert costs.step(512, 0, 512 * 2048) == pytest.approx(18.7e-3, rel=1e-3)
    assert costs.step(4096, 0, 4096 * 2048) == pytest.approx(122.9e-3, rel=1e-3)
    layers, rows = 32, 8
    one_layer = costs.context_s * rows * 8192 / layers
    assert 1e6 * one_layer == pytest.approx(74.6 - 8.95, rel=0.01)
    assert costs.tokens(320) == pytest.approx((8.49e-3 + 16.96e-3) / 2)


@pytest.mark.parametrize("kind", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("rate", "count"), [(2, 200), (60, 500)])
def test_every_request_ends_or_is_refused(kind, rate, count):
    jobs = list(islice(requests(SHORT["agents"], rate), count))
    assert jobs == sorted(jobs) and jobs == list(islice(requests(SHORT["agents"], rate), count))
    replica = Replica(Costs(), 512, kind=kind, transfer_s=1e-6)
    seen = replica.run(jobs)
    assert seen.offered == len(jobs) == seen.finished + seen.refused
    assert (seen.refused > 0) == (rate == 60 and kind != "decode")
    if not seen.refused and kind != "prefill":
        tokens = sum(job.answer for job in jobs)
        first = len(seen.ttft_s) if kind == "both" else 0
        short = sum(job.answer == 1 for job in jobs) if kind == "decode" else 0
        begun = len(jobs) if kind == "decode" else 0
        assert first + len(seen.gaps_s) + seen.num_zero + begun == tokens + short
    assert replica.scheduler.blocks.num_used == [0]
    assert all(gap > 0 for gap in seen.gaps_s) and all(wait > 0 for wait in seen.ttft_s)


def test_a_conversations_next_request_begins_with_the_one_before():
    sessions: dict = {}
    for job in requests(SHORT["agents"], 8):
        sessions.setdefault(job.session, []).append(job)
    jobs = next(jobs for jobs in sessions.values() if len(jobs) > 1)
    before, after = jobs[:2]
    length = before.shared + before.own + before.answer
    assert after.ids(0, length) == before.ids(0, length)
    assert after.shared + after.own > length


def test_routing_by_prefixes_finds_at_least_as_many_as_round_robin():
    def run(policy):
        return evaluate(SHORT["chat"], 4, 8, policy, budget=512)

    aware, robin = run("prefix aware"), run("round robin")
    assert aware["hits"] > robin["hits"]
    assert aware == run("prefix aware")


def test_weights_of_replicas_count():
    few, many = simulate.Seen(ttft_s=[1.0] * 10), simulate.Seen(ttft_s=[2.0] * 10)
    assert figures([(few, 1), (many, 3)])["ttft_p50_s"] == 2.0
    assert figures([(few, 3), (many, 1)])["ttft_p50_s"] == 1.0


def test_the_best_split_by_hand():
    assert best_split(8, 10, 10) == (4, 40)
    assert best_split(8, 30, 10) == (2, 60)


def test_the_page_has_the_figures():
    page = simulate.PAGE.read_text(encoding="utf-8")
    document = json.loads(simulate.FIGURES.read_text(encoding="utf-8"))
    assert simulate.page_with_figures(page, document) == page
