"""What the tools say of GPU programs: of machine code, of HLO, of a step's time; and docs/gpu.md's
tables are the committed ones."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.product.snippets import ROOT
from tools import gpu_estimate, gpu_speed, hlo, sass
from tools.gpu_speed import Law, Work


def code(*lines):
    """Of instructions and labels, as nvdisasm prints them."""
    text = [line if line.startswith(".L") else f"  /*0010*/  {line} ;" for line in lines]
    return sass.Code.parsed("\n".join(text))


WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR7], R11", "@!P1 BRA `(.L_x_9)"
PRODUCTS = ("WARPGROUP.ARRIVE", "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0")
DONE = ("WARPGROUP.DEPBAR.LE gsb0, 0x0",)
COPY = "SYNCS.ARRIVE.TRANS64 RZ, [UR9], R8", "@UP0 UTMALDG.4D [UR8], [UR16]"
MEET, MEET_OF_TWO = ("BAR.SYNC.DEFER_BLOCKING 0x1, 0x80",), ("BAR.SYNC.DEFER_BLOCKING R5, 0x80",)
FREE = ("@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR8], RZ",)
LOOPS = {
    "one warpgroup": [WAIT, PRODUCTS, DONE, MEET, COPY],
    "which copies ahead": [COPY, WAIT, PRODUCTS, DONE, MEET],
    "two warpgroups": [WAIT, ("LDS.64 R8, [R9]",), PRODUCTS, DONE, FREE, WAIT, MEET_OF_TWO, COPY],
}


def loop(parts):
    inner = [line for part in parts for line in part]
    return code(".L_x_5:", *["IADD3 R1, R2, R3, RZ"] * 4, *inner, "@P2 BRA `(.L_x_5)", "EXIT")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_waits_and_every_loop_that_does_not(name):
    parts = LOOPS[name]
    assert loop(parts).unawaited() == 0 and loop(parts).overlooked() == []
    for at, part in enumerate(parts):
        if part in (WAIT, DONE, FREE) or (part == MEET and FREE not in parts):
            assert loop(parts[:at] + parts[at + 1 :]).unawaited()


def test_a_wait_that_leaves_too_many_products_or_comes_too_late():
    late = ("WARPGROUP.DEPBAR.LE gsb0, 0x2",)
    assert loop([WAIT, PRODUCTS, late, MEET, COPY]).unawaited()
    assert loop([WAIT, PRODUCTS, MEET, DONE, COPY]).unawaited()
    assert loop([WAIT, PRODUCTS, FREE, DONE, WAIT, MEET_OF_TWO, COPY]).unawaited()
    assert loop(
        [WAIT, PRODUCTS, DONE, FREE, ("LDS R8, [R9]",), WAIT, MEET_OF_TWO, COPY]
    ).unawaited()
    never = ("@!PT LDS RZ, [RZ]",)  # is not run
    assert not loop([WAIT, PRODUCTS, DONE, FREE, never, WAIT, MEET_OF_TWO, COPY]).unawaited()


def test_what_the_check_would_not_miss_is_said():
    assert code(*PRODUCTS, *COPY, "EXIT").overlooked() == ["a loop"]
    assert code(*COPY, *WAIT, *PRODUCTS, "EXIT").overlooked() == []  # nothing is filled again
    assert loop([WAIT, WAIT, PRODUCTS, DONE, MEET, COPY]).overlooked() == ["barrier", "barrier"]


def test_instructions_a_weight_are_those_of_the_innermost_loop_that_multiplies():
    """Labels, predicates and what does nothing are no instructions; a loop that multiplies twice a
    turn is unrolled."""
    inner = [".L_x_2:", *["LOP3.LUT R1, R2, R3, RZ"] * 9, "@P0 IDP.4A.S8.S8 R1, R2, R3, R4"]
    inner += ["IDP.4A.S8.S8 R1, R2, R3, R4", "NOP", "@P1 BRA `(.L_x_2)"]
    found = code(".L_x_1:", "IDP.4A.S8.S8 R1, R2, R3, R4", *inner, "@P2 BRA `(.L_x_1)", "EXIT")
    assert [i.kind for i in found.hot_loop()] == ["LOP3"] * 9 + ["IDP"] * 2 + ["BRA"]
    assert sass.per_weight(found, 2, 1) == 12 / (2 * 2)
    assert sass.per_weight(found, 2, 2) == 12 / 2
    assert found.counts()["IDP"] == 3
    assert sass.per_weight(code("EXIT"), 2, 1) is None


HLO = """HloModule jit_step

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

