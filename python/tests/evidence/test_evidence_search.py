"""The search for the largest size that fits: it ends, refines below powers of two, and tries nothing twice."""

import pytest

from cutloss.evidence import search


def found(limit, least=1, most=1024, step=1):
    return search.largest(lambda n: n <= limit, least, most, step)


def test_thirteen_fits_and_fourteen_does_not():
    result = found(13)
    assert (result.largest, result.smallest_unfit) == (13, 14)


def test_nothing_fits_ends_after_one_try():
    result = found(0)
    assert (result.largest, result.smallest_unfit, result.tries) == (None, 1, (1,))


def test_all_fit_ends_at_the_limit():
    result = found(10**9, most=1000)
    assert (result.largest, result.smallest_unfit) == (1000, None)


@pytest.mark.parametrize("step", [1, 256])
@pytest.mark.parametrize("most", [1, 300, 4096, 16384])
def test_ends_within_the_stated_number_of_tries_and_tries_nothing_twice(step, most):
    for limit in [*range(0, 600, 7), 1000, 3000, 5000, 16384, 20000]:
        result = found(limit, least=min(most, step), most=most, step=step)
        assert len(result.tries) <= search.most_tries(min(most, step), most, step), (limit, result)
        assert len(set(result.tries)) == len(result.tries), (limit, result)
        if result.largest is not None:
            assert result.largest <= limit
            assert result.smallest_unfit is None or result.smallest_unfit - result.largest <= step
        assert result.smallest_unfit is None or result.smallest_unfit > limit


def test_size_that_fits_above_a_refused_one_is_not_taken():
    """Compilers are not monotone: 700 is refused, 1000 would fit."""
    result = search.largest(lambda n: n != 512 and n <= 1000, 256, 4096, 256)
    assert result.largest == 256 and result.smallest_unfit == 512
    assert all(n <= 512 for n in result.tries)


@pytest.mark.parametrize("sizes", [(0, 4, 1), (1, 0, 1), (1, 4, 0), (8, 4, 1)])
def test_impossible_ranges_are_errors(sizes):
    with pytest.raises(ValueError, match="sizes from"):
        search.largest(lambda n: True, *sizes)
