"""Which axis of a mesh does what, and how large tiles are: pure functions."""

import pytest

from cutloss.jax import _mesh, _place, _tiles


def layout(sizes, lead, w_shape, in_x, in_w, head_layout="vd"):
    return _mesh.assign(sizes, lead, w_shape, in_x, in_w, head_layout)


TWO = {"fsdp": 4, "tp": 2}


def test_axis_of_the_vocabulary_gets_tokens():
    found = layout(TWO, (8, 16), (100, 64), (("fsdp",), ()), (("tp",), ("fsdp",)))
    assert found.lead == (("fsdp",), ()) and found.w == (("tp",), ("fsdp",))
    assert found.place.token_axes == ("fsdp",) and found.place.vocab_axes == ("tp",)
    assert found.place.hidden_axes == ("fsdp",) and found.place.row_axes == () and found.place.parts == 1


def test_layout_of_the_table_is_read_the_other_way_round():
    found = layout(TWO, (8, 16), (64, 100), (("fsdp",), ()), (("fsdp",), ("tp",)), "dv")
    assert found.w == (("fsdp",), ("tp",)) and found.place.vocab_axes == ("tp",)
    assert found.place.hidden_axes == ("fsdp",)


def test_tokens_lie_beside_the_table_by_default():
    assert layout(TWO, (8, 16), (100, 64), None, (("tp",), ("fsdp",))).lead == (("fsdp",), ())
    assert layout(TWO, (8, 16), (100, 64), None, ((), ())).lead == (("fsdp", "tp"), ())


@pytest.mark.parametrize("vocab,vocab_axes,lead", [(100, ("tp",), ("fsdp",)), (101, (), ("fsdp", "tp"))])
def test_vocabulary_is_split_into_unequal_parts(vocab, vocab_axes, lead):
    found = layout(TWO, (8,), (vocab, 64), (("fsdp",),), (("tp",), ("fsdp",)))
    assert found.place.vocab_axes == vocab_axes and found.lead == (lead,)


def test_devices_of_an_idle_axis_repeat_the_work():
    sizes = {"data": 2, "seq": 2, "idle": 3}
    found = layout(sizes, (4, 12), (100, 64), (("data",), ("seq",)), ((), ()))
    assert found.lead == (("data",), ("seq", "idle"))  # 12 divides by 6, 4 does not: no padding
    assert found.place.token_axes == ("data", "seq", "idle")


def test_axis_of_one_device_is_in_collectives():
    found = layout({"fsdp": 8, "tp": 1}, (8,), (100, 64), (("fsdp",),), (("tp",), ("fsdp",)))
    assert found.place.vocab_axes == () and found.w == ((), ("fsdp",))


def test_gathered_parts_are_told_apart():
    place = _place.Place(("fsdp",), (("tp", 2), ("fsdp", 4)), ())
    assert place.row_axes == ("fsdp",) and place.vocab_axes == ("tp",)
    assert place.parts == 4 and place.vocab_parts == 8 and place.gathers


@pytest.mark.parametrize("chip,hidden,tokens", [
    ("TPU v5 lite", 640, 2048), ("TPU v6 lite", 640, 2048), ("TPU v5p", 640, 1024), ("TPU v4", 640, 1024),
    ("TPU v5 lite", 5376, 1024), ("TPU v3", 640, 256), ("TPU v3", 16384, 128), ("NVIDIA H200", 4096, 1024)])
def test_tile_does_not_stay_on_the_chip(chip, hidden, tokens):
    tile = _tiles.choose(1 << 20, hidden, chip)
    assert tile == _tiles.Tile(tokens, 4096)
    fits = 4 * tile.tokens * (tile.ids + hidden) <= _tiles.ON_CHIP.get(chip, _tiles.UNKNOWN) // 2
    assert fits or tile.tokens == _tiles.LEAST_TOKENS


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1025, 2048])
def test_tile_is_larger_than_the_problem(tokens):
    size = _tiles.choose(tokens, 640, "TPU v5 lite").tokens
    assert size == _tiles.LEAST_TOKENS or tokens > size / 2
