"""Figures 1 to 44 of From Attention to Activation (arXiv 2410.17174)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from orthojax.config import replace
from orthojax.experiments import claims as c
from orthojax.experiments.claims import ByLayer, Claim, Expr, Metric
from orthojax.experiments.from_attention import channels, measures, models, rotations
from orthojax.experiments.from_attention.models import ABOUT, MODELS, SCALES, C, O, S, V, base_run, retested, variants
from orthojax.experiments.study import Row, Study
from orthojax.ops.statistics import norm_ratio
from orthojax.report import pictures
from orthojax.report.figures import Scale, maps
from orthojax.report.page import Picture
from orthojax.report.results import Numbers, Result, Results
from orthojax.report.tables import Paired

_VANILLA, _CURED = "gpt2_130m_vanilla", "gpt2_130m_cured"
_PAIR = ("vanilla", "cured")
_LIMIT = Metric("3 + 3 sqrt(24 / D)", c.kurtosis_limit)
_EMBEDDED = Metric("embedded text", lambda of: float(str(of["data.kind"]) == "embedded"))
_COULD_NOT_FAIL = "below the paper's scale it could not fail"
_REST_OUTLIERS = c.REST[_VANILLA] > c.OUTLIERS


def of_layers(metric: str, words: str, of: Callable[[np.ndarray], Any]) -> Metric:
    """Returns a number that follows from a metric of every layer."""
    return Metric(words, lambda numbers: float(of(numbers.layers(metric))))


FIGURE1 = Study(
    name="figure1",
    title="Figure 1: attention map and hidden states, vanilla and cured",
    runs=lambda scale: variants(scale, ["gpt2_130m"], _PAIR),
    scales=SCALES,
    models=lambda given: given,
    note="The paper shows a pretrained GPT2-Medium, which --model=NAME=CHECKPOINT adds to these maps, and its own "
    "model with softmax-1 and OrthoAdam.",
    columns=c.OUTCOME,
    claims=[
        retested("With softmax and Adam the first key token dominates.", c.dominated(_VANILLA), None, _COULD_NOT_FAIL,
                 c.dominated(_VANILLA) | (_EMBEDDED[_VANILLA] < 1)),
        Claim("Softmax-1, here with OrthoAdam, eliminates that dominance.",
              c.FRACTION[_CURED] <= c.FRACTION[_VANILLA] / 2, c.dominated(_VANILLA)),
        retested("With softmax and Adam the hidden states have outlier channels.", _REST_OUTLIERS, None,
                 _COULD_NOT_FAIL, _REST_OUTLIERS | (_EMBEDDED[_VANILLA] < 1)),
        Claim("OrthoAdam and softmax-1 remove them.",
              (c.FIRST[_CURED] <= _LIMIT[_VANILLA]) & (c.REST[_CURED] < c.NO_OUTLIERS), _REST_OUTLIERS),
    ],
    pictures=[pictures.Maps()],
)  # fmt: skip

_EQUAL = Metric(  # the mean of 1 / (t + 1) over queries t that see all of the first keys
    "mass of a key with equal logits",
    lambda of: float(np.mean(1 / np.arange(measures.KEYS + 1, of["data.sequence_length"] + 1))),
)
_WINNER = Metric("winning key", lambda of: float(round(of["winner"])))
_WINNER_MASS, _OTHERS_MASS, *_OF_WINNER = c.shares("winner_mass", "others_mass", "winner_fraction", "winner_of_heads",
                                                   "winner_of_sequences", "largest_mass_of_sequence")  # fmt: skip


def _one_key_dominates(variant: str) -> Expr:
    return (_WINNER_MASS[variant] > 2 * c.largest(_EQUAL[variant], _OTHERS_MASS[variant])).in_every_seed()


def _first_key_wins(variant: str) -> Expr:
    return (abs(_WINNER[variant]) <= 0).in_every_seed()


def _equally_often(relaxed: Result) -> bool:
    """P of the exact multinomial test that each key wins equally often is at least 0.05."""
    winners = np.bincount([round(key) for key in relaxed.by_seed("winner").values()], minlength=measures.KEYS)
    return measures.uniformity_p_value(winners.tolist()) >= 0.05


def _enough_seeds(relaxed: Result) -> bool:
    """So many seeds with one winner would refute it."""
    return measures.KEYS ** (1 - len(relaxed.by_seed("winner"))) < 0.05


def _first_keys(results: Results) -> list[Picture]:
    relaxed = results["relaxed"]
    panels = {f"seed {seed}": relaxed.arrays("first_keys", seed)["map"] for seed in list(relaxed.seeds)[:5]}
    drawn = maps(panels, x_label="key position", y_label="query position", value_label="attention weight", log=True)
    words = "mean over heads, layers and held-out sequences; the first ten tokens see each other"
    return [Picture("relaxed_attention", f"Attention on the first keys, {words}.", drawn)]


_BOTH = _one_key_dominates("relaxed") & _one_key_dominates("causal")
FIGURE2 = Study(
    name="figure2",
    title="Figure 2: the first ten tokens see each other; which of them dominates attention",
    runs=lambda scale: {
        "relaxed": replace(base_run(scale), {"data.bos": False, "model.relaxed_causal_tokens": measures.KEYS}),
        "causal": replace(base_run(scale), {"data.bos": False}),
    },
    scales=SCALES,
    seeds=(0, 1, 2, 3, 4),
    measures=(measures.FIRST_KEYS,),
    note="Softmax and Adam; targets that the relaxed mask shows enter neither the loss nor either perplexity. Rows "
    "have no BOS, as in the paper: it would be privileged by what it is. Masses are of queries after the first ten.",
    columns=["perplexity_after_first_keys winner", _WINNER_MASS, _OTHERS_MASS, *_OF_WINNER],
    claims=[
        Claim("One of the first 10 tokens still dominates (section 3.2, Figure 2).",
              _one_key_dominates("relaxed"), _one_key_dominates("causal")),
        Claim("It is the mask that privileges the first token.",
              _first_key_wins("causal") & ~_first_key_wins("relaxed"), _BOTH),
        Claim("Which of the 10 it is, is uniformly distributed ('this happens with uniform distribution').",
              c.check(_equally_often, "relaxed"), _BOTH & c.check(_enough_seeds, "relaxed")),
    ],
    pictures=[_first_keys],
)  # fmt: skip

_SIZES, _SAMPLES, _DRAWS = (2, 3, 64, 768), 256, 16


def rotated_ratios(seed: int) -> Iterator[Row]:
    """Yields the mean of max|y| / ||y|| after each rotation, with the rest and for only the dominant component."""
    ratio = jax.jit(norm_ratio)
    for size in _SIZES:
        x, spikes = rotations.spiked_vectors(0.0, size, _SAMPLES, seed)
        x = 0.1 * x / np.linalg.norm(x, axis=-1, keepdims=True)
        x[np.arange(_SAMPLES), spikes] += 1.0
        for rotation in rotations.ROTATIONS:
            # A small Haar matrix is one draw of few angles; every column of a large one is as good as a draw.
            draws = _DRAWS if rotation == "haar" and size < 8 else 1
            found = []
            for draw in range(draws):
                part = slice(draw * _SAMPLES // draws, (draw + 1) * _SAMPLES // draws)
                both = np.concatenate([x[part], np.eye(size)[spikes[part]]])
                one_seed = (seed * _DRAWS + draw) % 2**32
                found.append(np.asarray(ratio(rotations.rotate(both, np.tile(spikes[part], 2), rotation, one_seed))))
            mean, alone = np.concatenate([of.reshape(2, -1) for of in found], axis=1).mean(1)
            metrics = {"norm_ratio": float(mean), "norm_ratio_alone": float(alone)}
            yield Row(f"{rotation}_D{size}", metrics, {"rotation": rotation, "size": size})


_RATIO, _ALONE = Metric("norm_ratio"), Metric("norm_ratio_alone")
FIGURE3 = Study(
    name="figure3",
    title="Figure 3: a rotation spreads a vector over its channels",
    rows=rotated_ratios,
    note="max|y| / ||y|| of e_i + r, with a random r of length 0.1, and of e_i alone, before and after an orthogonal "
    "matrix: `aligned` makes all entries of Q e_i equal. At D = 3 there is no Hadamard matrix, but a cosine transform.",
    columns="norm_ratio norm_ratio_alone",
    claims=[
        Claim("Rotating a vector with a dominant component lowers its largest entry, with the best Q (all entries of "
              "Q e_i equal), a Hadamard and a Haar matrix.",
              c.all_of(_RATIO[f"{rotation}_*"] < _RATIO["none_*"] for rotation in rotations.ROTATIONS[1:])),
        Claim("It takes many channels: what a random rotation leaves of e_i alone in two channels and in 768.",
              (_ALONE["haar_D2"] > 0.5) & (_ALONE["haar_D768"] < 0.25),
              revised=("the first compared samples with their own exact mean, which they cannot miss",
                       Claim("", abs(_ALONE["haar_D768"] / rotations.mean_norm_ratio_of_direction(768) - 1) < 0.05))),
    ],
)  # fmt: skip


def _all_explained(vanilla: Result) -> bool:
    """All outlier weights of the MLP output, in every layer and seed, have second moments that are small outliers."""
    own, explained = (vanilla.layers(f"mlp_output_{of}_outlier_channels") for of in ("own", "explained"))
    return bool((own == explained)[own != 0].all())


def _outlier_weights(method: str, of: Sequence[Result]) -> float:
    return sum(float(r.layers("mlp_output_outlier_channels").sum()) for r in of if r.name.endswith(f"_{method}"))


def _few_outlier_weights_left(*of: Result) -> bool:
    """Cured models have at most a tenth of vanilla's outlier channels of the MLP output, over models and seeds."""
    return _outlier_weights("cured", of) <= 0.1 * _outlier_weights("vanilla", of)


