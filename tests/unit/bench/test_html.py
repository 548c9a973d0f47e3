"""The page of a document: which plots it has, and that it trusts nothing and needs nothing."""

import copy
import html.parser
import json
import re
import sys
from pathlib import Path

import pytest

from rooflax.bench.html import page, write_page
from rooflax.bench.plots import labels, plots
from rooflax.bench.report import ablation_cells
from rooflax.errors import RequestError
from rooflax.nn.execution import gib

pytest.importorskip("matplotlib")

DATA = Path(__file__).parents[2] / "data" / "bench"
ALWAYS = {"decode-trials", "prefill-trials", "roofline", "memory"}
BY_BATCH = {"decode-batch", "prefill-batch"}
BY_PROMPT = {"decode-prompt_tokens", "prefill-prompt_tokens"}
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
OUTSIDE = ("src=", "<link", "<script", "@import", "@font-face", "<iframe", "<object", "<image")


@pytest.fixture(scope="module")
def rows():
    """Batches 1 and 2, prompts of 32 and 128 tokens."""
    return json.loads((DATA / "rows.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ablated():
    return json.loads((DATA / "ablation.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages(rows, ablated):
    return page(rows), page(ablated)


class Reader(html.parser.HTMLParser):
    """Tags that stay open, every id, and what is said."""

    VOID = ("meta", "path", "use", "rect")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.said = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def shown(document):
    return {plot.name for plot in plots(document)}


def subset(document, *indices):
    return document | {"results": [document["results"][i] for i in indices]}


def test_nothing_comes_from_elsewhere(pages):
    for text in pages:
        assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= NAMESPACES
        assert not any(word in text for word in OUTSIDE)
        assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_it_is_well_formed_and_ids_are_unique(pages):
    for text in pages:
        reader = Reader(text)
        assert reader.open == []
        assert len(reader.ids) == len(set(reader.ids))
        used = re.findall(r'href="#([^"]*)"', text) + re.findall(r"url\(#([^)]*)\)", text)
        assert used
        assert set(used) <= set(reader.ids)


def test_the_figures_are_there(rows, pages):
    said = "\n".join(Reader(pages[0]).said)
    for row in rows["results"]:
        for phase in ("prefill", "decode"):
            speed = row[f"{phase}_tok_per_s"]
            assert f"{speed['mean']:,.1f} ± {speed['std']:,.1f}" in said
            assert f"{row[f'{phase}_roofline']:.1%}" in said
        assert gib(row["weights_bytes"]) in said
        assert gib(row["memory"]["temporary_bytes"]) in said
        assert gib(row["peak_rss_bytes"]) in said
        assert all(warning in said for warning in row["warnings"])
    assert rows["environment"]["cpu"] in said
    assert rows["environment"]["date"] in said


def test_an_ablation_is_there(ablated, pages):
    said = "\n".join(Reader(pages[1]).said)
    assert all(cell in said for row in ablation_cells(ablated["ablation"]) for cell in row)


def test_the_cost_of_determinism_is_said(rows):
    changed = copy.deepcopy(subset(rows, 0))
    changed["results"][0]["deterministic_over_plain"] = {"ratio": 0.8125}
    said = "\n".join(Reader(page(changed)).said)
    assert "deterministic decode is 0.812x the plain one's speed" in said


def test_a_device_has_a_peak_of_its_own(rows, pages):
    assert "peak on device" not in pages[0]
    changed = copy.deepcopy(subset(rows, 0))
    changed["results"][0] |= {"peak_device_bytes": 5 << 30, "peak_rss_bytes": None}
    text = page(changed)
    assert "the device&#x27;s peak" in text
    assert "<td>5.00 GiB</td>" in text
    assert "peak RSS" not in text


def test_names_are_only_text(rows):
    hostile = "<script>alert(1)</script>\"'&amp; $x_{$ \\frac"
    changed = copy.deepcopy(rows)
    changed["results"][0]["model"] = hostile
    changed["results"][1]["warnings"] = [hostile]
    changed["results"][2]["format"] = hostile  # an axis label
    changed["environment"]["cpu"] = hostile
    text = page(changed)
    assert "<script" not in text
    reader = Reader(text)
    assert reader.open == []
    assert sum(hostile in said for said in reader.said) >= 4


def test_hostile_settings_are_only_text(ablated):
    changed = copy.deepcopy(ablated)
    changed["ablation"][1]["label"] = "$\\frac{<script>$</text>"
    text = page(changed)
    assert "<script" not in text
    assert Reader(text).open == []


def test_the_same_document_gives_the_same_bytes(rows, ablated, pages, tmp_path):
    for document, text in zip((rows, ablated), pages, strict=True):
        before = copy.deepcopy(document)
        write_page(tmp_path / "page.html", document)
        assert (tmp_path / "page.html").read_bytes() == text.encode("utf-8")
        assert document == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_plots_that_have_something_to_show(rows, ablated, monkeypatch):
    monkeypatch.setattr("rooflax.bench.plots._svg", lambda figure, name: "")  # to be quick
    assert shown(rows) == ALWAYS | BY_BATCH | BY_PROMPT
    assert shown(ablated) == ALWAYS | {"ablation"}
    by = {(r["batch"], r["prompt_tokens"]): i for i, r in enumerate(rows["results"])}
    assert shown(subset(rows, by[1, 32], by[2, 32])) == ALWAYS | BY_BATCH
    assert shown(subset(rows, by[1, 32], by[1, 128])) == ALWAYS | BY_PROMPT
    assert shown(subset(rows, by[1, 32])) == ALWAYS
    # Two points that differ in more than the axis are no curve.
    assert shown(subset(rows, by[1, 32], by[2, 128])) == ALWAYS


def test_one_trial_has_no_distribution(rows):
    single = copy.deepcopy(subset(rows, 0))
    for speed in ("prefill_tok_per_s", "decode_tok_per_s"):
        single["results"][0][speed]["trials"] = [1.0]
    assert shown(single) == {"roofline", "memory"}


def test_ratios_stand_at_the_bars(ablated):
    found = {plot.name: plot.svg for plot in plots(ablated)}["ablation"]
    for row in ablated["ablation"]:
        assert f">{row['label']}</text>" in found
    assert ">1x</text>" in found
    last = ablated["ablation"][-1]
    assert f"{last['ratio']:.3g}x ({last['total_ratio']:.3g}x in all)" in found


def test_labels_say_what_differs(rows):
    assert labels(rows["results"])[-1] == "batch 2, prompt 128"
    assert labels(rows["results"], without="batch")[-1] == "prompt 128"
    assert labels(rows["results"][:1]) == ["batch 1, prompt 32"]
    first = rows["results"][0]
    changed = first | {"options": first["options"] | {"gqa": "repeat"}}
    assert labels([changed, first]) == ["gqa=repeat", "default"]


def test_many_rows(rows):
    """More than there are colours."""
    several = [{**row, "format": name} for name in "abcdef" for row in rows["results"]]
    assert shown(rows | {"results": several}) == ALWAYS | BY_BATCH | BY_PROMPT


def test_no_folder(rows, tmp_path):
    with pytest.raises(RequestError, match=r"there is no folder .*missing; make it$"):
        write_page(tmp_path / "missing" / "page.html", rows)


def test_a_failure_keeps_the_old_page(rows, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_page(path, subset(rows, 0))
    assert path.read_text(encoding="utf-8") == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]


def test_without_matplotlib(rows, tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match="not installed: pip install matplotlib$"):
        write_page(tmp_path / "page.html", rows)
    assert list(tmp_path.iterdir()) == []
