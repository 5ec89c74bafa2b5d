"""The scan of compiled programs sees logits in every guise, does not take tables for them, and counts traffic right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cutloss.jax import hlo, linear_cross_entropy

N, V, D = 96, 5003, 24


def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, np.int32 if len(s) < 2 else np.float32) for s in shapes)).compile()


def dense(x, w, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w.T), y[:, None], 1).mean()


def logits(f, *shapes, vocab=V, tile_tokens=8):
    return hlo.scan(compiled(f, *shapes).as_text(), vocab=vocab, tile_tokens=tile_tokens).logits


@pytest.mark.parametrize("argnums", [(0,), (0, 1)])
def test_logits_of_a_dense_loss_are_not_seen(argnums):
    found = logits(jax.grad(dense, argnums), (N, D), (V, D), (N,))
    assert found and max(one.tokens for one in found) == N
    assert found[0].bytes == N * V * 4


def test_logits_as_wide_as_the_table_pass_for_it():
    assert logits(jax.grad(dense, (0, 1)), (D, D), (V, D), (D,))


def test_logits_that_leave_the_program_are_not_seen():
    assert logits(lambda x, w: x @ w.T, (N, D), (V, D))


def test_table_its_casts_gradient_or_moments_pass_for_logits():
    def adam(x, w, m, y):
        gradient = jax.grad(lambda w: linear_cross_entropy(x, w, y, _impl="xla"))(w)
        m = 0.9 * m + 0.1 * gradient
        return w - 0.1 * m / (jnp.sqrt(m * m) + 1e-8), m, w.T.astype(jnp.bfloat16)

    assert logits(adam, (N, D), (V, D), (V, D), (N,), tile_tokens=N - 1) == []


PUT_TOGETHER = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (w: f32[512,16384], x: f32[4096,16384]) -> f32[] {
  %w = f32[512,16384] parameter(0)
  %x = f32[4096,16384] parameter(1)
  %zero = f32[] constant(0)
  %at = s32[] constant(0)
  %empty = f32[4096,16384] broadcast(%zero), dimensions={}
  %tile = f32[512,16384] TILE
  %kept = f32[4096,16384] dynamic-update-slice(%empty, %tile, %at, %at)
  ROOT %out = f32[] reduce(%kept, %zero), dimensions={0,1}, to_apply=%add
}
"""


def test_gathered_table_that_is_kept_passes_for_logits():
    for tile, found in (("copy(%w)", 0), ("dot(%x, %w), lhs_contracting_dims={0}, rhs_contracting_dims={0}", 1)):
        assert len(hlo.scan(PUT_TOGETHER.replace("TILE", tile), vocab=16384).logits) == found


def test_logits_over_a_share_of_the_vocabulary_are_not_seen():
    text = TPU.replace("VOCAB", "65536").replace("TOKENS", "4096")
    assert [one.tokens for one in hlo.scan(text, vocab=262144).logits] == [4096]
    padded = TPU.replace("VOCAB", "65664").replace("TOKENS", "4096")  # 65537 on the next multiple of 128
    assert [one.tokens for one in hlo.scan(padded, vocab=262145).logits] == [4096]
    assert hlo.scan(TPU.replace("VOCAB", "65536").replace("TOKENS", "2048"), vocab=262144).logits == []


# As XLA for TPU writes it: no trip counts; a fused reduce-scatter; a limit carried through the loop.
TPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[4,4096,160]) -> f32[640,8,128] {
  %input = f32[4,4096,160]{1,2,0:T(8,128)S(1)} parameter(0)
  %flat = f32[2560,8,128]{2,1,0:T(8,128)} bitcast(%input)
  %all-reduce.3 = f32[2560,8,128]{2,1,0:T(8,128)} all-reduce(%flat), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[640,8,128]{2,1,0:T(8,128)S(1)} slice(%all-reduce.3), slice={[0:640], [0:8], [0:128]}
}

