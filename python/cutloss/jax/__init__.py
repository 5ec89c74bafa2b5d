"""The loss for JAX programs: a drop-in for "project to the vocabulary, then cross-entropy" that never forms the logits.

On CPU the C++ kernels run inside the jitted program (XLA FFI); on TPU and GPU the same algorithm runs as plain XLA.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from .. import _check, _core
from . import _arguments, _ffi, _manual, _mesh, _options, _vjp

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    x: Any,
    w: Any,
    labels: Any = None,
    *,
    shift: int = 0,
    chunk_size: int = 4096,
    vocab_sort_indices: Any = None,
    filter_eps: float | None = None,
    bias: Any = None,
    reduction: str = "mean",
    denominator: Any = None,
    ignore_index: int = -100,
    token_weights: Any = None,
    class_weights: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    soft_targets: tuple[Any, Any] | None = None,
    metrics: str | Iterable[str] = (),
    head_layout: str = "vd",
    mode: str = "auto",
    filter: str | None = None,
    tolerance: float | None = None,
    epsilon: float | None = None,
    seed: Any = 0,
    budget: int | str | None = None,
    threads: int | None = None,
    mesh: Any = None,
    x_spec: Any = None,
    w_spec: Any = None,
    check_labels: bool = False,
    _impl: str = "auto",
    _tiles: tuple[int | None, int | None] = (None, None),
) -> Any:
    """Cross-entropy of the logits ``x @ w.T`` against labels, without storing the logits. Differentiable in x, w, bias.

    With raw logits ``r = logit_scale * x @ w.T + bias``, logits ``z = softcap * tanh(r / softcap)`` (or r), class
    weights c (or 1, C = sum(c)), token weights t (or 1), smoothing s and label y::

        lse_i = log(sum_v exp(z_iv))      nll_i = lse_i - z_iy           (0 where y is ignore_index)
        l_i = t_i * ((1-s) * c_y * nll_i + s/V * sum_v c_v * (lse_i - z_iv) + z_loss * lse_i**2)
        mean:  sum(l) / denominator, by default sum_i t_i * c_y over the valid rows; 0 if that is 0
        sum:   sum(l)                     none: l

    A superset of ``jax_cce.linear_cross_entropy`` 0.1.0: code for it runs unchanged, and what it lets pass has a meaning
    here or is an error. A label outside [0, V) does not wrap around; -100 is ignored and not in the mean, which is 0 and
    not NaN if nothing is left; a shift longer than the sequence, a filter_eps of NaN, a vocab_sort_indices that is no
    permutation, and arrays of integers or, with x64, of float64 are refused (their gradients would claim digits that
    float32 sums do not have: cast them); a chunk_size below 128 is 128, but for filter_eps. Errors are of the same type,
    with our texts.

    Args:
      x: hidden states, [..., D], float32, bfloat16 or float16.
      w: the head's table, [V, D] for head_layout "vd" (a tied embedding), [D, V] for "dv" (a JAX kernel); of any of the
        three dtypes, independent of x.
      labels: [...], any integer dtype: ids in [0, V), or ignore_index. None with soft_targets.
      shift: row i is matched with label (or soft target) i + shift of its sequence, the second last axis of x; the last
        `shift` rows count as ignored. x is not copied. Weights belong to rows, not to labels.
      chunk_size: most ids in a tile of logits of the XLA lowering (never fewer than 128). With filter_eps the filter's
        granularity.
      vocab_sort_indices: [V], a permutation: the order in which the filters work through the vocabulary. It changes no
        exact result, costs nothing without a filter, and copies no table.
      filter_eps: a gap in logits: in the gradient a row's softmax over a chunk of chunk_size ids is dropped where the
        chunk's largest logit is more than this below the row's largest. Costs 3u for x alone; plain XLA on all platforms.
      bias: [V], float32, bfloat16 or float16; -inf masks an id, unless there is a softcap: its logit is then -softcap.
      denominator: of a mean, where it is known better than from this call; may be traced.
      token_weights: [...], real or bool. A row of weight 0 is not looked at.
      class_weights ([V]), label_smoothing: as in ``torch.nn.functional.cross_entropy``.
      z_loss: coefficient of lse**2, under the token's weight.
      soft_targets: (ids, probabilities), both [..., K], in place of labels: the loss is sum_k q_k * (lse - z_k).
        Probabilities may add up to less than 1; ignore_index pads the ids. nll, "correct" and "rank" are those of the
        likeliest id; a row that is all padding has none: nll 0, rank -1, not correct.
      metrics: any of "lse", "nll", "entropy", "argmax", "correct", "rank", "top_k=5", "mean_logits", "valid_count", as in
        ``cutloss.linear_cross_entropy``; makes the result (loss, dict). With a filter also "filter_report", a dict of
        scalars, of 0 rows where no gradient is formed. lse is differentiable; differentiating another is a TypeError.
        Differentiating lse costs one more evaluation, so ask for it inside a scan only if it is needed.
      filter, tolerance, epsilon, seed: filters of the CPU kernels, as in ``cutloss.linear_cross_entropy``; an error on
        other platforms. epsilon is a probability. seed may be traced.
      mode, budget, threads: limits, as in ``cutloss.linear_cross_entropy``, of the lowering that runs. On CPU the
        workspace is part of the program, so that ``compiled.memory_analysis()`` counts it. Elsewhere budget is about what
        XLA takes on a device beside arguments and results, in tiles of up to 2048 tokens x 4096 ids. A trainable head is
        done by "recompute" without one, and by "chunk" where it has room for the logits of 1024 tokens or more, and of
        all where a mesh splits them. mode="chunk" alone takes 1024 tokens at a time. On a mesh the
        budget (512 MiB without one) also decides whether a table that is read twice is gathered once and kept, or twice.
      mesh, x_spec, w_spec: a jax.sharding.Mesh, and how x and w lie on it as jax.sharding.PartitionSpec. What is not
        given is found where JAX shows it; see docs/sharding.md. Arguments and results are whole arrays. All options
        above go with it but filter and filter_eps, which follow one order of all tokens and ids.
      check_labels: also checks labels, and ids of soft targets, that are traced. The function around it must go through
        jax.experimental.checkify, or JAX refuses it: ``err, out = jax.jit(checkify.checkify(step))(...); err.throw()``
        raises a ValueError with the text that a call outside jit has. (JAX 0.10 drops all checks inside a scan that is
        differentiated as a whole; those beside a gradient that is taken inside a scan stay.)

    Returns:
      The loss in float32: a scalar, or of the labels' shape for reduction "none". With metrics: (loss, dict).

    Cost, in units u of one product of the logits' size (2*N*V*D flops), and what is kept for the backward pass. Which
    arguments need a gradient is seen from the differentiation: a head that is not differentiated costs nothing. ::

        not differentiated                  1u          nothing
        x only (frozen head)                2u          the gradient of x, in x's dtype; backward only scales it
        w, or both; mean and sum: "chunk"   3u          the gradients, in their argument's dtype; backward only scales
                            "recompute"     4u          the same
        w, or both; "none"                  4u to 5u    three numbers a token; backward forms the logits again
        metrics rank; mean_logits           +1u each on TPU and GPU, mean_logits with a softcap only

    Gradients have the dtype of their argument, sums are in float32. In float16, where a gradient may only be large enough
    once a loss scale has multiplied it, that of x is kept in float32, and those of w and bias are formed as with "none".
    In bfloat16 a kept gradient is rounded again by a backward pass that scales it, unless by a power of 2. Products of
    float32 arrays on TPU and GPU follow ``jax.default_matmul_precision``. Works under jit, grad, vjp, vmap, scan,
    checkpoint and shard_map, with x64 on or off. Over a mesh whose layout is given or found, tables are gathered a tile at
    a time and the vocabulary may be split; elsewhere XLA's partitioner decides, and on CPU the C++ kernels see gathered
    arguments on every device.

    Raises (at trace time):
      ValueError: shapes that do not fit together, an option out of range, a spec that does not fit the mesh; in a call
        outside jit also a label outside [0, V). Inside jit such a label gives NaN for its token's loss and gradient, and
        with check_labels this error, when the checked function's error is thrown.
      TypeError: a dtype that is not taken; a second derivative or forward-mode differentiation; a gradient of
        token_weights, class_weights, soft_targets or denominator, or of a metric other than lse.
      BudgetError: (a ValueError) no mode fits the budget, on the platform that runs; the text names one that does.
    """
    wanted, top_k = _arguments.metrics(metrics)
    options = _options.Options(
        reduction=_check.reduction(reduction),
        ignore_index=_check.ignore_index(ignore_index),
        softcap=_check.softcap(softcap),
        head_layout=_check.one_of("head_layout", head_layout, ("vd", "dv")),
        mode=_check.mode(mode),
        budget=_check.budget(budget),
        threads=_check.threads(threads),
        impl=_check.one_of("_impl", _impl, ("auto", "cpu", "xla")),
        logit_scale=_check.number("logit_scale", logit_scale),
        label_smoothing=_check.number("label_smoothing", label_smoothing),
        z_loss=_check.number("z_loss", z_loss),
        shift=_check.integer("shift", shift, -(2**63)),
        filter=_check.filter_name(filter),
        tolerance=_check.optional_number("tolerance", tolerance),
        epsilon=_check.optional_number("epsilon", epsilon),
        chunk_size=_arguments.chunk_size(chunk_size),
        filter_eps=_arguments.filter_eps(filter_eps),
        metrics=wanted,
        top_k=top_k,
        tiles=_tiles,
    )
    if filter_eps is not None and filter is not None:
        raise ValueError(f"filter_eps ({filter_eps}) and filter ({filter!r}) are two filters; give one")
    if filter is None and "filter_report" in wanted:
        raise ValueError("metrics: 'filter_report' is what a filter did: filter='certified', 'unbiased' or 'tile'")
    _core.validate_targets(labels is not None, soft_targets is not None)
    x, w = _arguments.operand("x", x), _arguments.operand("w", w)
    if labels is not None:
        labels = _arguments.as_array(labels)
        _check.label_dtype(labels.dtype)
    size = _check.sizes("x", x.shape, "w", w.shape, None if labels is None else labels.shape, head_layout)
    lead = x.shape[:-1]
    if options.shift:
        options = options._replace(sequence=lead[-1] if len(lead) > 1 else 0)
    _ffi.validate(options, size, bias is not None, class_weights is not None, soft_targets is not None)
    checked = _check.flag("check_labels", check_labels)
    ids = None if labels is None else _arguments.ids("labels", labels, size.vocab, options.ignore_index, checked, options.shift)
    weights = _arguments.floats("token_weights", token_weights, lead, _check.PER_TOKEN, masks=True)
    soft_ids, probabilities = _arguments.soft_targets(soft_targets, lead, size.vocab, options.ignore_index, checked)
    order = _arguments.order("vocab_sort_indices", vocab_sort_indices, size.vocab)
    number = _arguments.seed(seed)
    extra = _options.Extra(
        bias=_arguments.bias(bias, size.vocab),
        token_weights=weights,
        class_weights=_arguments.floats("class_weights", class_weights, (size.vocab,), _check.PER_ID, masks=True),
        soft_ids=soft_ids,
        soft_probabilities=probabilities,
        vocab_order=order if options.filter or options.filter_eps is not None else None,
        denominator=_arguments.denominator(denominator, reduction),
        seed=number if options.filter == "unbiased" else None,
    )
    x = x if lead else x[None]
    options = options._replace(layout=_layout(options, x, w, mesh, x_spec, w_spec))
    rows = (size.tokens,) if options.layout is None else x.shape[:-1]
    count = _arguments.valid_count(options, ids, lead) if "valid_count" in wanted else None
    x, ids, extra = _by_rows(lead, rows, x, ids, extra)
    leaves, tree = jax.tree.flatten((x, w, ids, extra))
    x, w, ids, extra = jax.tree.unflatten(tree, _manual.vary_alike(*leaves))
    loss, lse, found = _vjp.loss(options, x, w, ids, extra)
    loss = loss.reshape(lead) if reduction == "none" else loss
    if not wanted:
        return loss
    report = found.pop("filter_report", None)
    found = {name: a if name == "mean_logits" else a.reshape(lead + a.shape[len(rows) :]) for name, a in found.items()}
    if "lse" in wanted:
        found["lse"] = lse.reshape(lead)
    if report is not None:
        found["filter_report"] = dict(zip(_options.FILTER_REPORT, report))
    if count is not None:
        found["valid_count"] = count
    return loss, found


def _by_rows(lead: tuple[int, ...], rows: tuple[int, ...], x: Any, ids: Any, extra: _options.Extra) -> Any:
    """Arrays by token, of leading dimensions `rows`."""
    def to(a: Any, own: tuple[int, ...] = lead) -> Any:
        return a if a is None else a.reshape(rows + a.shape[len(own) :])

    return to(x, x.shape[:-1]), to(ids), extra._replace(
        token_weights=to(extra.token_weights), soft_ids=to(extra.soft_ids), soft_probabilities=to(extra.soft_probabilities))


def _layout(options: _options.Options, x: Any, w: Any, mesh: Any, x_spec: Any, w_spec: Any) -> Any:
    """How x and w lie on a mesh; None for one program, of the whole or for XLA's partitioner."""
    for name in ("filter", "filter_eps"):
        value = getattr(options, name)
        if value is None:
            continue
        if any(given is not None for given in (mesh, x_spec, w_spec)):
            raise ValueError(f"{name} ({value!r}) does not go with mesh, x_spec and w_spec: it follows one order of all "
                             "tokens and ids. Leave them out, and XLA's partitioner decides, or call the loss inside "
                             "jax.shard_map with your own sums")
        return None
    return _mesh.find(x, w, head_layout=options.head_layout, mesh=mesh, x_spec=x_spec, w_spec=w_spec)
