"""OrthoAdam on scanned layers of flax linen with boxes; the trees of other libraries are in test_rotation.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthojax.optim import Rotation, describe, orthoadam

X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 4)), jnp.float32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(8, kernel_init=boxed)(nn.LayerNorm()(x))
        return x + nn.Dense(4, use_bias=False)(nn.gelu(y)), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"split_rngs": {"params": True}, "metadata_params": {nn.PARTITION_NAME: None}}
        layers = nn.scan(LinenBlock, variable_axes={"params": 0}, length=3, **options)
        return nn.Dense(1, name="head")(layers(name="layers")(x, None)[0])


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_boxes_of_scanned_layers_are_rotated_and_train(kind):
    model, rotation = LinenModel(), Rotation(kind, "output")
    params = jax.jit(model.init)(jax.random.key(0), X)
    assert isinstance(params["params"]["layers"]["Dense_0"]["kernel"], nn.Partitioned)
    rotated = {path: what for path, what in describe(rotation, params).items() if not what.startswith("left alone")}
    widths = {"Dense_0": 8, "Dense_1": 4}
    assert rotated == {f"layers/{name}/kernel": f"axes (2,): {kind} {n}, 3 layers" for name, n in widths.items()}
    optimizer, target = orthoadam(0.03, weight_decay=1e-3, rotation=rotation), jnp.sin(X[:, :1] + 2 * X[:, 1:2])

    @jax.jit
    def step(params, state):
        loss = lambda p: jnp.mean((model.apply(nn.unbox(p), X) - target) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry, losses = (params, optimizer.init(params)), []
    for _ in range(8):
        new, loss = step(*carry)
        assert jax.tree.structure(new) == jax.tree.structure(carry)
        carry, losses = new, [*losses, float(loss)]
    assert losses[-1] < 0.8 * losses[0], losses
