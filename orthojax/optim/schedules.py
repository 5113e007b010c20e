"""Learning-rate schedules."""

import optax


def warmup_cosine(peak: float, warmup_steps: int, steps: int, final_fraction: float = 0.0) -> optax.Schedule:
    """Makes a linear warm-up from 0 to `peak`, then half a cosine down to `final_fraction * peak`, then constant.

    For w = `warmup_steps` <= t <= T = `steps`, with f = `final_fraction`:
    peak * (f + (1 - f) (1 + cos(pi (t - w) / (T - w))) / 2).

    Args:
      peak: Largest learning rate, reached after `warmup_steps` updates.
      warmup_steps: Length of the warm-up; 0 starts at `peak`.
      steps: Length of the whole schedule.
      final_fraction: What is left of the peak at the end; 1 keeps it constant.

    Returns:
      A function from the number of updates done to the learning rate of the next one.

    Raises:
      ValueError: Unless 0 <= warmup_steps <= steps, steps >= 1 and 0 <= final_fraction <= 1.

    >>> schedule = warmup_cosine(1e-3, warmup_steps=10, steps=110, final_fraction=0.1)
    >>> print(*(f"{float(schedule(t)):.2e}" for t in (0, 5, 10, 60, 110, 200)))
    0.00e+00 5.00e-04 1.00e-03 5.50e-04 1.00e-04 1.00e-04
    """
    if steps < 1 or not 0 <= warmup_steps <= steps:
        raise ValueError(f"got {warmup_steps=}, {steps=}; allowed: 0 <= warmup_steps <= steps and steps >= 1")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"got {final_fraction=}; allowed: 0 to 1")
    decay = optax.cosine_decay_schedule(peak, max(steps - warmup_steps, 1), alpha=final_fraction)
    if warmup_steps == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])