_IN_MLP, _IN_ATTENTION = (
    of_layers(f"{part}_outlier_channels", f"outlier channels, {part}", np.sum) for part in channels.PARTS
)
_HIGHEST_CORRELATION = of_layers("mlp_output_rank_correlation", "largest rank correlation of a layer", np.max)
_SPREAD = Metric("mlp_output_moment_spread")
_RANK = Metric(
    "channels with larger weights, better projection, worst layer",
    lambda of: float(np.minimum(*(of.layers(f"{part}_larger_norms") for part in channels.PARTS)).max()),
)
_TOP = Metric("D / 32", lambda of: float(channels.top_count(int(of["model.d_model"]))))
FIGURE4 = Study(
    name="figure4",
    title="Figures 4 and 5: norms of the output projections by channel beside their summed second moments",
    # 130M, as in the paper; a smaller and a larger one as well if models are cheap.
    runs=lambda scale: variants(scale, ["gpt2_130m"] if scale == "paper" else MODELS[:3], _PAIR),
    scales=SCALES,
    also=("figure5",),
    measures=(channels.OUTPUT_WEIGHTS, channels.LARGEST_CHANNEL_WEIGHTS),
    note="For each output channel of the two projections that write to the residual stream: the norm of its weights "
    "and Adam's second moments of their gradients, summed. OrthoAdam's moments live in a basis of its own, in which "
    "weights are compared with them. An outlier is several scaled median deviations from the median, in logarithms.",
    columns=[f"{part}_{name}" for part in channels.PARTS for name in (
        "outlier_channels", "norm_peak", "moment_spread", "rank_correlation", "own_outlier_channels",
        "explained_outlier_channels", "larger_norms")],
    claims=[
        Claim("In all cases of large outlier weights the summed second moments are small outliers (appendix E; softmax "
              "and Adam, MLP output).", c.check(_all_explained, V),
              c.check(lambda of: bool(of.layers("mlp_output_own_outlier_channels").any()), V,
                      words="There are outlier weights"),
              added="the limit was chosen with the runs at hand; by the usual 3.5 the first report counted 0 of 70 "
              "channels"),
        Claim("Channels whose second moments are small have large weights (appendix E; softmax and Adam, MLP output).",
              (_HIGHEST_CORRELATION[V] < 0).in_every_seed()),
        Claim("OrthoAdam's moments are considerably more uniform (Figure 5).",
              (_SPREAD[C] <= 0.5 * _SPREAD[V]).in_every_seed()),
        Claim("OrthoAdam and softmax-1 remove outlier weights (Figure 5).", c.check(_few_outlier_weights_left),
              c.check(lambda *of: _outlier_weights("vanilla", of) > 0, words="Vanilla models have any")),
        Claim("Outlier weights are generally in the output layer of the MLP (appendix E; softmax and Adam).",
              ((_IN_MLP[V] > _IN_ATTENTION[V]) | ~(abs(_IN_MLP[V] + _IN_ATTENTION[V]) > 0)).in_every_seed(),
              ~((abs(_IN_MLP[V]) <= 0) & (abs(_IN_ATTENTION[V]) <= 0)).in_every_seed()),
        Claim("The largest parameters act on the channels with outliers, as the output channels of the projections "
              "(4.2; softmax and Adam).", (_RANK[V] < _TOP[V]).in_every_seed(), c.REST[V] > c.OUTLIERS),
    ],
    pictures=[channels.output_norms],
)  # fmt: skip

