"""What is read out of a compiled program: buffers at the peak, FLOP and bytes with loops in full."""

import made
import pytest

from cutloss.evidence import buffers, early, facts, roofline
from cutloss.jax import hlo


REPORT = "Memory Space: default (color=0)\nTotal bytes: 22934454272 (21.36GiB)\n  cumulative_size;\n\nMemory Space: vmem (color=1)\nTotal bytes: 7 (7B)\n"
ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_max.5 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <3 p.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 2: size 100, maybe-live-out:
 value: <4 result @0> (size=100,offset=0): f32[25]{0}
allocation 3: size 12288, preallocated-temp:
 value: <5 wide @0> (size=8192,offset=0): f32[2048]{0:T(1024)}
 value: <6 big.1{0} @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
 value: <7 big.2 @0> (size=4096,offset=4096): f32[1024]{0:T(1024)}
 value: <8 big.3 @0> (size=4096,offset=8192): f32[1024]{0:T(1024)}
allocation 4: size 1000000, color 1, preallocated-temp:
 value: <9 tile @1> (size=1000000,offset=0): f32[250000]{0:T(1024)S(1)}
"""
RANGES = """HloLiveRange (max 20):
  InstructionSequence:
    0:p.1
  BufferLiveRange:
    p.1{}:0-20
    wide{}:2-5
    big.1{0}:6-9
    big.2{}:8-12
    big.3{}:9-9
    tile{}:0-20
"""
TEXT = """
ENTRY %main (p: f32[2]) -> f32[2] {
  %big.1 = (f32[1024]{0}, f32[]) fusion(%a), metadata={op_name="jit(_train_step)/transpose(jvp(layers_3))/mlp/dot_general"}
  %big.2 = f32[1024]{0} add(%a, %b), metadata={op_name="jit(_train_step)/transpose(jvp(layers_17))/mlp/dot_general"}
  %wide = f32[2048]{0} add(%a, %b), metadata={op_name="jit(_train_step)/jvp(embedder)/mul"}
}
"""


def written(folder, assignment=ASSIGNMENT, ranges=RANGES):
    for name, text in (("memory-usage-report", REPORT), ("buffer-assignment", assignment), ("live-range", ranges)):
        (folder / f"module_0001.jit__train_step.cl_9.after_optimizations-{name}.txt").write_text(text)
    return folder


def test_only_what_is_alive_at_the_peak_is_listed(tmp_path):
    found = buffers.of(written(tmp_path), TEXT)
    # big.1, big.2 and big.3 at 9 are 12288 bytes; wide is gone by then, tile is on the chip.
    assert [(row["bytes"], row["count"], row["array"]) for row in found["largest"]] == [(8192, 2, "f32[1024]"), (4096, 1, "f32[1024]")]
    assert found["largest"][0]["of"] == "gradient: layers/mlp/dot_general" and found["largest"][1]["of"] == "big"
    assert found["kinds"] == {"parameter": 4096, "maybe-live-out": 100, "preallocated-temp": 12288}
    assert found["total_bytes"] == 22934454272


def test_a_copy_is_of_what_it_copies():
    text = TEXT.replace("}\n", "  %c.1 = (f32[2048], f32[2048]) copy-start(%wide)\n  %c.2 = f32[2048] copy-done(%c.1)\n}\n")
    assert buffers.parts_of(text)["c.2"] == "embedder/mul"
    assert buffers.part_of("jit(_train_step)/transpose(jvp(jit(log_softmax)))/add_any") == "gradient: log_softmax/add_any"


def test_a_range_ends_after_its_last_use(tmp_path):
    ranges = RANGES.replace("big.1{0}:6-9", "big.1{0}:5-5").replace("big.3{}:9-9", "big.3{}:5-5")
    found = buffers.of(written(tmp_path, ranges=ranges), TEXT)
    assert sum(row["bytes"] for row in found["largest"]) == 8192 + 4096 + 4096


def test_what_xla_did_not_write_is_left_out(tmp_path):
    assert buffers.of(tmp_path) == {"largest": []}
    assert buffers.of(written(tmp_path, ranges="?"))["largest"] == []


def test_the_newest_program_counts(tmp_path):
    import os

    written(tmp_path)
    old = tmp_path / "module_0000.jit__train_step.cl_9.after_optimizations-memory-usage-report.txt"
    old.write_text(REPORT.replace("22934454272", "1"))
    os.utime(old, (1, 1))
    assert buffers.of(tmp_path)["total_bytes"] == 22934454272


LOOP = """HloModule jit_step, num_partitions=1

