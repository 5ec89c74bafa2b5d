"""One measurement, in a process of its own: `python worker.py JOB.json` prints one line of JSON.

Run as a file, in whichever environment has what it measures: it imports nothing of cutloss but the function it times.

What is measured. Inputs are in memory in the dtype of the job, and everything that is paid once is paid: a tiny
problem has started the thread pools, XLA has compiled. From there the peak of the resident set counts, over a run to
warm up and the timed ones. Less what was resident before and less the gradients, it is the extra memory.
"""

import json
import os
import statistics
import sys
import time


def memory_kib(field):
    """A field of /proc/self/status: VmRSS now, VmHWM the peak."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":"))


def reset_peak():
    """Makes VmHWM start from here; false where the system does not let us."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return memory_kib("VmHWM") <= memory_kib("VmRSS") + 1024


# --------------------------------------------------------------------------------------------------------- what is run
# Each gives step(), which computes loss and gradients and returns when they are there, and read(result), which makes
# (loss, dE or None, dC or None) of what step() returned. job["head"] says which gradients: none for "loss", dE for
# "frozen", dE and dC for "trainable".


def cutloss(job, e, c, labels):
    import cutloss as package

    wrt = {"loss": (), "frozen": ("e",), "trainable": ("e", "c")}[job["head"]]

    def step():
        return package.linear_cross_entropy(e, c, labels, wrt=wrt, threads=job["threads"], **job["options"])

    return step, lambda r: (float(r.loss), r.d_e, r.d_c)


def cutloss_notes(result):
    report = getattr(result, "filter_report", None)
    notes = {"mode": result.plan.mode, "workspace_bytes": result.plan.workspace_bytes, "tuned": result.plan.tuned}
    if report is not None:
        notes["filter_report"] = {name: getattr(report, name) for name in dir(report)
                                  if not name.startswith("_") and isinstance(getattr(report, name), (int, float))}
    return notes


def _torch(job, e, c, labels):
    import torch

    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(job["head"] != "loss")

    def tensor(array):
        if array.dtype.itemsize == 4:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)

    x = tensor(e).requires_grad_(job["head"] != "loss")
    w = tensor(c).requires_grad_(job["head"] == "trainable")
    return torch, x, w, torch.from_numpy(labels)


def _read_torch(x, w):
    def read(loss):
        return float(loss), x.grad, w.grad

    return read


def _torch_whole(job, e, c, labels, loss_of):
    """One forward and backward pass of loss_of(torch, x, w, labels)."""
    torch, x, w, y = _torch(job, e, c, labels)

    def step():
        x.grad = w.grad = None
        loss = loss_of(torch, x, w, y)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    return step, _read_torch(x, w)


def torch_dense(job, e, c, labels):
    def loss(torch, x, w, y):
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), y)

    return _torch_whole(job, e, c, labels, loss)


def torch_linear_cross_entropy(job, e, c, labels):
    def loss(torch, x, w, y):
        options = torch.nn.LinearCrossEntropyOptions(**job["options"])
        return torch.nn.functional.linear_cross_entropy(x, w, y, reduction="mean", options=options)

    return _torch_whole(job, e, c, labels, loss)