_V350, _C350 = "gpt2_350m_vanilla", "gpt2_350m_cured"
_WHAT, _ADDED = ("added", "mlp"), Metric("added_kurtosis_x")
_IN_BASES = {what: [f"{what}_kurtosis_{basis}" for basis in ("x", "xq", "xqt", "xv")] for what in _WHAT}


def _farthest(of: Numbers) -> float:
    ratios = [of.layers(f"{what}_kurtosis_{basis}") / of.layers(f"{what}_kurtosis_x")
              for what in _WHAT for basis in ("xq", "xqt")]  # fmt: skip
    return float(np.exp(max(np.abs(np.log(ratio)).max() for ratio in ratios)))


def _singular_excess(of: Numbers) -> float:
    return min(float((of.layers(f"{what}_kurtosis_xv") - of.layers(f"{what}_kurtosis_x")).min()) for what in _WHAT)


def _singular_kurtosis_of_gaussians(of: Numbers) -> float:
    return measures.gaussian_kurtosis(int(of["data.sequence_length"]), int(of["model.d_model"]))


_FARTHEST = Metric("factor between OrthoAdam's basis and X, farthest layer", _farthest)
_EXCESS = Metric("kurtosis of X V less that of X, smallest of the layers", _singular_excess)
_OF_GAUSSIANS = Metric("kurtosis of X V of Gaussian values", _singular_kurtosis_of_gaussians)
_XV = [of_layers(f"{what}_kurtosis_xv", f"kurtosis of X V, {what}", np.mean) for what in _WHAT]
_WRITES = _ADDED[_V350] > c.OUTLIERS
_MORE = (_ADDED[_V350] > _ADDED[_C350]).in_every_seed()
FIGURE6 = Study(
    name="figure6",
    title="Figure 6: kurtosis of each layer's output in the basis of OrthoAdam and in that of its singular vectors",
    runs=lambda scale: variants(scale, ["gpt2_350m"], ("cured", "vanilla")),
    scales=SCALES,
    measures=(measures.BASES,),
    note="X [T, D] is what a layer adds to the hidden states of one sequence (`added`), and the MLP's part alone "
    "(`mlp`). Q is OrthoAdam's matrix for the output channels of that layer's MLP output kernel (X Q^T is X in its "
    "basis), V the right singular vectors of each sequence's X.",
    columns=[*_IN_BASES["added"], *_IN_BASES["mlp"]],
    claims=[
        Claim("Outliers do not hide in OrthoAdam's basis (Figure 6).",
              (_FARTHEST[_C350] < 1.25).in_every_seed(), _WRITES),
        Claim("In all three bases the kurtosis is near that of a Gaussian, 3.",
              c.largest(*(Metric(of)[_C350] for names in _IN_BASES.values() for of in names[:3])) < c.NO_OUTLIERS,
              _WRITES),
        retested("A basis with larger kurtosis exists: that of the singular vectors, X V. Any matrix has one, so this "
                 "says nothing of outliers.", (_EXCESS[_C350] > 0).in_every_seed(),
                 c.smallest(*(of[_C350] for of in _XV)) > _OF_GAUSSIANS[_C350], "Gaussian values met it as well"),
        Claim("The vanilla model's layers write outliers.", _WRITES & _MORE,
              revised=("it was judged only if it is true", Claim("", _MORE, _WRITES))),
    ],
    pictures=[pictures.ByLayer(" ".join(names), y_scale="log", references={"Gaussian": c.GAUSSIAN},
                               name=f"kurtosis_in_bases_{what}") for what, names in _IN_BASES.items()],
)  # fmt: skip

