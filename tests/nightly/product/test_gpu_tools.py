"""What the tools say of GPU programs: of machine code, of HLO, of a step's time; and docs/gpu.md's
tables are the committed ones."""

import pytest

from tools import gpu_estimate, hlo, sass


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


def table():
    """Six launches a layer and ten besides, two instructions a weight."""
    models = gpu_estimate.MODELS
    kernels = {model.kernel: {"per_weight": 2.0} for model in models}
    return {
        "kernels": kernels,
        "steps": {model.step: {"launches": 6, "besides": 10} for model in models},
    }


def test_a_step_reads_multiplies_and_launches():
    """7.5e9 weights of bfloat16: 15 GB at 3.53 TB/s, less at 33.5e12 instructions a second, and 202
    launches of 3.06 us."""
    _, _, bf16, *_ = gpu_estimate.of_one_row(table())
    reads, multiplies = 15e9 / 3.53e12, 15e9 / (132 * 128 * 1.98e9)
    launches = 32 * 6 + 10
    total = reads + launches * 3.06e-6
    room = (reads / 0.75 - reads) / 3.06e-6
    cells = [f"{reads * 1e3:.2f} ms", f"{multiplies * 1e3:.2f} ms", f"{launches}"]
    cells += [f"{total * 1e3:.2f} ms", f"{reads / total:.0%}", "75%", f"{room:.0f}"]
    assert bf16.split(" | ")[1:] == [*cells[:-1], f"{cells[-1]} |"]
