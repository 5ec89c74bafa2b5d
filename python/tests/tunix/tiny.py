"""Every model family of Tunix, small enough to train in a test, and what a PeftTrainer needs around it."""

import functools

import numpy as np

# Not a multiple of any tile or vector width, and no other extent of the models is near it: an array with a dimension
# this long in a compiled step is one that holds logits or the table.
VOCAB = 499
WIDTH = 32
LAYERS = 1  # compiling is most of the tests' time, and the head is what they are about
# Logits have a deviation of about WIDTH**0.5 * TABLE = 2.8: the largest of 499 are bent by a quarter.
TABLE = 0.5
SOFTCAP = 7.0
LORA = r".*(q_einsum|kv_einsum|attn_vec_einsum|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"

_COMMON = dict(num_layers=LAYERS, embed_dim=WIDTH, hidden_dim=48, num_heads=4, head_dim=8)
_QWEN_OR_LLAMA = dict(_COMMON, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6)


def _gemma(module, vocab, softcap, sandwich):
    kinds = module.AttentionType
    return module.ModelConfig(
        num_embed=vocab,
        num_kv_heads=1,
        final_logit_softcap=softcap,
        use_post_attn_norm=sandwich,
        use_post_ffw_norm=sandwich,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        attn_logits_soft_cap=50.0 if sandwich else None,
        sliding_window_size=8,
        **_COMMON,
    )


def _gemma3(module, vocab):
    import jax.numpy as jnp

    return module.ModelConfig(
        num_embed=vocab, num_kv_heads=1, sliding_window_size=8, param_dtype=jnp.float32, **_COMMON
    )


def _gemma4(module, vocab):
    """Per-layer embeddings, shared keys and values, and the softcap in the config."""
    kinds = module.AttentionType
    return module.ModelConfig(
        num_embed=vocab,
        num_kv_heads=1,
        final_logit_softcap=SOFTCAP,
        sliding_window_size=8,
        per_layer_input_dim=4,
        frac_shared_layers=0.5,
        global_key_size=8,
        use_sliding_window_kv_cache=False,  # its cache takes no prompt longer than the window
        attention_pattern=(kinds.LOCAL_SLIDING, kinds.LOCAL_SLIDING, kinds.GLOBAL, kinds.GLOBAL),
        **{**_COMMON, "num_layers": 4},  # fewer have no layer to share from
    )


# name: (module and class under tunix.models, config of a vocabulary size)
FAMILIES = {
    "gemma": ("gemma.model.Gemma", lambda m, v: _gemma(m, v, None, False)),
    "gemma2": ("gemma.model.Gemma", lambda m, v: _gemma(m, v, SOFTCAP, True)),
    "gemma3": ("gemma3.model.Gemma3", _gemma3),
    "gemma4": ("gemma4.model.Gemma4", _gemma4),
    "qwen2-tied": ("qwen2.model.Qwen2", lambda m, v: _tied(m, v, True)),
    "qwen2-untied": ("qwen2.model.Qwen2", lambda m, v: _tied(m, v, False)),
    "qwen3-tied": ("qwen3.model.Qwen3", lambda m, v: _tied(m, v, True)),
    "qwen3-untied": ("qwen3.model.Qwen3", lambda m, v: _tied(m, v, False)),
    "llama3-tied": ("llama3.model.Llama3", lambda m, v: _tied(m, v, True)),
    "llama3-untied": ("llama3.model.Llama3", lambda m, v: _tied(m, v, False)),
}


def _tied(module, vocab, tied):
    flag = "weight_tying" if "llama3" in module.__name__ else "use_tied_embedding"
    return module.ModelConfig(vocab_size=vocab, **_QWEN_OR_LLAMA, **{flag: tied})


def model(family="gemma3", dtype="float32", vocab=VOCAB, remat="NONE"):
    """Returns a tiny model of its own: tests may train and change it."""
    return _fill(*_skeleton(family, None, vocab, remat), dtype)


def lora_model(family="gemma3", dtype="float32", vocab=VOCAB, remat="NONE", path=LORA, **rule):
    """Returns a tiny model with LoRA adapters on attention and MLP, none of them zero."""
    lora = tuple(sorted({"module_path": path, "rank": 4, "alpha": 4.0, **rule}.items()))
    return _fill(*_skeleton(family, lora, vocab, remat), dtype)


