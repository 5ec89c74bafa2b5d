"""What the tests of the NumPy front end share: a call checked against the oracle, and a comparison of two results."""

import numpy as np
from oracle import close, dense

from cutloss import linear_cross_entropy


def check(e, c, labels, **options):
    got = linear_cross_entropy(e, c, labels, **options)
    options = {k: v for k, v in options.items() if k not in ("mode", "budget", "threads", "target", "wrt")}
    want = dense(e, c, labels, **options)
    close("loss", got.loss, want.loss, want.tol_loss)
    close("nll", got.nll, want.nll, want.tol_nll)
    close("lse", got.lse, want.lse, want.tol_nll)
    assert got.valid_count == want.valid_count
    for name, source in (("d_e", e), ("d_c", c)):
        gradient = getattr(got, name)
        if gradient is not None:
            assert gradient.dtype == source.dtype and gradient.flags.c_contiguous
            close(name, gradient, getattr(want, name), getattr(want, "tol_" + name))
    return got


def assert_same(got, want, bits=True, d_c_of=lambda g: g):
    # A table read in another order may be summed in another order: then 1e-5 of the largest entry, 40 roundings.
    for name in ("loss", "nll", "d_e", "d_c"):
        a, b = getattr(got, name), getattr(want, name)
        a = d_c_of(a) if name == "d_c" else a
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if bits else 1e-5 * np.abs(b).max(), err_msg=name)
