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
        self.encode = lambda text: self.tokenizer.encode_batch([text])[0].tolist()
        self.first, self.length = [self.tokenizer.bos_id], int(max_length or self.loaded.config.model.max_length)

    @functools.partial(jax.jit, static_argnums=0)
    def read(self, params, rows):
        log_probs = jax.nn.log_softmax(self.loaded.model.apply({"params": params}, rows[:, :-1])[0])
        found = jnp.take_along_axis(log_probs, rows[:, 1:, None], -1)[..., 0]
        return found, jnp.argmax(log_probs, -1) == rows[:, 1:]

    def score(self, pairs):  # of ids: (context, continuation) -> (its log probability, whether it is greedy)
        found = []
        for start in range(0, len(pairs), self.batch_size):
            few = pairs[start : start + self.batch_size]
            if (most := max(len(continuation) for _, continuation in few)) > self.length:
                raise ValueError(f"a continuation of {most} tokens; allowed: up to {self.length}")
            cut = [(context + continuation)[-self.length - 1 :] for context, continuation in few]
            rows = np.zeros((self.batch_size, min(-(-max(map(len, cut)) // 64) * 64, self.length) + 1), np.int32)
            for row, ids in zip(rows, cut, strict=False):
                row[: len(ids)] = ids
            seen = map(np.asarray, self.read(self.loaded.params, rows))  # padding is after all that counts
            for (_, continuation), ids, chosen, greedy in zip(few, cut, *seen, strict=False):
                span = slice(len(ids) - 1 - len(continuation), len(ids) - 1)
                found.append((float(chosen[span].sum()), bool(greedy[span].all())))
        return found

    def loglikelihood(self, requests):
        pairs = []
        for context, continuation in (request.args for request in requests):
            text = context.rstrip()  # as in lm-eval: spaces between them belong to the continuation
            ids, whole = self.encode(text), self.encode(text + context[len(text) :] + continuation)
            pairs.append((self.first * (self.bos or not ids) + whole[: len(ids)], whole[len(ids) :]))
        return self.score(pairs)

    def windows(self, text):  # as lm-eval's: the last one has a full context
        ids, L = self.first + self.encode(text), self.length
        starts = range(0, len(ids) - 1, L)
        return [(ids[max(min(i + L, len(ids) - 1) - L, 0) : i + 1], ids[i + 1 : i + 1 + L]) for i in starts]

    def loglikelihood_rolling(self, requests):
        return [sum(score for score, _ in self.score(self.windows(request.args[0]))) for request in requests]

    def generate_until(self, requests):
        return [self.generate(*request.args) for request in requests]

    def generate(self, context, options):
        until, steps = np.atleast_1d(options.get("until") or []).tolist(), int(options.get("max_gen_toks", 256))
        if steps >= self.length:
            raise ValueError(f"max_gen_toks={steps}; allowed: below {self.length}")
        warm = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        ids, made, text = self.first * self.bos + self.encode(context), [], ""
        for token in stream(self.loaded, (ids or self.first)[steps - self.length :], steps, temperature=warm):
            text = self.tokenizer.decode(made := [*made, int(token)])
            if made[-1] in self.tokenizer.ends or any(end in text for end in until):
                break
        return text[: min([text.find(end) for end in until if end in text], default=None)]


if __name__ == "__main__":
    cli_evaluate()
