"""A Gemma 3 small enough to train in a test, and what a PeftTrainer needs around it."""

import functools

import numpy as np
import tiny

# Not a multiple of any tile or vector width, and no other extent of the model is near it: an array with a dimension
# this long in the compiled step is one that holds logits or the table.
VOCAB = 4099
WIDTH = 32
LORA = r".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"


def model(dtype="float32", vocab=VOCAB, remat="NONE"):
    """Returns a tiny Gemma3 of its own: tests may train and change it."""
    from flax import nnx

    return cast(nnx.clone(_model(vocab, remat)), dtype)


def lora_model(dtype="float32", vocab=VOCAB, remat="NONE"):
    """Returns a tiny Gemma3 with LoRA adapters on attention and MLP, none of them zero."""
    from flax import nnx

    return cast(nnx.clone(_lora_model(vocab, remat)), dtype)


def cast(built, dtype):
    import jax
    from flax import nnx

    graph, state = nnx.split(built)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), state))


# Built once and cloned: Tunix and qwix run the model op by op to build it, seconds of compilation each time.
@functools.cache
def _model(vocab, remat):
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3

    config = gemma3.ModelConfig(
        num_layers=1,
        num_embed=vocab,
        embed_dim=WIDTH,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        sliding_window_size=16,
        param_dtype=jnp.float32,
        remat_config=gemma3.RematConfig[remat],
    )
    built = gemma3.Gemma3(config, rngs=nnx.Rngs(params=0))
    # Tunix draws embeddings with a deviation of 0.01: logits within 0.1, a loss that no softcap would move.
    table = built.embedder.input_embedding
    table.set_value(table.get_value() * 100)
    return built


@functools.cache
def _lora_model(vocab, remat):
    import jax
    import qwix
    from flax import nnx

    base = _model(vocab, remat)
    provider = qwix.LoraProvider(module_path=LORA, rank=4, alpha=4.0)
    adapted = qwix.apply_lora_to_model(base, provider, rngs=nnx.Rngs(1), **base.get_model_input())
    # B starts at zero, where every gradient of A is zero too and a wrong one would look right.
    rng = np.random.default_rng(2)
    state = nnx.state(adapted, nnx.LoRAParam)
    nnx.update(
        adapted, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), state)
    )
    return adapted


batch = functools.partial(tiny.batch, vocab=VOCAB)


def value_and_lora_grads(loss_fn, lora_model, data):
    """Returns (loss, {path: gradient}) of every LoRA parameter, through nnx.jit as the trainer does it."""
    import jax
    from flax import nnx

    grad = nnx.value_and_grad(tiny.scalar(loss_fn), argnums=nnx.DiffState(0, nnx.LoRAParam))
    loss, grads = nnx.jit(lambda m, d: grad(m, **d))(lora_model, data)
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(grads))[0]
    return float(loss), {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def trainer(lora_model, cls=None, learning_rate=1e-2):
    import optax
    from tunix.sft import peft_trainer

    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**6)
    return (cls or peft_trainer.PeftTrainer)(lora_model, optax.adamw(learning_rate), config)