%body (arg: (s32[], f32[4096,64])) -> (s32[], f32[4096,64]) {
  %arg = (s32[], f32[4096,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %table = f32[4096,64]{1,0} get-tuple-element(%arg), index=1
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %tile = f32[256,64]{1,0} dynamic-slice(%table, %i, %zero), dynamic_slice_sizes={256,64}
  %logits = f32[256,256]{1,0:S(1)} dot(%tile, %tile), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[4096,64]{1,0}) tuple(%next, %table)
}

%condition (arg: (s32[], f32[4096,64])) -> pred[] {
  %arg.1 = (s32[], f32[4096,64]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %limit = s32[] constant(16)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[4096,64]) -> f32[4096,64] {
  %p = f32[4096,64]{1,0} parameter(0)
  %start = s32[] constant(0)
  %carry = (s32[], f32[4096,64]{1,0}) tuple(%start, %p)
  %loop = (s32[], f32[4096,64]{1,0}) while(%carry), condition=%condition, body=%body
  ROOT %result = f32[4096,64]{1,0} get-tuple-element(%loop), index=1
}
"""


MOVES = """HloModule jit_step

%put (p0: f32[64,256], p1: f32[256], p2: s32[]) -> (f32[64,256], f32[256]) {
  %p0 = f32[64,256]{1,0:T(8,128)} parameter(0)
  %p1 = f32[256]{0:T(256)S(1)} parameter(1)
  %p2 = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %row = f32[1,256]{1,0:T(8,128)S(1)} bitcast(%p1)
  %there = f32[64,256]{1,0:T(8,128)} dynamic-update-slice(%p0, %row, %p2, %zero)
  %twice = f32[256]{0:T(256)S(1)} add(%p1, %p1)
  ROOT %both = (f32[64,256]{1,0:T(8,128)}, f32[256]{0:T(256)S(1)}) tuple(%there, %twice)
}

%take (q0: bf16[1024,128]) -> bf16[8,128] {
  %q0 = bf16[1024,128]{1,0:T(8,128)(2,1)} parameter(0)
  %other = bf16[128,8,128]{2,1,0:T(8,128)(2,1)} bitcast(%q0)
  %one = s32[]{:T(128)} constant(1)
  %tile = bf16[1,8,128]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%other, %one, %one, %one), dynamic_slice_sizes={1,8,128}
  ROOT %flat = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} bitcast(%tile)
}