# Figures 7 to 26 and appendix I: the paper speaks of 'general trends', so claims hold if they do in most of the models.
_FRACTIONS = ByLayer("first_attention_fraction")
_DOMINATED = {of: c.peak(_FRACTIONS[of]) > 2 * c.CHANCE[of] for of in (V, O)}


def _first(layers: Expr) -> Expr:
    return c.function("first layer", lambda of: of[0], layers)


def _rises(layers: Expr) -> Expr:
    with_depth = lambda of: channels.correlation(np.arange(len(of)), of, of_ranks=True)  # noqa: E731
    return c.function("rank correlation with depth", with_depth, layers) > 0


def _grows(layers: Expr) -> Expr:
    # Less is not growth: outliers of the first layer stay in the residual stream, and noise decides which has most.
    return _rises(layers) & (c.peak(layers) >= 1.25 * _first(layers))


def _dominance() -> list[Claim]:
    """Returns the claims of appendix I.1: low at first, a peak in the middle, less at the end; none with softmax-1."""
    claims = []
    for of, words in ((V, "softmax and Adam"), (O, "softmax and OrthoAdam")):
        layers = _FRACTIONS[of]
        last = c.function("last layer", lambda of: of[-1], layers)
        inside = c.function("the largest is neither first nor last", lambda of: 0 < of.argmax() < len(of) - 1, layers)
        claims += [
            Claim(f"With {words}, dominance begins low and rises to a peak in the middle layers.",
                  inside & (_first(layers) < c.peak(layers) / 2), _DOMINATED[of], most=True),
            Claim(f"With {words}, dominance falls in the final layers.", last < c.peak(layers), _DOMINATED[of],
                  most=True),
        ]  # fmt: skip
    for words, before, after in (("Adam", V, S), ("OrthoAdam", O, C)):
        left = c.peak(_FRACTIONS[after]) <= c.peak(_FRACTIONS[before]) / 2
        says = f"With {words}, softmax-1 removes dominance in every layer."
        claims.append(Claim(says, left, _DOMINATED[before], most=True))
    return claims