def torch_chunk_loop(job, e, c, labels):
    """The loop of torchtitan and others: forward and backward of a chunk of tokens at a time."""
    torch, x, w, y = _torch(job, e, c, labels)
    tokens = x.shape[0]
    size = -(-tokens // job["options"]["chunks"])
    functional = torch.nn.functional

    def step():
        x.grad = w.grad = None
        hidden = x.detach()
        d_x = torch.zeros(x.shape, dtype=torch.float32) if x.requires_grad else None
        total = torch.zeros(())
        for first in range(0, tokens, size):
            part = hidden[first : first + size].requires_grad_(x.requires_grad)
            logits = functional.linear(part, w)
            loss = functional.cross_entropy(logits, y[first : first + size], reduction="sum") / tokens
            if loss.requires_grad:
                loss.backward()
                d_x[first : first + size] = part.grad
            total += loss.detach()
        x.grad = None if d_x is None else d_x.to(x.dtype)
        return total

    return step, _read_torch(x, w)


def _jax(job, e, c, labels, loss):
    import jax
    import jax.numpy as jnp

    arrays = jnp.asarray(e), jnp.asarray(c), jnp.asarray(labels)
    wanted = {"loss": (), "frozen": (0,), "trainable": (0, 1)}[job["head"]]
    with_gradients = jax.value_and_grad(loss, argnums=wanted) if wanted else lambda *arrays: (loss(*arrays), ())
    program = jax.jit(with_gradients).lower(*arrays).compile()

    def read(result):
        import numpy as np

        value, gradients = result
        d_e, d_c, *_ = [*map(np.asarray, gradients), None, None]
        return float(value), d_e, d_c

    return lambda: jax.block_until_ready(program(*arrays)), read


def optax_dense(job, e, c, labels):
    import jax.numpy as jnp
    import optax

    def loss(x, w, y):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w.T).astype(jnp.float32), y).mean()

    return _jax(job, e, c, labels, loss)


def jax_cce(job, e, c, labels):
    from jax_cce import linear_cross_entropy

    return _jax(job, e, c, labels, lambda x, w, y: linear_cross_entropy(x, w, y, **job["options"]))


IMPLEMENTATIONS = {
    function.__name__: function
    for function in (cutloss, torch_dense, torch_linear_cross_entropy, torch_chunk_loop, optax_dense, jax_cce)
}


# ---------------------------------------------------------------------------------------------------------- measuring


def load(path, dtype):
    """The array of a .npy file of f32, in `dtype`."""
    import numpy as np

    array = np.load(path)
    if dtype == "bf16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array


def to_float32(array):
    """Any peer's array or tensor as NumPy's float32."""
    if hasattr(array, "float"):  # torch
        return array.float().numpy()
    return array.astype("float32")


def measure(job):
    import numpy as np

    implementation = IMPLEMENTATIONS[job["impl"]]
    e, c = load(job["e"], job["dtype"]), load(job["c"], job["dtype"])
    labels = np.load(job["labels"])

    small = min(32, len(labels)), min(64, len(c))
    step, _ = implementation(job, e[: small[0]].copy(), c[: small[1]].copy(), labels[: small[0]] % small[1])
    step()
    step, read = implementation(job, e, c, labels)

    gradient_bytes = {"loss": 0, "frozen": e.nbytes, "trainable": e.nbytes + c.nbytes}[job["head"]]
    baseline = memory_kib("VmRSS")
    can_measure = reset_peak()
    step()
    seconds = []
    result = None
    while len(seconds) < job["reps"]:
        if len(seconds) >= job["least_reps"] and sum(seconds) > job["most_seconds"]:
            break
        result = None  # the last gradients must not be there beside the next
        start = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - start)
    peak = memory_kib("VmHWM")

    loss, d_e, d_c = read(result)
    found = {"loss": loss}
    if d_e is not None:
        found["d_e"] = to_float32(d_e)
    if d_c is not None:
        found["d_c"] = to_float32(d_c[np.asarray(job["vocab_rows"])])
    np.savez(job["out"], **found)
    return {
        "seconds": seconds,
        "seconds_median": statistics.median(seconds),
        "extra_bytes": (peak - baseline) * 1024 - gradient_bytes if can_measure else None,
        "gradient_bytes": gradient_bytes,
        "versions": {name: getattr(sys.modules[name], "__version__", "?")
                     for name in ("cutloss", "torch", "jax", "optax", "jax_cce") if name in sys.modules},
        **(cutloss_notes(result) if job["impl"] == "cutloss" else {}),
    }


def be_the_first_to_go():
    """If memory runs out all the same, the kernel is to end this process and no other."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def main():
    be_the_first_to_go()
    with open(sys.argv[1]) as file:
        job = json.load(file)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])  # before any library counts the CPUs
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    # Not this folder: its neighbours have the names of what is to be imported.
    sys.path[0:1] = []
    main()
