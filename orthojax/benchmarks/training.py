"""The whole training step with softmax-1 and OrthoAdam against softmax and AdamW, and its compilation."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.benchmarks.plain_flax import plain_state, plain_step
from orthojax.benchmarks.suite import (
    TINY_MODEL,
    Case,
    Column,
    Comparison,
    Contender,
    LeftOut,
    Program,
    Row,
    Suite,
    TimeBudget,
    compile_program,
    free_bytes,
    require_memory,
    spread_metrics,
    tree_bytes,
)
from orthojax.config import Config, DataConfig, ModelConfig, NormalizerName, OptimConfig, OptimizerName, TrainConfig
from orthojax.model import gpt2, parameter_count
from orthojax.timing import interleaved_seconds, median_ratio, spread
from orthojax.train import (
    TrainState,
    build,
    init_state,
    make_train_step,
    model_flops_per_token,
    model_flops_utilization,
    state_shapes,
)

# (normalizer, optimizer) by name; the first is what all are compared with, the last is what the paper proposes.
VARIANTS: dict[str, tuple[NormalizerName, OptimizerName]] = {
    "softmax + AdamW": ("softmax", "adam"),
    "softmax1 + AdamW": ("softmax1", "adam"),
    "softmax + OrthoAdam": ("softmax", "orthoadam"),
    "softmax1 + OrthoAdam": ("softmax1", "orthoadam"),
}
PLAIN, PROPOSED = "softmax + AdamW", "softmax1 + OrthoAdam"
FLAX = "plain flax + optax"  # the same model from flax's own layers; on CPUs, where no kernel is fused

# 50,257 tokens padded to a multiple of 128, as is usual: unaligned, the largest matrix product of all is slow.
_VOCAB_SIZE, _TOKENS = 50_304, 50_257


@dataclasses.dataclass(frozen=True)
class Training:
    """Training steps of one model."""

    name: str  # of the model
    model: ModelConfig  # without its normalizer
    batch_size: int  # sequences per step; halved until they fit into memory
    sequence_length: int  # tokens of a sequence
    variants: tuple[str, ...] = tuple(VARIANTS)  # the plain one first
    # Time of the proposed step over that of the plain one: iterations/s of arXiv 2410.17174, Table 4.
    paper_step_ratio: float | None = None

    def config(self, variant: str) -> Config:
        """The run whose step is measured."""
        normalizer, optimizer = VARIANTS[variant]
        return Config(
            model=dataclasses.replace(self.model, normalizer=normalizer),
            optim=OptimConfig(optimizer=optimizer, weight_decay=0.1),
            data=DataConfig(sequence_length=self.sequence_length),
            train=TrainConfig(steps=10_000),
        )

    def tokens(self, batch_size: int) -> jax.Array:
        """Random tokens int32 [batch_size, T + 1], the same in every run."""
        shape = (batch_size, self.sequence_length + 1)
        return jnp.asarray(np.random.default_rng(0).integers(0, min(self.model.vocab_size, _TOKENS), shape), jnp.int32)


def cases(platform: str, tiny: bool) -> list[Training]:
    """What is measured on a platform (as `jax.default_backend()` names it), the most important first."""
    if tiny:
        return [Training("gpt2 tiny", TINY_MODEL, 2, 16)]
    if platform == "cpu":
        # Unrolled, as flax's own layers are: scanned ones take a fifth longer on a CPU.
        sizes = {"num_layers": 6, "d_model": 256, "num_heads": 4, "d_mlp": 1024, "vocab_size": 16_384}
        model = gpt2("tiny", **sizes, scan_layers=False)
        return [Training("gpt2 9m on a CPU", model, 4, 256)]
    every, ends = tuple(VARIANTS), (PLAIN, PROPOSED)
    return [
        Training(
            f"gpt2 {size}", gpt2(size, vocab_size=_VOCAB_SIZE, dtype="bfloat16"), batch_size, length, variants, ratio
        )
        for size, batch_size, length, variants, ratio in (
            # Batches of 131,072 tokens, the paper's, where one accelerator may have room for them.
            ("60m", 512, 256, every, 14.0 / 12.0),
            ("130m", 512, 256, every, 7.5 / 6.0),
            ("350m", 128, 256, ends, 3.3 / 3.0),
            ("1.4b", 64, 256, ends, 1.0 / 1.1),
            ("130m", 32, 1024, every, None),
        )
    ]


def compile_step(config: Config, batch_size: int, *, vendor: bool = True) -> Program:
    """Compiles the training step of a run from shapes alone; with `vendor` its attention is that kernel or an error."""
    tokens = jax.ShapeDtypeStruct((batch_size, config.data.sequence_length + 1), jnp.int32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if vendor else "ignore", "attention falls back")
        return compile_program(make_train_step(config), state_shapes(config), tokens)


# The step: time, MFU, memory.

_HEADROOM = 1.1  # allocators lose memory between arrays, and libraries need workspaces


def fitting_step(case: Training, free: float) -> tuple[int, Program]:
    """The largest batch for which the plain step, and the states of the other variants, fit; and its program."""
    batch_size = case.batch_size
    states = sum(tree_bytes(state_shapes(case.config(variant))) for variant in case.variants)
    while True:
        program = compile_step(case.config(PLAIN), batch_size)
        needed = [_HEADROOM * (states + (program.memory["temp_bytes"] or 0) / 2**n) for n in range(32)]
        if needed[0] <= free or batch_size == 1:
            require_memory(needed[0], free)
            return batch_size, program
        # Temporaries grow with the batch: as many halvings at once as they suggest.
        halvings = next(n for n in range(1, 32) if needed[n] <= free or batch_size >> n <= 1)
        batch_size = max(1, batch_size >> halvings)


def _contender(case: Training, variant: str, program: Program, batch_size: int, params: Callable[[], Any]) -> Contender:
    """The step of a variant, from parameters which are the same for all."""
    config, tokens = case.config(variant), functools.cache(lambda: case.tokens(batch_size))
    state = reported = None

    def call(steps: int) -> Any:
        nonlocal state, reported
        if state is None:
            own = jax.tree.map(jnp.copy, params())
            state = TrainState(jnp.zeros((), jnp.int32), own, build(config).optimizer.init(own))
        for _ in range(steps):
            state, reported = program.run(state, tokens())
        return reported

    sizes = program.sizes | {
        "batch_size": batch_size,
        "sequence_length": case.sequence_length,
        "tokens_per_step": batch_size * case.sequence_length,
        "parameters": parameter_count(case.model),
        "peak_bytes": program.peak_bytes,
    }
    if variant == PROPOSED and case.paper_step_ratio is not None:
        sizes["paper_step_ratio"] = case.paper_step_ratio

    def finish(seconds: float) -> dict[str, Any]:
        speed = sizes["tokens_per_step"] / seconds
        flops = [model_flops_per_token(case.model, case.sequence_length, causal=causal) for causal in (True, False)]
        step: Any = reported
        return {
            "tokens_per_second": speed,
            "flops_per_token": flops[0],
            "mfu": model_flops_utilization(speed, flops[0], device_count=1),
            "mfu_full_attention": model_flops_utilization(speed, flops[1], device_count=1),
            "loss_nats": float(step.loss_sum_nats) / float(step.target_tokens),
            # Of the process so far, all variants and cases: the device does not tell them apart.
            "process_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }

    return Contender(call, sizes, finish)


def _flax_contender(case: Training, batch_size: int) -> Contender:
    tokens, state = case.tokens(batch_size), jax.jit(plain_state, static_argnums=0)(case.model)
    loss: Any = None
    program = compile_program(plain_step(case.model), state, tokens)

    def call(steps: int) -> Any:
        nonlocal state, loss
        for _ in range(steps):
            state, loss = program.run(state, tokens)
        return loss

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    tokens_per_step = batch_size * case.sequence_length
    sizes = {"parameters": parameters, "tokens_per_step": tokens_per_step, "peak_bytes": program.peak_bytes}
    return Contender(
        call, program.sizes | sizes, lambda s: {"tokens_per_second": tokens_per_step / s, "loss_nats": float(loss)}
    )


def _rows(case: Training, repeats: int, budget: TimeBudget) -> Iterator[Row]:
    """The rows of one case: every variant against softmax and AdamW; that one's own ratio is the control."""
    # At least two steps: the host runs ahead of the device then, as in training. 70 s of the budget are for compiling
    # what there is no time to run: its memory is known all the same.
    comparison = Comparison(("peak_bytes",), longest=40.0, own_row=True, per_step=True, fewest_calls=2, reserved=70.0)
    fitting = budget.attempt(lambda: fitting_step(case, free_bytes()))
    batch_size = case.batch_size if isinstance(fitting, str) else fitting[0]
    params = functools.cache(lambda: init_state(case.config(PLAIN)).params)

    def contender(variant: str) -> Contender:
        if isinstance(fitting, str):
            raise LeftOut(fitting)
        program = fitting[1] if variant == PLAIN else compile_step(case.config(variant), batch_size)
        return _contender(case, variant, program, batch_size, params)

    contenders: dict[str, Callable[[], Contender]] = {
        variant: functools.partial(contender, variant) for variant in case.variants
    }
    if jax.default_backend() == "cpu":
        contenders[FLAX] = functools.partial(_flax_contender, case, batch_size)
    yield from comparison.rows(Case(f"{case.name} {batch_size}x{case.sequence_length}", contenders), repeats, budget)