# Others cast their weights themselves, which qwix 0.1.8's quantised ones do not stand: Tunix fails, without cutloss too.
QUANTISABLE = ("gemma", "gemma2", "gemma3", "llama3-tied", "llama3-untied")


def quantised_model(family="gemma3", path=LORA, vocab=VOCAB):
    """Returns a tiny model with adapters whose weights under `path` are int8: quantised from values, so in one program."""
    import qwix
    from flax import nnx

    base = model(family, vocab=vocab)
    rules = [qwix.LoraRule(module_path=LORA, rank=4, alpha=4.0, weight_qtype="int8" if path == LORA else None)]
    if path != LORA:
        rules.append(qwix.LoraRule(module_path=path, rank=4, alpha=4.0, weight_qtype="int8"))
    adapted = qwix.apply_lora_to_model(base, qwix.LoraProvider(rules), rngs=nnx.Rngs(1), **base.get_model_input())
    rng = np.random.default_rng(2)
    for _, variable in nnx.iter_graph(adapted):
        if isinstance(variable, nnx.LoRAParam):
            value = variable.get_value()
            variable.set_value(value + 0.2 * rng.standard_normal(value.shape).astype(np.float32))
    return adapted


@functools.cache
def _skeleton(family, lora, vocab, remat):
    """The graph and the shapes. Nothing is computed: op by op, Tunix and qwix take seconds a model."""
    import importlib

    import qwix
    from flax import nnx

    place, config = FAMILIES[family]
    module = importlib.import_module(f"tunix.models.{place.rsplit('.', 1)[0]}")
    config = config(module, vocab)
    object.__setattr__(config, "remat_config", module.RematConfig[remat])

    def build():
        built = getattr(module, place.rsplit(".", 1)[1])(config, rngs=nnx.Rngs(params=0))
        if lora is None:
            return built
        provider = qwix.LoraProvider(**dict(lora))
        return qwix.apply_lora_to_model(built, provider, rngs=nnx.Rngs(1), **built.get_model_input())

    return nnx.split(nnx.eval_shape(build))


def _fill(graph, shapes, dtype):
    """Random weights. B of LoRA is not left at zero, where every gradient of A is zero and a wrong one looks right."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rng = np.random.default_rng(0)

    def value(path, shape):
        name = jax.tree_util.keystr(path)
        scale = TABLE if "input_embedding" in name or "lm_head" in name else 0.2
        numbers = scale * rng.standard_normal(shape.shape).astype(np.float32)
        return jnp.asarray(numbers, dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, shapes))


def batch(rows=2, length=12, vocab=VOCAB, seed=0, mask=None):
    rng = np.random.default_rng(seed)
    if mask is None:
        mask = rng.random((rows, length)) < 0.7
    return {
        "input_tokens": rng.integers(0, vocab, (rows, length)).astype(np.int32),
        "input_mask": mask,
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "attention_mask": np.tile(np.tril(np.ones((length, length), bool)), (rows, 1, 1)),
    }


def scalar(loss_fn):
    """A loss function whose loss may be of either of Tunix's kinds, as one of numbers."""
    from cutloss.tunix.loss import as_scalar

    @functools.wraps(loss_fn)  # nnx reads the signature
    def wrapper(*args, **kwargs):
        return as_scalar(loss_fn(*args, **kwargs))

    return wrapper


def values_and_grads(loss_fns, model, data, wrt=None):
    """Returns [(loss, {path: gradient})] of each loss function, through nnx.jit as the trainer does it.

    All in one program, whose forward passes the compiler shares: half the time to compile.
    """
    import jax
    from flax import nnx

    wrt = wrt or nnx.LoRAParam

    def run(model, data):
        return [nnx.value_and_grad(scalar(f), argnums=nnx.DiffState(0, wrt))(model, **data) for f in loss_fns]

    results = []
    for loss, grads in nnx.jit(run)(model, data):
        leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(grads))[0]
        results.append((float(loss), {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}))
    return results


def trainer(lora_model, cls=None, learning_rate=1e-2, optimizer=None, evaluate_every=10**6, **config):
    import optax
    from tunix.sft import peft_trainer

    config = peft_trainer.TrainingConfig(eval_every_n_steps=evaluate_every, **config)
    return (cls or peft_trainer.PeftTrainer)(lora_model, optimizer or optax.adamw(learning_rate), config)
