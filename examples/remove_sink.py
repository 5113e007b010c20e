"""Takes the sink away from a model: python remove_sink.py MODEL TEXT_FILE.

Gives the first token the keys of the second one in every head. Prints which share of its weight a head puts on the
first token, and the loss of the later tokens in nats, as the model is and so changed.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import orthojax


def measured(loaded, tokens):
    """Returns (share of weight on the first token, loss) of tokens int [B, T], as the model is and without the sink."""
    keys = orthojax.analysis.measure(loaded, [tokens], lambda taps: taps.keys)  # [L, B, T, K, H]
    L, _, T, K, _ = keys.shape
    share, found = jnp.zeros((L, K, T)).at[..., 0].set(1.0), []
    for changes in (None, orthojax.Interventions(keys=jnp.roll(keys, -1, axis=2), keys_share=share)):
        logits, weights = loaded.model.apply(
            {"params": loaded.params}, tokens, interventions=changes, observe=lambda taps: taps.attention_weights
        )
        log_probs = jax.nn.log_softmax(logits[:, 1:-1])  # the first token predicts from itself alone
        loss = -np.take_along_axis(np.asarray(log_probs), tokens[:, 2:, None], -1).mean()
        found.append((float(weights[..., 1:, 0].mean()), float(loss)))
    return found


if __name__ == "__main__":
    loaded, text = orthojax.load(sys.argv[1]), open(sys.argv[2], encoding="utf-8").read()
    first = [loaded.tokenizer.bos_id] * loaded.config.data.bos
    ids = [*first, *loaded.tokenizer.encode_batch([text])[0].tolist()][: loaded.config.data.sequence_length]
    for name, (mass, loss) in zip(("as it is", "without the sink"), measured(loaded, np.array([ids])), strict=True):
        print(f"{name}: {mass:.1%} of the weight on the first token, loss {loss:.3f} nats")
