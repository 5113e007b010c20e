"""Active and dormant heads by domain of text, with intervals over windows.

Active-Dormant Attention Heads (arXiv 2410.13835), section 3: a head can be dormant on one kind of text (its weights are
on the first token and zeroing it costs nothing) and active on another.
"""

from collections.abc import Mapping

import numpy as np

from orthojax import analysis

_RESAMPLES = 1000


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95% percentile interval of the mean over the first axis, [W, ...] -> ([...], [...]), by resampling windows.

    >>> low, high = bootstrap(np.ones((10, 2)))
    >>> low.tolist(), high.tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    W = len(values)
    counts = np.random.default_rng(0).multinomial(W, np.full(W, 1 / W), _RESAMPLES)
    means = counts @ np.asarray(values, np.float64).reshape(W, -1) / W
    low, high = np.quantile(means, (0.025, 0.975), axis=0).reshape(2, *values.shape[1:])
    return low, high


def domain_metrics(
    windows: Mapping[str, Mapping[str, np.ndarray]], swept: Mapping[str, np.ndarray]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """How the heads differ between domains.

    Definitions: the active score of a head is 1 minus its mean `dormant_score` (the weight on the first token, or on
    none); `active_share` the share of queries at which it is active in the sense of `analysis.head_activity`, relative
    to its largest activity over all domains together.

    Args:
      windows: Domain -> `dormant_score` [L, W, N], `activity` [L, 1, bins, N], `loss_nats` [W].
      swept: Domain -> change of the loss of the first windows when a head is zeroed, [L, N, W'].

    Returns:
      Metrics `domain/NAME/active_score` (with `_low` and `_high`), `active_share` and `loss_nats`, and their
      `.../layer_i`; arrays `domain/NAME/active_score`, `_low`, `_high`, `active_share` [L, N], and where heads were
      swept `zeroing_cost`, `_low`, `_high` [L, N] and `active_by_window` [L, N, W'].
    """
    metrics: dict[str, float] = {}
    arrays: dict[str, np.ndarray] = {}
    histogram = np.concatenate([seen["activity"] for seen in windows.values()], axis=1)  # [L, domains, bins, N]
    shares = np.moveaxis(analysis.active_shares(histogram), -2, 0)  # [domains, L, N]
    for (name, seen), share in zip(windows.items(), shares, strict=True):
        active = 1.0 - seen["dormant_score"].astype(np.float64).swapaxes(0, 1)  # [W, L, N]
        of = {"active_score": active.mean(0), "active_share": share}
        of["active_score_low"], of["active_score_high"] = bootstrap(active)
        if name in swept:
            cost = np.moveaxis(swept[name], -1, 0)
            of["zeroing_cost"] = cost.mean(0)
            of["zeroing_cost_low"], of["zeroing_cost_high"] = bootstrap(cost)
            of["active_by_window"] = np.moveaxis(active[: len(cost)], 0, -1)
        arrays |= {f"domain/{name}/{what}": np.asarray(array, np.float32) for what, array in of.items()}
        overall = active.mean((1, 2))
        metrics[f"domain/{name}/active_score"] = float(overall.mean())
        low, high = bootstrap(overall[:, None])
        metrics[f"domain/{name}/active_score_low"], metrics[f"domain/{name}/active_score_high"] = low[0], high[0]
        metrics[f"domain/{name}/active_share"] = float(np.nanmean(share))
        metrics[f"domain/{name}/loss_nats"] = float(seen["loss_nats"].mean())
        layers = enumerate(active.mean((0, 2)))
        metrics |= {f"domain/{name}/active_score/layer_{layer}": float(value) for layer, value in layers}
    return {name: float(value) for name, value in metrics.items()}, arrays
