"""Which heads carry an answer: python patch_heads.py MODEL "clean prompt" "other prompt" " answer".

The model reads the other prompt, with the attention weights of one head at a time from the clean one. Prints the change
of the answer's log probability for each layer (rows) and head (columns); both prompts need as many tokens.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import orthojax


def patched(loaded, clean, other, answer):
    """Returns the changes, [layers, heads]; prompts are ids int [1, T], the answer is an id."""
    weights = orthojax.analysis.measure(loaded, [clean], lambda taps: taps.attention_weights)  # [L, 1, N, T, T]

    @jax.jit  # shares are an argument, so that one program serves all heads
    def log_prob(share):
        changes = orthojax.Interventions(forced_weights=weights, forced_share=share)
        logits = loaded.model.apply({"params": loaded.params}, other, interventions=changes)[0]
        return jax.nn.log_softmax(logits[0, -1])[answer]

    L, N = loaded.config.model.num_layers, loaded.config.model.num_heads
    one_head = jnp.eye(L * N).reshape(L * N, L, N)
    found = jax.lax.map(log_prob, one_head) - log_prob(jnp.zeros((L, N)))
    return np.asarray(found).reshape(L, N)


if __name__ == "__main__":
    loaded, texts = orthojax.load(sys.argv[1]), sys.argv[2:5]
    clean, other, answer = (ids.tolist() for ids in loaded.tokenizer.encode_batch(texts))
    if len(clean) != len(other):
        sys.exit(f"{len(clean)} and {len(other)} tokens; allowed: prompts of equal length")
    first = [loaded.tokenizer.bos_id] * loaded.config.data.bos
    changes = patched(loaded, np.array([first + clean]), np.array([first + other]), answer[0])
    print("\n".join(" ".join(f"{change:+.3f}" for change in layer) for layer in changes))
