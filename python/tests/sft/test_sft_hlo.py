"""The scan for logits must see them in every guise, and must not take the table for them."""

from cutloss.sft.hlo import logit_arrays

SHAPE = {"vocab": 262144, "width": 640}


def test_finds_logits_padded_flattened_and_in_any_order():
    text = "f32[4,255,262144]{2,1,0} bf16[262144,1020]{1,0} f32[267386880]{0} pred[1,8,262144]"
    assert logit_arrays(text, **SHAPE) == {
        "f32[4,255,262144]": 1020,
        "bf16[262144,1020]": 1020,
        "f32[267386880]": 1020,
        "pred[1,8,262144]": 8,
    }


def test_table_and_vectors_over_the_vocabulary_are_not_logits():
    text = "f32[262144,640]{1,0} bf16[640,262144] f32[167772160] f32[262144] f32[1,262144] f32[] f32[4,256,640]"
    assert logit_arrays(text, **SHAPE) == {}


def test_tiles_the_plan_allows_are_allowed():
    assert logit_arrays("f32[128,262144]", **SHAPE, tile_tokens=128) == {}
    assert logit_arrays("f32[129,262144]", **SHAPE, tile_tokens=128) == {"f32[129,262144]": 129}