%nothing_asked (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
}

%asked (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %s = f32[4]{0} sort(%p), dimensions={0}, to_apply=%compare
}

%each (t: (f32[4])) -> (f32[4]) {
  %t = (f32[4]{0}) parameter(0)
  %p = f32[4]{0} get-tuple-element(%t), index=0
  %c = f32[4]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
  %q = f32[4]{0} conditional(%w, %c, %c), BRANCHES
  %i = (f32[4]{0}, f32[4]{0}) all-reduce-start(%q), to_apply=%compare
  %j = f32[4]{0} all-reduce-done(%i)
  ROOT %r = (f32[4]{0}) tuple(%j)
}

%again (t: (f32[4])) -> pred[] {
  %t = (f32[4]{0}) parameter(0)
  ROOT %f = pred[] fusion(%t), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[4]) -> (f32[4]) {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} copy(%x)
  %z = (f32[4]{0}) tuple(%y)
  ROOT %l = (f32[4]{0}) while(%z), condition=%again, body=%each
}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "true_computation=%asked, false_computation=%nothing_asked",
        "branch_computations={%nothing_asked, %asked}",
    ],
)
def test_launches_of_a_step(branches):
    """Where nothing is asked, also if that takes more launches: 2 fusions, not one sort."""
    text = HLO.replace("BRANCHES", branches)
    step = {"mosaic_gpu_v2": 1, "conditional": 1, "all-reduce-start": 1, "fusion": 1 + 2}
    assert hlo.launches(text, "decode") == step
    assert hlo.launches(text, "prefill") == {**step, "copy": 1}
    assert hlo.launches(text, "decode", asked=True) == step


def test_launches_at_most():
    branches = "branch_computations={%asked, %nothing_asked}"
    text = HLO.replace("BRANCHES", branches)
    assert hlo.launches(text, "decode")["sort"] == 1
    assert hlo.launches(text, "decode", asked=True)["sort"] == 0


SPILLING = """
import sys
from pathlib import Path
import gpu_work
said = "0 bytes stack frame, 8 bytes spill stores\\nUsed 40 registers\\n"
said += "//--------------------- .text.a_mosaic\\n  /*0010*/  EXIT ;\\n"
text = "ENTRY %main (x: f32[4]) -> f32[4] {\\n  ROOT %x = f32[4]{0} parameter(0)\\n}\\n"
gpu_work.recorded = lambda *_: ([], said, text)
gpu_work.every = lambda: [gpu_work.Case("spills", None, (), lambda _: None)]
gpu_work.WORK = Path(sys.argv.pop())
sys.exit(gpu_work.main())
"""