def _growth(metric: str, words: str, limit: Metric) -> list[Claim]:
    """Returns the claims of appendices I.2 and I.3: growth with Adam, from lower with OrthoAdam, none with both."""
    of = ByLayer(metric)
    above = {name: c.peak(of[name]) > limit[name] for name in (V, S, O)}
    lower = _first(of[O]) < _first(of[V])
    why = "a largest layer 1% above the first met it"
    all_but_last = c.function("largest of all layers but the last", lambda layers: layers[:-1].max(initial=0), of[C])
    return [
        *(Claim(f"With {method}, the {words} grows with depth.", _grows(of[name]), above[name], most=True,
                revised=(why, Claim("", _rises(of[name]), above[name], most=True)))
          for name, method in ((V, "softmax and Adam"), (S, "softmax-1 and Adam"))),
        Claim(f"With OrthoAdam alone the {words} grows as well, from a lower start than with Adam.",
              _grows(of[O]) & lower, above[V], most=True,
              revised=(f"{why}, and it was judged only in models in which OrthoAdam leaves something",
                       Claim("", _rises(of[O]) & lower, above[O], most=True))),
        Claim(f"With both the {words} stays that of a Gaussian vector in every layer but the last; the paper sees "
              "small rises in the last layers of two of five models.", all_but_last <= limit[V], above[V]),
    ]  # fmt: skip


def _ratio_limit(of: Numbers) -> float:
    return 1.5 * rotations.mean_norm_ratio_of_direction(int(of["model.d_model"]))


