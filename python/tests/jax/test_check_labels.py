"""check_labels: inside jit, a label outside the vocabulary raises what it raises outside."""

import jax
import numpy as np
import pytest
from jax.experimental import checkify
from oracle import F32, problem

from cutloss.jax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compiles")
X, W, Y = problem(8, 11, 5)
Y[0] = -100


def checked(function):
    """What its error says when it is thrown, without checkify's own words at the end; None if there is none."""
    program = jax.jit(checkify.checkify(function))

    def said(*arguments):
        error, _ = program(*arguments)
        return text_of(error)

    return said


def text_of(error):
    try:
        error.throw()
    except ValueError as thrown:
        return str(thrown).removesuffix(" (`check` failed)")
    return None


def outside_jit(*arguments, **options):
    with pytest.raises(ValueError) as caught:
        linear_cross_entropy(*arguments, **options)
    return str(caught.value)


def with_bad(labels, *places, dtype=np.int32):
    labels = labels.astype(dtype)
    for place, value in places:
        labels[place] = value
    return labels


def of_labels(x=X, **options):
    return checked(lambda y: linear_cross_entropy(x, W, y, check_labels=True, **options))


@pytest.mark.parametrize("impl", ["cpu", pytest.param("xla", marks=pytest.mark.long)])
def test_a_bad_label_passes_inside_jit_or_has_another_text(impl):
    said = checked(jax.value_and_grad(
        lambda x, w, labels: linear_cross_entropy(x, w, labels, check_labels=True, _impl=impl), (0, 1)))
    for places in ([(3, 11)], [(6, -1), (5, 2**31 - 1)], [(0, -99)]):
        labels = with_bad(Y, *places)
        assert said(X, W, labels) == outside_jit(X, W, labels)
    assert said(X, W, Y.astype(np.int32)) is None


def test_a_wide_or_unsigned_label_is_cut_first():
    labels = with_bad(np.maximum(Y, 0), (4, 2**32 - 100), dtype=np.uint32)
    assert of_labels()(labels) == outside_jit(X, W, labels)
    with jax.enable_x64(True):
        labels = with_bad(Y, (4, 2**32 + 5), dtype=np.int64)
        assert of_labels()(labels) == outside_jit(X, W, labels)


def test_the_place_of_a_bad_label_is_another_in_more_axes():
    x, labels = X.reshape(2, 4, 5), with_bad(Y.reshape(2, 4), ((1, 2), 12))
    text = of_labels(x, shift=1)(labels)
    assert text == outside_jit(x, W, labels, shift=1) and "labels[1, 2] is 12" in text
    assert of_labels(X[:0])(np.zeros(0, np.int32)) is None
    assert of_labels(X[0])(np.int32(11)) == outside_jit(X[0], W, np.int32(11))


def test_ids_of_soft_targets_or_an_own_ignore_index_are_not_looked_at():
    ids, q = np.array([[1, 3], [-100, 11]] * 4, np.int32), np.full((8, 2), 0.5, F32)
    said = checked(lambda ids: linear_cross_entropy(X, W, soft_targets=(ids, q), check_labels=True))
    assert said(ids) == outside_jit(X, W, soft_targets=(ids, q))
    assert said(np.minimum(ids, 10)) is None
    assert of_labels(ignore_index=11)(with_bad(np.maximum(Y, 0), (2, 11))) is None


@pytest.mark.long
def test_a_transformation_loses_the_check():
    labels = with_bad(Y, (3, 11))
    text = outside_jit(X, W, labels)

    def loss(x, labels, **options):
        return linear_cross_entropy(x, W, labels, check_labels=True, **options)

    assert checked(jax.grad(jax.checkpoint(loss)))(X, labels) == text
    both = np.stack([Y.astype(np.int32), labels])
    said = checked(lambda y: jax.vmap(loss, (None, 0))(X, y))
    assert said(both) == text and said(both[[0, 0]]) is None

    # Gradients that are added up in a scan. (A scan that is differentiated itself loses every check in JAX 0.10.)
    def accumulated(x, labels):
        def body(total, batch):
            return total + jax.grad(loss)(*batch).sum(), None

        return jax.lax.scan(body, F32.type(0), (x.reshape(2, 4, 5), labels.reshape(2, 4)))[0]

    assert checked(accumulated)(X, labels) == text
    error, gradient = jax.jit(jax.grad(lambda *a: checkify.checkify(loss)(*a)[::-1], has_aux=True))(X, labels)[::-1]
    assert text_of(error) == text and np.isnan(gradient[3]).all()


def test_a_check_that_nobody_reads_is_dropped():
    labels = with_bad(Y, (3, 11))
    with pytest.raises(ValueError, match="checkify.checkify"):
        jax.jit(lambda y: linear_cross_entropy(X, W, y, check_labels=True))(labels)
    assert outside_jit(X, W, labels, check_labels=True) == outside_jit(X, W, labels)
    with pytest.raises(TypeError, match="check_labels: True or False is wanted, not 'yes'"):
        linear_cross_entropy(X, W, Y, check_labels="yes")