def test_a_kernel_that_spills_is_no_work_of_the_law(tmp_path):
    """In a process of its own: the module says to dispatch that there is a GPU."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")])}
    command = [sys.executable, "-c", SPILLING, str(tmp_path / "work.json")]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert "WRONG spills: 8 bytes of registers are spilled" in done.stdout, done.stderr
    assert done.returncode == 1


def test_every_measured_kernel_is_within_the_law():
    """Of both runs of the card; a law that is a fifth slower is not."""
    rows = gpu_speed.measured()
    assert len(rows) >= 55 and {row.run for row in rows} == {"first", "second"}
    assert gpu_speed.outside(rows, gpu_speed.LAW) == []
    slower = replace(gpu_speed.LAW, bytes_per_us=gpu_speed.LAW.bytes_per_us / 1.5)
    assert "linear bfloat16 rows 1" in gpu_speed.outside(rows, slower)


LAW = Law(
    launch=3.0, other=2.0, bytes_per_us=1e6, issue=1.0, access=3.0, alone=0.5, latency=1.0,
    product=0.25, together=0.5, overlap=1.0,
)  # fmt: skip
CYCLE = 1e6 / gpu_speed.CYCLES_PER_S


def test_what_the_law_says_of_a_stream_and_of_waves():
    """10 MB; then three waves of one program a multiprocessor, whose warps wait for memory."""
    assert LAW.seconds([Work(132, 4, 1, nbytes=1e7)], 1) == pytest.approx(15e-6)
    waits = Work(132 * 2 + 1, 4, 1, turns=5, body=100, loads=2)
    each = 5 * (100 * CYCLE / 0.5 + 2)
    assert LAW.kernel(waits) == pytest.approx(3 + 3 * each)
    one = Work(132 * 8, 4, 8, turns=5, body=100, slow=10, accesses=2)  # eight warps a scheduler
    assert LAW.kernel(one) == pytest.approx(3 + 5 * 8 * (100 + 10 + 3 * 2) * CYCLE)
    assert LAW.kernel(replace(one, head=50)) == pytest.approx(LAW.kernel(one) + 8 * 50 * CYCLE)


def test_tensor_cores_and_instructions_overlap_by_a_share():
    flops = 1e-6 * gpu_speed.FLOPS_PER_S / gpu_speed.MULTIPROCESSORS  # a microsecond
    work = Work(132, 32, 1, turns=2, body=100, waits=1, flops=flops)
    issue = 8 * 100 * CYCLE
    busy = 2 * (1 + 0.5 * issue) + 2 * 0.25 / 8  # warpgroups wait in turn
    assert LAW.kernel(work) == pytest.approx(3 + busy)


def test_a_fit_finds_a_constant_again():
    rows = gpu_speed.measured()
    moved = replace(gpu_speed.LAW, bytes_per_us=gpu_speed.LAW.bytes_per_us * 1.4)
    assert gpu_speed.outside(rows, moved)
    assert gpu_speed.outside(rows, gpu_speed.fit(rows, moved)) == []


def test_a_law_of_the_first_run_misses_three_kernels_of_the_second():
    """As docs/gpu.md says; matmuls and experts are within."""
    rows = gpu_speed.measured()
    law, second = gpu_speed.of_first_run(rows), [row for row in rows if row.run == "second"]
    shares = {row.name: row.fitted(law) / row.us for row in second}
    assert len(shares) == 19
    assert {name: shares[name] for name in gpu_speed.outside(second, law)} == {
        "attention bfloat16 head 128 queries 1": pytest.approx(1.33, abs=0.02),
        "attention bfloat16 head 64 queries 1 window 128": pytest.approx(1.23, abs=0.03),
        "decode step head 128": pytest.approx(0.75, abs=0.02),
    }


def table():
    """Six launches a layer and ten besides, two instructions a weight."""
    models = gpu_estimate.MODELS
    kernels = {model.kernel: {"per_weight": 2.0} for model in models}
    return {
        "kernels": kernels,
        "steps": {model.step: {"launches": 6, "besides": 10} for model in models},
    }


def test_a_step_reads_multiplies_and_launches():
    """7.5e9 weights of bfloat16: 15 GB of the law's stream, less at 33.5e12 instructions a second,
    and 202 of its launches."""
    _, _, bf16, *_ = gpu_estimate.of_one_row(table())
    law = gpu_speed.LAW
    reads, multiplies = 15e3 / law.bytes_per_us, 15e9 / (132 * 128 * 1.98e9)
    launches = 32 * 6 + 10
    total = reads + launches * 1e-6 * law.launch
    room = (reads / 0.75 - reads) / (1e-6 * law.launch)
    cells = [f"{reads * 1e3:.2f} ms", f"{multiplies * 1e3:.2f} ms", f"{launches}"]
    cells += [f"{total * 1e3:.2f} ms", f"{reads / total:.0%}", "75%", f"{room:.0f}"]
    assert bf16.split(" | ")[1:] == [*cells[:-1], f"{cells[-1]} |"]