def _max_abs() -> list[Claim]:
    """Returns the claims of appendices I.4 and J: outliers arise early and persist; both methods shrink them."""
    of = ByLayer("max_abs_first")
    outliers = c.peak(ByLayer("kurtosis_first")[V]) > _LIMIT[V]
    # From layer L / 4 of L on, rounded down, without the last.
    later = c.function("smallest from L / 4 on", lambda of: of[len(of) // 4 : -1].min(initial=np.inf), of[V])
    smaller = c.function("smaller in every layer", lambda after, before: bool((after < before).all()), of[C], of[V])
    return [
        Claim("With softmax and Adam, outliers of the first token are established in early layers and persist.",
              later >= c.peak(of[V]) / 2, outliers, most=True),
        Claim("Softmax-1 with OrthoAdam has smaller activations of the first token in every layer.",
              smaller.in_every_seed(), outliers,
              revised=("means over seeds hid that GPT2 60M has outliers in one seed of three",
                       Claim("", smaller, outliers, most=True))),
    ]  # fmt: skip


def _study(figure: int, metric: str, words: str, claims: Sequence[Claim], y_scale: Scale, **references: float) -> Study:
    """Returns five figures of one metric: for four of our models, two sizes in the third, and for given models."""
    at = [of_layers(metric, f"x = {x:.2g}", lambda of, x=x: of[round(x * (len(of) - 1))]) for x in (0, 1 / 3, 2 / 3, 1)]
    at += [of_layers(metric, "largest", np.max), of_layers(metric, "in layer", lambda of: np.argmax(of) + 1)]
    return Study(
        name=f"figure{figure}",
        title=f"Figures {figure} to {figure + 4}: {words}, layer by layer",
        runs=variants,
        scales=SCALES,
        also=tuple(f"figure{n}" for n in range(figure + 1, figure + 5)),
        models=lambda given: given,
        note=f"The runs of Table 2; figure {figure + 4} is of models given with --model. Layer m of L, counted from 0, "
        "is at x = m / (L - 1); columns are of the layers nearest to x.",
        columns=at,
        claims=claims,
        pictures=[pictures.ByLayer(metric, f"{model}_*", y_scale, references, True, f"figure{figure}_{model}")
                  for model in MODELS],
    )  # fmt: skip


FIGURE7 = _study(7, "first_attention_fraction", "first-token dominance", _dominance(), "linear")
_KURTOSIS = _growth("kurtosis_first", "kurtosis of the first token", _LIMIT)
FIGURE12 = _study(12, "kurtosis_first", "kurtosis, first token", _KURTOSIS, "log", Gaussian=c.GAUSSIAN)
_RATIOS = _growth("norm_ratio_first", "norm ratio of the first token",
                  Metric("1.5 times a Gaussian vector's mean ratio", _ratio_limit))  # fmt: skip
FIGURE17 = _study(17, "norm_ratio_first", "max|x| / l2 norm, first token", _RATIOS, "linear")
FIGURE22 = _study(22, "max_abs_first", "max |activation|, first token", _max_abs(), "log")

_SETS = ("largest_channel", "largest_channels")  # the largest, and a 32nd of all


def _same_channels(overlap: str, what: str) -> Claim:
    """Claims 'the same feature channels always exhibit outlier activations' (section 2.2), for softmax and Adam."""
    pairs = [(Metric(f"{of}_{overlap}")[_VANILLA], Metric(f"{of}_{overlap}")[_CURED]) for of in _SETS]
    shared, cured = c.largest(*(v for v, _ in pairs)), c.largest(*(x for _, x in pairs))
    return Claim(
        f"The same channels are the outliers for every {what} (2.2).",
        c.any_of(v >= c.largest(0.8, x + 0.1) for v, x in pairs), _REST_OUTLIERS & c.any_of(x < 0.8 for _, x in pairs),
        revised=("it was enough to share what a model without outliers shares as well",
                 Claim("", shared >= 0.8, _REST_OUTLIERS & (cured < 0.8))),
    )  # fmt: skip


def _four_maps(of: str, caption: str, **look: Any) -> Callable[[Results], list[Picture]]:
    """Returns a picture for each model: maps of one held-out sequence, mean over layers and three single layers."""
    titles = ("mean over layers", "first layer", "a quarter of the layers", "three quarters of the layers")

    def draw(results: Results) -> list[Picture]:
        drawn = []
        for result in results.finished:
            panels, ticks = result.arrays("maps")[of], None
            if of == "hidden":  # only the channels with the largest values
                shown = np.sort(np.argsort(-panels[0].max(axis=0), kind="stable")[:16])
                panels, ticks = panels[:, :, shown], [str(channel) for channel in shown]
            figure = maps(dict(zip(titles, panels, strict=True)), x_ticks=ticks, **look)
            drawn.append(Picture(f"{of}_{result.name}", f"{result.name}: {caption}.", figure))
        return drawn

    return draw


_GIVEN = ("The paper shows pretrained models here; --model=NAME=CHECKPOINT adds any. Without one the report is of GPT2 "
          "130M, or of its stand-in at this scale.")  # fmt: skip
FIGURE27 = Study(
    name="figure27",
    title="Figures 27 to 33: hidden states in the largest channels, and whether these are the same everywhere",
    runs=lambda scale: variants(scale, ["gpt2_130m"], _PAIR),
    scales=SCALES,
    also=tuple(f"figure{n}" for n in range(28, 34)),
    models=lambda given: given,
    measures=(channels.LARGEST_CHANNELS,),
    note=f"{_GIVEN} Overlap is the share that two sets of channels have in common, mean over pairs of sequences, of "
    "positions, or of layers. A set is the largest channel alone, or a 32nd of all channels.",
    columns=[*(f"{of}_{key}" for of in _SETS for key in ("between_sequences", "between_positions", "between_layers",
                                                         "by_chance")), "kurtosis_rest"],
    claims=[_same_channels(overlap, what) for overlap, what in {
        "between_sequences": "input", "between_positions": "position", "between_layers": "layer"}.items()],
    pictures=[_four_maps("hidden", "|hidden state| of one held-out sequence in the 16 channels of the largest values",
                         x_label="channel", y_label="position", value_label="|hidden state|")],
)  # fmt: skip
_MASSES = ByLayer("first_attention_mass")
_PERSISTS = c.function("smallest from the third layer on", lambda layers: layers[2:].min(initial=np.inf),
                       _MASSES[_VANILLA])  # fmt: skip
_SEEN = c.peak(_MASSES[_VANILLA]) > 2 * c.CHANCE[_VANILLA]
FIGURE34 = Study(
    name="figure34",
    title="Figures 34 to 40: attention maps, mean over layers and three single layers",
    runs=lambda scale: variants(scale, ["gpt2_130m"], _PAIR),
    scales=SCALES,
    also=tuple(f"figure{n}" for n in range(35, 41)),
    models=lambda given: given,
    note=_GIVEN,
    columns="first_attention_fraction first_attention_mass",
    claims=[
        Claim("With softmax and Adam dominance is established after the first or second layer and persists (K).",
              _PERSISTS >= c.peak(_MASSES[_VANILLA]) / 2, _SEEN),
        Claim("With softmax-1 and OrthoAdam no layer has it.",
              c.peak(_MASSES[_CURED]) <= c.peak(_MASSES[_VANILLA]) / 2, _SEEN),
    ],
    pictures=[_four_maps("attention", "attention on one held-out sequence, mean over heads", x_label="key position",
                         y_label="query position", value_label="weight", log=True),
              pictures.ByLayer(c.MASS.name, normalized=True)],
)  # fmt: skip

_LOSS = Metric("held-out loss (nats)", lambda of: float(np.log(c.PPL(of))))
_NATS, _JUMP, _RISE = Metric("loss_nats"), Metric("loss_jump_nats"), Metric("validation_rise_nats")

FIGURE41 = Study(
    name="figure41",
    title="Figures 41 to 44: training curves of the four methods",
    runs=variants,
    scales=SCALES,
    also=("figure42", "figure43", "figure44"),
    measures=(measures.STABILITY,),
    paper=models.TABLE_2,
    note=ABOUT,
    columns=[_LOSS, "loss_spikes loss_jump_nats validation_rise_nats"],
    tables=[Paired("Final loss less that of softmax + Adam", V, "*_softmax1 *_orthoadam *_cured", (), [_LOSS])],
    claims=[
        Claim("Training is stable with every method (3.2, L).",
              ((_JUMP["*"] <= 0.5) & (_RISE["*"] <= 0.02)).in_every_seed(),
              revised=("a jump of a nat is a perplexity 2.7 times as high; of the committed runs the count of such "
                       "jumps was kept, and not the logs that the present criterion reads",
                       Claim("", abs(Metric("loss_spikes")["*"]) <= 0))),
        *(Claim(f"{words} converges to a loss similar to that of softmax + Adam.",
                _NATS[f"*_{method}"] - _NATS[V] <= 0.02,
                revised=("0.05 nats are three times the largest difference of the paper",
                         Claim("", _NATS[f"*_{method}"] - _NATS[V] <= 0.05)))
          for method, words in {"softmax1": "softmax-1 + Adam", "orthoadam": "softmax + OrthoAdam",
                                "cured": "softmax-1 + OrthoAdam"}.items()),
    ],
    pictures=[pictures.ByStep("loss_nats", rows=f"{model}_*", name=f"training_curves_{model}") for model in MODELS],
)  # fmt: skip
