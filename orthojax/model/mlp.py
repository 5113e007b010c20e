"""The MLP of one block."""

import flax.linen as nn
import jax

from orthojax.config import Mlp
from orthojax.model.dense import Part


class Feedforward(Part):
    """The MLP of one block."""

    kind: Mlp

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        if self.kind != "linear":
            hidden = self.dense("input", c.d_mlp)(x)
            if self.kind == "swiglu":
                hidden = jax.nn.silu(self.dense("gate", c.d_mlp)(x)) * hidden
            else:
                hidden = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[self.kind](hidden)
            x = hidden
        return self.dense("output", c.d_model, writes_residual=True)(x)
