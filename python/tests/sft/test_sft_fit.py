"""The search for what fits, on byte counts that are made up, and what counts in those of a real step."""

import itertools

import pytest

from cutloss.sft import config, families, fit, trainer
from cutloss.sft.config import ConfigError

BATCHES, CONTEXTS = (1, 2, 4, 8), (64, 128, 256, 512)


@pytest.fixture
def search(monkeypatch):
    """Runs the search with a formula in place of the compiler; returns its points and the shapes it asked for."""

    def run(planned, budget, batches=BATCHES, contexts=CONTEXTS, overrides=()):
        asked = []

        def plan(batch, context):
            asked.append((batch, context))
            return planned(batch, context)

        monkeypatch.setattr(fit, "planner", lambda _: plan)
        settings = config.load(None, ["model.family=gemma3", "train.batch=4", *overrides])
        return list(fit.frontier(settings, budget, batches, contexts)), asked

    return run


@pytest.mark.parametrize("budget", [0, 99, 100, 548, 1000, 5000, 9000, 33000, 10**6])
@pytest.mark.parametrize(
    "planned", [lambda b, c: 36 + b * c, lambda b, c: 10 + b * c * c // 100, lambda b, c: 1000 + b + c],
    ids=["tokens", "attention", "weights"]
)
def test_largest_context_of_every_batch_is_found_with_few_compilations(search, planned, budget):
    points, asked = search(planned, budget)
    fitting = [(b, c) for b, c in itertools.product(BATCHES, CONTEXTS) if planned(b, c) <= budget]
    best = {b: max(c for batch, c in fitting if batch == b) for b, _ in fitting}
    assert [(p.batch, p.context) for p in points if p.fits] == list(best.items())
    assert asked == [(p.batch, p.context) for p in points] and len(set(asked)) == len(asked)
    assert len(asked) <= len(BATCHES) + len(CONTEXTS)
    for point in points:
        assert point.planned_bytes == planned(point.batch, point.context) and point.tokens == point.batch * point.context
        assert point.fits == (point.planned_bytes <= budget)


def test_the_budget_itself_fits_and_a_byte_more_does_not(search):
    for budget, fits in ((1000, True), (999, False)):
        (point,), _ = search(lambda b, c: 1000, budget, (1,), (64,))
        assert point.fits == fits


def test_batches_and_contexts_may_come_in_any_order(search):
    straight, _ = search(lambda b, c: b * c, 1024)
    mixed, _ = search(lambda b, c: b * c, 1024, BATCHES[::-1], CONTEXTS[::-1])
    assert mixed == straight


def test_batches_that_a_mesh_cannot_split_are_left_out(search):
    points, _ = search(lambda b, c: b * c, 10**6, (1, 2, 3, 4, 6), (64,), ["mesh.fsdp=2"])
    assert [point.batch for point in points] == [2, 4, 6]
    with pytest.raises(ConfigError, match="none is a multiple of mesh.fsdp = 2"):
        search(lambda b, c: b * c, 10**6, (1, 3), (64,), ["mesh.fsdp=2"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "rank", "arrays"),
    [("qwen2", 4, 1), ("qwen3", 4, 1), ("llama3", 4, 1), ("qwen3", 0, 3)],  # trained: Adam keeps two moments of it
)
def test_a_head_of_its_own_counts_once_and_a_tied_one_not_at_all(monkeypatch, quick_compilation, family, rank, arrays):
    """A tied head copied into the step's arguments would be memory that the model does not have."""
    monkeypatch.setattr(trainer, "planned_bytes", lambda compiled: compiled.memory_analysis().argument_size_in_bytes)
    held = {}
    for tied in (True, False):
        settings = [f"model.family={family}", f"model.tied={tied}", f"lora.rank={rank}", "model.sizes={num_layers: 1}"]
        held[tied] = fit.planner(config.load(None, settings))(1, 16)
    assert held[False] - held[True] == arrays * families.TINY_VOCAB * families.TINY["embed_dim"] * 4
