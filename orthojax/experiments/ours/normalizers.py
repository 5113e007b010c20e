"""Which attention normalizer removes the first token's dominance, the outliers, or both, with which optimizer."""

from collections.abc import Callable

import jax
import numpy as np

from orthojax import analysis
from orthojax.config import replace
from orthojax.experiments import drawing
from orthojax.experiments.claims import (
    DOMINANCE,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    WORST_KURTOSIS,
    Claim,
    chance,
    dominated,
    excess_of_first_left,
    has_outliers,
    rest_has_outliers,
    worst_kurtosis,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import RUNS, SGD_STEPS
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.pictures import perplexity_and_kurtosis
from orthojax.experiments.results import NotMeasured, Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import number
from orthojax.model import LoadedModel, Taps, parameter_count
from orthojax.train import Inputs

MODEL = "gpt2_60m"  # the smallest; with softmax and softmax-1 under Adam and OrthoAdam its runs are those of Table 2
NORMALIZERS = {
    "softmax": "softmax",
    "softmax1": "softmax-1",
    "learned_sink": "learned sinks",
    "clipped_softmax": "clipped softmax",
    "relu": "ReLU",
    "sigmoid": "sigmoid",
    "gated": "softmax, gated",
}
OPTIMIZERS = {"adam": "Adam", "orthoadam": "OrthoAdam", "sgd": "SGD with momentum"}
_SGD = {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.learning_rate": 0.2}  # the paper's learning rate
_FRACTION = metric("first_attention_fraction", "first token most attended", "{:.1%}".format)
_REST = metric("kurtosis_rest", "kurtosis of tokens after the first")


def _variants(scale: str) -> tuple[Variant, ...]:
    base = RUNS[scale](MODEL)
    optimizers: dict[str, dict[str, object]] = {
        "adam": {},
        "orthoadam": {"optim.optimizer": "orthoadam"},
        "sgd": {**_SGD, "train.steps": SGD_STEPS[scale] * base.train.steps},
    }
    normalizers: dict[str, dict[str, object]] = {
        name: {"model.gated_attention": True} if name == "gated" else {"model.normalizer": name} for name in NORMALIZERS
    }
    return tuple(
        Variant(
            f"{normalizer}_{optimizer}",
            f"{NORMALIZERS[normalizer]}, {OPTIMIZERS[optimizer]}",
            replace(base, {**normalizers[normalizer], **optimizers[optimizer]}),
        )
        for optimizer in OPTIMIZERS
        for normalizer in NORMALIZERS
    )


def _observe(taps: Taps) -> jax.Array:
    return analysis.first_attention_share(taps.attention_weights)[None]


def _measure_share(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """`analysis.first_attention_share` over the evaluation set, mean over layers."""
    rows, size = inputs.evaluation[:, :-1], loaded.config.eval.batch_size
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    shares = np.asarray(analysis.measure(loaded, batches, _observe, join=analysis.concatenate))  # [layers, batches]
    on_progress("share")
    return Measured({"first_attention_share": float(np.average(shares.mean(0), weights=list(map(len, batches))))}, {})


def _with(optimizer: str, *normalizers: str) -> tuple[str, ...]:
    return tuple(f"{normalizer}_{optimizer}" for normalizer in normalizers or NORMALIZERS)


CLAIMS = (
    Claim("Whatever lets a head attend to nothing removes the first token's dominance. The paper, GPT2 60M: softmax "
          "48.9%, softmax-1 2.1%.", _with("adam"), (_FRACTION,),
          lambda softmax, *others: max(excess_of_first_left(softmax, other) for other in others) <= 0.5,
          f"with every other one at most half of what exceeds chance is left; testable where softmax has {DOMINANCE:g} "
          "times chance or more", dominated),
    Claim("No normalizer alone removes the outliers of tokens after the first. The paper: softmax 77.9, softmax-1 "
          "81.4.", _with("adam"), (_REST,),
          lambda *every: min(r.kurtosis_rest for r in every) >= NO_OUTLIERS,
          f"{NO_OUTLIERS} or more with every one; testable where softmax has more than {OUTLIERS:g}",
          rest_has_outliers),
    Claim("OrthoAdam removes them whatever the normalizer. The paper: softmax 10.6, softmax-1 7.0.",
          ("softmax_adam", *_with("orthoadam")), (_REST,),
          lambda adam, *every: max(r.kurtosis_rest for r in every) < NO_OUTLIERS,
          f"below {NO_OUTLIERS} with every one; testable where softmax with Adam has more than {OUTLIERS:g}",
          rest_has_outliers),
    Claim("With OrthoAdam the outliers of the first token stay as long as softmax lets it dominate. The paper: softmax "
          "260.8, softmax-1 7.6.", _with("orthoadam", "softmax", "softmax1"), ("kurtosis_first", _FRACTION),
          lambda softmax, softmax1: softmax1.kurtosis_first < NO_OUTLIERS <= softmax.kurtosis_first,
          f"below {NO_OUTLIERS} with softmax-1, not with softmax; testable where with softmax and OrthoAdam the first "
          f"token is most attended by {DOMINANCE:g} times the share that chance gives, or more", dominated),
    Claim("SGD makes no outliers whatever the normalizer. The paper, 130M with softmax-1: 5.0.",
          ("softmax_adam", *_with("sgd")), (WORST_KURTOSIS,),
          lambda adam, *every: max(map(WORST_KURTOSIS, every)) <= OUTLIERS,
          f"at most {OUTLIERS:g} with every one; testable where softmax with Adam has more",
          lambda adam, *every: WORST_KURTOSIS(adam) > OUTLIERS),
    Claim("SGD costs perplexity. Adam against SGD; the paper, with eight times the steps: 26.6 against 25.3.",
          {label: (f"{name}_adam", f"{name}_sgd") for name, label in NORMALIZERS.items()}, (PPL,),
          lambda adam, sgd: sgd.perplexity > adam.perplexity, "higher with every normalizer"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config, sgd_steps = results.first.config, results["softmax_sgd"].config.train.steps
    return [
        f"One language model ({parameter_count(config.model):,} parameters, RMSNormSingle, no biases) with "
        f"{len(NORMALIZERS)} kinds of attention and {len(OPTIMIZERS)} optimizers, {config.train.steps} steps of "
        f"{config.train.batch_size} x {config.data.sequence_length} tokens; SGD has {sgd_steps} steps and the paper's "
        "learning rate of 0.2, the others have Adam's.",
        f"By chance the first token is the most attended one of {chance(results.first):.1%} of (query, head) pairs. "
        "The weights of ReLU and sigmoid are not normalised, so the weight on the first token is no share of the "
        "attention: across normalizers compare the fraction of pairs, or its share of a row's whole weight. Gated "
        "attention has the weights of softmax and multiplies what a head writes by a gate, so a head can do nothing "
        "while its weights rest on the first token.",
    ]


def _what_is_removed(results: Results) -> Table:
    """Which of the two phenomena of softmax with Adam are gone."""
    vanilla = results["softmax_adam"]
    try:
        present = {"dominance": dominated(vanilla), "outliers": has_outliers(vanilla)}
    except NotMeasured:
        present = {}

    def removed(word: str, result: Result) -> bool:
        if word == "dominance":
            return excess_of_first_left(vanilla, result) <= 0.5
        return worst_kurtosis(result) < NO_OUTLIERS

    def cell(result: Result) -> str:
        if not result.seeds:
            return "failed"
        gone = [word for word, shows in present.items() if shows and removed(word, result)]
        return f"{'both' if len(gone) == 2 else gone[0] if gone else 'neither'}, {number(result.perplexity)}"

    missing = [word for word, shows in present.items() if not shows]
    caption = "What is gone that softmax with Adam has, and the perplexity"
    caption += f"; it has no {' and no '.join(missing)} at this scale" if missing else ""
    rows = [[label, *(cell(results[f"{n}_{o}"]) for o in OPTIMIZERS)] for n, label in NORMALIZERS.items()]
    return Table(caption, ["", *OPTIMIZERS.values()], rows)


def _fractions(results: Results) -> list[Picture]:
    figure = drawing.bars(
        [label.replace(", ", ",\n").replace(" s", "\ns") for label in NORMALIZERS.values()],
        {
            label: np.array([results[f"{n}_{o}"].values("first_attention_fraction") for n in NORMALIZERS]).T
            for o, label in OPTIMIZERS.items()
        },
        y_label="first token most attended, fraction",
        references={"by chance": [chance(results.first)] * len(NORMALIZERS)},
    )
    caption = "Share of (query, head) pairs that attend most to the first token."
    return [Picture("first_attention", caption, figure)]


EXPERIMENT = Experiment(
    name="normalizers",
    title="which attention normalizers and optimizers remove first-token dominance, outliers, or both",
    variants=_variants,
    scales=("tiny", "small"),
    about=_about,
    tables=(
        _what_is_removed,
        MetricTable(
            "Perplexity, outliers, attention",
            (
                "perplexity",
                "kurtosis_first",
                "kurtosis_rest",
                "first_attention_fraction",
                "first_attention_share",
                "first_attention_mass",
            ),
        ),
    ),
    claims=CLAIMS,
    pictures=(
        perplexity_and_kurtosis(
            group=lambda result: result.label.rpartition(", ")[2], label=lambda result: result.label.rpartition(", ")[0]
        ),
        _fractions,
    ),
    measures=(Measure("first_attention_share", _measure_share),),
)
