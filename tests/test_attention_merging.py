"""Attention whose keys lie on eight devices, merged around a ring: that over all keys, with one sink."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import SINK, check_definition, qkv

from orthojax.ops.attention import attention_logits, merge, weighted_values

DEVICES, AXIS = 8, "sequence"
TOLERANCES = dict.fromkeys(("rtol", "atol", "slope_tolerance"), 1e-5)
SINKS = {"softmax": None, "softmax1": 0.0, 0.5: np.log(0.5)}  # otherwise the normalizer is an array of them


def over_part(q, k, v, t, s):
    """Returns output and lse over the keys of one device, causal by positions; garbage where none is seen."""
    logits = jnp.where((s[None] <= t[:, None])[None, None], attention_logits(q, k), -jnp.inf)
    sees = jnp.isfinite(top := jax.lax.stop_gradient(jnp.max(logits, -1)))
    weights = jnp.exp(logits - jnp.where(sees, top, 0.0)[..., None])
    total = jnp.where(sees, jnp.sum(weights, -1), 1.0)
    lse = jnp.where(sees, jnp.where(sees, top, 0.0) + jnp.log(total), -jnp.inf)
    output = weighted_values(weights / total[..., None], v)
    return jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], output, 7.0), lse


def ring(q, k, v, sink, *, reverse):
    """Attends on one device of the ring, to which keys and values come one after the other."""
    here, T = jax.lax.axis_index(AXIS), q.shape[1]
    step = -1 if reverse else 1
    neighbours = [(i, (i + step) % DEVICES) for i in range(DEVICES)]
    found = None
    for turn in range(DEVICES):
        t, s = (T * device + jnp.arange(T) for device in (here, (here - step * turn) % DEVICES))
        new = over_part(q, k, v, t, s)
        found = new if found is None else merge(*(jnp.stack(pair) for pair in zip(found, new, strict=True)))
        k, v = jax.lax.ppermute((k, v), AXIS, neighbours)
    return merge(*(array[None] for array in found), sink=sink)[0]


@pytest.mark.parametrize("normalizer", [*SINKS, "sinks"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_ring_of_devices_is_attention_over_all_keys(normalizer, reverse):
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, AXIS)
    specs = {"in_specs": (rows, rows, rows, jax.P()), "out_specs": rows}
    attend_around = jax.shard_map(partial(ring, reverse=reverse), mesh=mesh, **specs)

    def attend(*arrays, normalizer, is_causal):
        sink = SINKS[normalizer] if isinstance(normalizer, str | float) else normalizer
        return attend_around(*arrays, sink if sink is None else jnp.float32(sink))

    given = SINK if normalizer == "sinks" else normalizer
    check_definition(attend, qkv(16, 16, 2), given, is_causal=True, **TOLERANCES)


def test_a_query_that_sees_no_key_gets_zero_and_finite_gradients():
    outputs, lse = jnp.full((2, 1, 3, 1, 4), jnp.nan), jnp.full((2, 1, 1, 3), -jnp.inf)
    for sink in (None, jnp.zeros(1), jnp.full(1, -jnp.inf)):
        result = merge(outputs, lse, sink)
        np.testing.assert_array_equal(result[0], 0.0)
        np.testing.assert_array_equal(result[1], -np.inf if sink is None else sink[0])
        slopes = jax.grad(lambda *arrays, sink=sink: jnp.sum(merge(*arrays, sink)[0]), (0, 1))(outputs, lse)
        assert all((np.asarray(slope) == 0.0).all() for slope in slopes)
