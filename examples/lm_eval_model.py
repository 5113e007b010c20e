"""Models of orthojax in lm-eval: python lm_eval_model.py --model orthojax --model_args path=RUN --tasks TASKS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

import orthojax
from orthojax.model.generation import stream


@register_model("orthojax")
class Orthojax(LM):
    def __init__(self, path, batch_size=8, max_length=None, **_):
        super().__init__()
        self.loaded, self.batch_size = orthojax.load(path), int(batch_size)
        self.tokenizer, self.bos = self.loaded.tokenizer, self.loaded.config.data.bos
        self.length = int(max_length or self.loaded.config.data.sequence_length)

    @functools.partial(jax.jit, static_argnums=0)
    def read(self, params, rows):
        logits = jax.nn.log_softmax(self.loaded.model.apply({"params": params}, rows[:, :-1])[0])
        chosen = jnp.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]
        return chosen, jnp.argmax(logits, -1) == rows[:, 1:]

    def encode(self, text):
        return self.tokenizer.encode_batch([text])[0].tolist()

    def score(self, pairs):
        """Takes (context, continuation) of ids; returns (log probability of the continuation, whether it is greedy)."""
        found = []
        for start in range(0, len(pairs), self.batch_size):
            rows = np.zeros((self.batch_size, self.length + 1), np.int32)  # one shape: padding is never seen
            few = pairs[start : start + self.batch_size]
            for row, (context, continuation) in zip(rows, few, strict=False):
                ids = (context + continuation)[-self.length - 1 :]
                row[: len(ids)] = ids
            of = map(np.asarray, self.read(self.loaded.params, rows))
            for (context, continuation), chosen, greedy in zip(few, *of, strict=False):
                end = min(len(context + continuation) - 1, self.length)
                span = slice(max(end - len(continuation), 0), end)
                found.append((float(chosen[span].sum()), bool(greedy[span].all())))
        return found

    def loglikelihood(self, requests):
        pairs = []
        for context, continuation in (request.args for request in requests):
            text = context.rstrip()  # as in lm-eval: spaces between them belong to the continuation
            ids, whole = self.encode(text), self.encode(text + context[len(text) :] + continuation)
            first = [self.tokenizer.bos_id] if self.bos or not ids else []
            pairs.append((first + whole[: len(ids)], whole[len(ids) :]))
        return self.score(pairs)

    def loglikelihood_rolling(self, requests):
        rows = [[self.tokenizer.bos_id, *self.encode(request.args[0])] for request in requests]
        L = self.length  # each window begins with the last token of the one before
        cut = [[(ids[i : i + 1], ids[i + 1 : i + 1 + L]) for i in range(0, len(ids) - 1, L)] for ids in rows]
        return [sum(score for score, _ in self.score(windows)) for windows in cut]

    def generate_until(self, requests):
        return [self.generate(*request.args) for request in requests]

    def generate(self, context, options):
        until, steps = options.get("until") or [], int(options.get("max_gen_toks", 64))
        until = [until] if isinstance(until, str) else until
        warm = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        ids, made, text = [self.tokenizer.bos_id] * self.bos + self.encode(context), [], ""
        for token in stream(self.loaded, ids[-max(self.length - steps, 1) :], steps, temperature=warm):
            text = self.tokenizer.decode(made := [*made, int(token)])
            if made[-1] in self.tokenizer.ends or any(end in text for end in until):
                break
        return text[: min([text.find(end) for end in until if end in text], default=None)]


if __name__ == "__main__":
    cli_evaluate()