%inner_condition (p: (s32[], s32[], f32[4,4096,160])) -> pred[] {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}, f32[4,4096,160]{1,2,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%inner_body (p.1: (s32[], s32[], f32[4,4096,160])) -> (s32[], s32[], f32[4,4096,160]) {
  %p.1 = (s32[]{:T(128)}, s32[]{:T(128)}, f32[4,4096,160]{1,2,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=1
  %a.1 = f32[4,4096,160]{1,2,0:T(8,128)} get-tuple-element(%p.1), index=2
  %scattered = f32[640,8,128]{2,1,0:T(8,128)S(1)} fusion(%a.1), kind=kCustom, calls=%all-reduce-scatter.1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i.1, %one)
  ROOT %r = (s32[]{:T(128)}, s32[]{:T(128)}, f32[4,4096,160]{1,2,0:T(8,128)}) tuple(%next, %limit.1, /*index=2*/%a.1)
}

%condition (q: (s32[], bf16[4096,160])) -> pred[] {
  %q = (s32[], bf16[4096,160]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %five = s32[] constant(5)
  ROOT %less.1 = pred[] compare(%j, %five), direction=LT
}

%body (q.1: (s32[], bf16[4096,160])) -> (s32[], bf16[4096,160]) {
  %q.1 = (s32[], bf16[4096,160]) parameter(0)
  %j.1 = s32[] get-tuple-element(%q.1), index=0
  %t = bf16[4096,160] get-tuple-element(%q.1), index=1
  %start = (bf16[4096,160], bf16[4096,640]) all-gather-start(%t), replica_groups=[1,4]<=[4], dimensions={1}
  %done = bf16[4096,640] all-gather-done(%start)
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %data = f32[4,4096,160] custom-call(%done), custom_call_target="x"
  %begin = (s32[], s32[], f32[4,4096,160]) tuple(%zero, %three, %data)
  %w = (s32[], s32[], f32[4,4096,160]) while(%begin), condition=%inner_condition, body=%inner_body
  %one.1 = s32[] constant(1)
  %next.1 = s32[] add(%j.1, %one.1)
  ROOT %r.1 = (s32[], bf16[4096,160]) tuple(%next.1, %t)
}

ENTRY %main (x: bf16[4096,160], e: f32[TOKENS,640], c: f32[VOCAB,640]) -> f32[] {
  %x = bf16[4096,160] parameter(0)
  %e = f32[TOKENS,640] parameter(1)
  %c = f32[VOCAB,640] parameter(2)
  %zero.1 = s32[] constant(0)
  %copied = s32[] copy(%zero.1)
  %begin.1 = (s32[], bf16[4096,160]) tuple(%copied, %x)
  %w.1 = (s32[], bf16[4096,160]) while(%begin.1), condition=%condition, body=%body
  %z = f32[TOKENS,VOCAB]{1,0:T(8,128)} convolution(%e, %c), dim_labels=bf_oi->bf
  ROOT %loss = f32[] all-reduce(%z), replica_groups={{0},{1},{2},{3}}, to_apply=%add
}
"""


def test_collective_in_a_loop_is_counted_once():
    report = hlo.scan(TPU.replace("VOCAB", "8").replace("TOKENS", "8"), vocab=262144)
    gather, scatter = report.collectives  # the one among single devices moves nothing
    assert (gather.kind, gather.bytes, gather.times, gather.devices, gather.depth) == (
        "all-gather", 4096 * 640 * 2, 5, 4, 1)
    assert (scatter.kind, scatter.bytes, scatter.times, scatter.depth) == ("reduce-scatter", 4 * 4096 * 160 * 4, 15, 2)
    assert report.loop_bytes == 5 * 4096 * 640 * 2 + 15 * 4 * 4096 * 160 * 4


@pytest.mark.parametrize("groups,devices", [
    ("{{0,1},{2,3}}", 2), ("[1,4]<=[4]", 4), ("[2,2]<=[2,2]T(1,0)", 2), ("mesh['a'=4,'b'=2] {'b'}", 2),
    ("mesh['a'=4,'b'=2] {'a','b'}", 8), ("mesh['a'=4,'b'=2] {'a':(1)2}", 2)])
def test_way_to_write_groups_is_not_read(groups, devices):
    text = TPU.replace("VOCAB", "8").replace("TOKENS", "8").replace("[1,4]<=[4]", groups)
    assert hlo.scan(text, vocab=262144).collectives[0].devices == devices


@pytest.mark.parametrize("old,new", [
    ("%begin = (s32[], s32[], f32[4,4096,160]) tuple(%zero, %three", "%begin = tuple(%zero, %j.1"),
    ("%next, %limit.1, /*index=2*/", "%next, %next, /*index=2*/"),  # the limit moves
    ("%next = s32[]{:T(128)} add(%i.1, %one)", "%next = s32[]{:T(128)} add(%i.1, %i.1)"),
    ("direction=LT", "direction=NE"),
])
def test_trips_that_depend_on_data_are_made_up(old, new):
    assert old in TPU
    new = new.replace("= tuple(", "= (s32[], s32[], f32[4,4096,160]) tuple(")
    report = hlo.scan(TPU.replace("VOCAB", "8").replace("TOKENS", "8").replace(old, new, 1), vocab=262144)
    assert report.collectives[1].times is None and report.loop_bytes is None


def test_known_trip_counts_are_read():
    def f(x):
        return jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x) @ x, x)

    text = compiled(f, (8, 8)).as_text()
    program = hlo.parse(text)
    [(computation, loop)] = [(c, i) for c in program.computations.values() for i in c.instructions.values()
                             if i.operation == "while"]
    assert hlo._trips(program, computation, loop) == 7


def test_command_says_what_it_found(tmp_path, capsys):
    file = tmp_path / "program.txt"
    file.write_text(TPU.replace("VOCAB", "65536").replace("TOKENS", "4096"))
    assert hlo.main([str(file), "--vocab", "262144"]) == 1
    out = capsys.readouterr().out
    assert "LOGITS of 4096 tokens: f32[4096,65536], 1.0 GiB" in out and "w.1 x 5 > w x 3" in out
    assert hlo.main([str(file), "--vocab", "262144", "--tile-tokens", "4096"]) == 0
    capsys.readouterr()
    assert hlo.main([str(file), "--vocab", "262144", "--tile-tokens", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loop_bytes"] == 5 * 4096 * 640 * 2 + 15 * 4 * 4096 * 160 * 4
    assert hlo.main([str(file), "--vocab", "262144", "--tile-tokens", "4096", "--max-loop-bytes", "1000"]) == 1
    assert "1000 are allowed" in capsys.readouterr().err


@pytest.mark.parametrize("text,message", [
    ("", "not the text of a compiled program"),
    ("module @jit_f { stablehlo.add }", "before compiling"),
    ("HloModule jit_f\n", "cut off"),
    (None, "No such file"),
])
def test_command_passes_what_it_cannot_read(tmp_path, capsys, text, message):
    file = tmp_path / "program.txt"
    if text is not None:
        file.write_text(text)
    assert hlo.main([str(file), "--vocab", "100"]) == 2
    error = capsys.readouterr().err
    assert message in error and str(file) in error
    file.write_text(TPU)
    assert hlo.main([str(file), "--vocab", "0"]) == 2
    assert "vocab: got 0" in capsys.readouterr().err


BUFFERS = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <168 a @0> (size=512,offset=0): bf16[256]{0}
allocation 2: size 268435456, parameter 1, shape |bf16[4096,32768]| at ShapeIndex {}:
 value: <160 b @0> (size=268435456,offset=0): bf16[4096,32768]{1,0}
allocation 3: size 134217728, maybe-live-out:
allocation 14: size 1073742336, preallocated-temp:
 value: <170 fusion @0> (size=1073741824,offset=0): bf16[16384,32768]{1,0}
allocation 15: size 131072, color 1, preallocated-temp:
allocation 16: size 1024, preallocated-temp:
"""


def test_planned_bytes_are_left_out_or_those_on_the_chip_counted(tmp_path, capsys):
    program, buffers = tmp_path / "program.txt", tmp_path / "program-buffer-assignment.txt"
    program.write_text(TPU.replace("VOCAB", "8").replace("TOKENS", "8"))
    command = [str(program), "--vocab", "262144"]
    assert hlo.main(command) == 0
    assert "temporary unknown, peak unknown\n(what is planned" in capsys.readouterr().out
    buffers.write_text(BUFFERS)
    assert hlo.main([*command, "--buffers", str(buffers)]) == 0
    assert "temporary 1.0 GiB, peak unknown\n" in capsys.readouterr().out
    assert hlo.main([*command, "--buffers", str(buffers), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["temp_bytes"] == 1073742336 + 1024
    for text in (None, program.read_text()):  # no file, and another one
        buffers.unlink() if text is None else buffers.write_text(text)
        assert hlo.main([*command, "--buffers", str(buffers)]) == 2
        assert str(buffers) in capsys.readouterr().err