ENTRY %main (a: f32[64,256], b: f32[256], c: bf16[1024,128]) -> f32[64,256] {
  %a = f32[64,256]{1,0:T(8,128)} parameter(0)
  %b = f32[256]{0:T(256)} parameter(1)
  %c = bf16[1024,128]{1,0:T(8,128)(2,1)} parameter(2)
  %i = s32[]{:T(128)S(6)} constant(3)
  INSTRUCTIONS
  ROOT %result = f32[64,256]{1,0:T(8,128)} bitcast(%a)
}
"""


@pytest.mark.parametrize(
    ("instructions", "moved"),
    [
        # Onto the chip, from main memory to main memory, and a slice of an array onto the chip.
        ("%s = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%b)", 1024),
        ("%s = (f32[256]{0:T(256)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%b)", 2048),
        ("%s = ((f32[64,256]{1,0:T(8,128)}), f32[1,256]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) async-start(%a), calls=%take", 1024),
        # Written where the layout has tiles and a place; read from there.
        ("%x = f32[256]{0:T(256)S(1)} negate(%b)", 1024),
        ("%x = f32[256]{0:T(256)S(1)} negate(%b)\n  %y = f32[256]{0:T(256)S(1)} negate(%x)", 1024),
        # Two results, one on the chip, the other a row put into an array in place.
        ("%x = f32[256]{0:T(256)S(1)} negate(%b)\n  %f = (f32[64,256]{1,0:T(8,128)}, f32[256]{0:T(256)S(1)}) "
         "fusion(%a, %x, %i), kind=kLoop, calls=%put", 1024 + 1024),
        # A tile taken through a bitcast.
        ("%t = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%c), kind=kLoop, calls=%take", 2048),
        ('%cc = bf16[1024,128]{1,0:T(8,128)(2,1)} custom-call(%c), custom_call_target="ConcatBitcast"', 0),
    ],
)  # fmt: skip
def test_what_lies_on_the_chip_is_not_moved(instructions, moved):
    """Layouts as XLA for TPU writes them, with tiles before the memory space."""
    assert roofline.estimate(MOVES.replace("INSTRUCTIONS", instructions), made.point(), [])["memory_bytes"] == moved


def test_loops_count_in_full_and_slices_count_what_they_take():
    found = roofline.estimate(LOOP, made.point(), [])
    assert found["flop"] == 16 * 2 * 256 * 256 * 64
    # Each trip: the tile is read and written, and read twice by the product, whose result stays on the chip; 12 bytes
    # and 8 are of the counter.
    tile = 256 * 64 * 4
    assert 16 * 4 * tile <= found["memory_bytes"] <= 16 * (4 * tile + 64)
    assert found["is_estimate"] is True and found["loops_of_unknown_length"] == 0


def test_convolutions_of_products_count_their_taps_once():
    text = LOOP.replace(
        "dot(%tile, %tile), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "convolution(%tile, %tile), dim_labels=bf_oi->bf",
    )
    assert roofline.estimate(text, made.point(), [])["flop"] == 16 * 2 * 256 * 256 * 64


def test_collectives_of_one_kind_are_counted_together():
    one = hlo.Collective("all-gather", "ag.1", "bf16[8]", 16, 4, (hlo.Loop("while", 10),))
    other = hlo.Collective("all-gather", "ag.2", "bf16[8]", 16, 4, (hlo.Loop("while.2", 10),))
    lone = hlo.Collective("all-reduce", "ar", "f32[2]", 8, 4, ())
    found = facts.hlo_facts(hlo.Report([], [one, other, lone], 0, 0, 0, 0))
    assert found["collective_counts"] == {"all-gather": 2, "all-reduce": 1}
    assert found["collective_bytes"] == 2 * 160 + 8 and found["loop_bytes"] == 320
    assert found["collectives"][0]["trips"] == 10 and found["collectives"][0]["count"] == 2


def test_an_output_in_an_arguments_place_is_counted_once(tmp_path):
    both = "allocation 5: size 7000, parameter 3, shape |f32[1750]| at ShapeIndex {}, maybe-live-out:\n"
    found = facts.planned(buffers.of(written(tmp_path, ASSIGNMENT + both), TEXT))
    assert found == {"arguments": 4096, "outputs": 100, "aliased": 7000, "temporary": 12288, "peak": None, "total": 22934454272}


def test_compilation_ends_early_only_well_within_the_chip(tmp_path):
    import threading

    def ended(total, wait):
        (tmp_path / f"{total}").mkdir()
        folder = written(tmp_path / f"{total}")
        report = next(folder.glob("*memory-usage-report.txt"))
        report.write_text(REPORT.replace("22934454272", str(total)))
        (folder / "module_0001.jit__train_step.cl_9.after_optimizations_after_buffer_assignment.txt").write_text(TEXT)
        done = threading.Event()
        early.watch(folder, made.point(), lambda text, found: done.set())
        return done.wait(wait)

    gib = 2**30
    assert ended(int(14.9 * gib), 20)
    assert not ended(int(15.5 * gib), 2.5)
    assert early.fits_for_sure(29 * gib, made.point(chip="v6e")) and not early.fits_for_sure(29 * gib, made.point())


def test_half_a_program_is_waited_for(tmp_path):
    import threading
    import time

    folder = written(tmp_path)
    next(folder.glob("*memory-usage-report.txt")).write_text(REPORT.replace("22934454272", "1"))
    program = folder / "module_0001.jit__train_step.cl_9.after_optimizations_after_buffer_assignment.txt"
    program.write_text(TEXT.rstrip()[:-1])
    found = []
    done = threading.Event()
    early.watch(folder, made.point(), lambda text, _: (found.append(text), done.set()))
    time.sleep(1.5)
    assert not found
    program.write_text(TEXT)
    assert done.wait(20) and found == [TEXT]