def _measure_steps(repeats: int, tiny: bool) -> Iterator[Row]:
    budget = TimeBudget(270.0)
    for case in cases(jax.default_backend(), tiny):
        yield from _rows(case, repeats, budget)


TRAIN_STEP = Suite(
    name="train_step",
    title=(
        "The training step (batch x length) against softmax + AdamW: median ratio (quartiles); the first row of each\n"
        "case is the reference against itself. Paper: its Table 4, whose memory ratios are 1.015 to 1.05"
    ),
    measure=_measure_steps,
    columns=(
        Column("time ratio", "step_seconds_ratio"),
        Column("paper", "paper_step_ratio", "{:.3g}"),
        Column("step", "step_seconds", "seconds"),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("MFU", "mfu", "{:.1%}"),
        Column("tokens/step", "tokens_per_step", "{:,}"),
        Column("peak memory ratio", "peak_bytes_ratio", "{:.4g}"),
        Column("peak memory", "peak_bytes", "bytes"),
        Column("process so far", "process_peak_bytes", "bytes"),
    ),
    repeats=10,
)

# Its compilation with OrthoAdam against that with AdamW.


def _compilation(case: str, model: ModelConfig, repeats: int) -> Row:
    """Compiles the steps with AdamW and with OrthoAdam alternately; nothing runs."""
    data = DataConfig(sequence_length=min(256, model.max_length))
    found: dict[str, list[Program]] = {"orthoadam": [], "adam": []}

    def compiler(name: OptimizerName) -> None:
        config = Config(model=model, optim=OptimConfig(optimizer=name, weight_decay=0.1), data=data)
        # Without the executable, which would stay in memory.
        found[name].append(compile_step(config, 8, vendor=False)._replace(run=None))

    # For the order: the seconds that count leave out what comes before lowering.
    interleaved_seconds({name: functools.partial(compiler, name) for name in ("adam", "orthoadam")}, repeats, warmup=0)

    def ratio(name: str, seconds: Callable[[Program], float]) -> dict[str, Any]:
        return spread_metrics(
            name, median_ratio(*([seconds(each) for each in programs] for programs in found.values()))
        )

    metrics: dict[str, Any] = {
        **ratio("compile_seconds_ratio", lambda p: p.lower_seconds + p.compile_seconds),
        **ratio("compile_cpu_seconds_ratio", lambda p: p.cpu_seconds),
        "repetitions": repeats,
    }
    for prefix, programs in (("", found["orthoadam"]), ("adamw_", found["adam"])):
        for name in ("lower_seconds", "compile_seconds", "cpu_seconds"):
            metrics[prefix + name] = spread([getattr(program, name) for program in programs]).median
        metrics |= {prefix + name: count for name, count in programs[0].memory.items()}
    return Row(case, "orthoadam", metrics)


def _measure_compilation(repeats: int, tiny: bool) -> Iterator[Row]:
    if tiny:
        yield _compilation("gpt2 tiny unrolled", TINY_MODEL, repeats)
        return
    _compilation("", TINY_MODEL, 1)  # what a process pays once, whatever it compiles
    yield _compilation("gpt2 350m unrolled", gpt2("350m", scan_layers=False), repeats)


COMPILE = Suite(
    name="compile",
    title="Lowering and compiling the training step with OrthoAdam, against AdamW: median ratio (quartiles)",
    measure=_measure_compilation,
    columns=(
        Column("compile time ratio", "compile_seconds_ratio"),
        Column("CPU time ratio", "compile_cpu_seconds_ratio"),
        Column("lowering", "lower_seconds", "seconds"),
        Column("of adamw", "adamw_lower_seconds", "seconds"),
        Column("compiling", "compile_seconds", "seconds"),
        Column("of adamw", "adamw_compile_seconds", "seconds"),
        Column("temporary", "temp_bytes", "bytes"),
        Column("of adamw", "adamw_temp_bytes", "bytes"),
    ),
    repeats=3,
)
