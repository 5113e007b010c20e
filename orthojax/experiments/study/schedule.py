"""Which runs of a study go to which process, and which are trained in one compiled call."""

from collections.abc import Sequence

from orthojax.config import Config
from orthojax.experiments.study.places import Place
from orthojax.experiments.study.tasks import Task
from orthojax.train import can_train_seeds, estimate

# A training step of more fills an accelerator by itself: 10 ms of the fastest GPU of the table of peaks.
_FULL_STEP_FLOPS = 1e13


def seeds_at_once(config: Config, *, accelerator: bool) -> bool:
    """Whether the seeds of a variant are to be trained in one compiled call, by `train_seeds`.

    On a CPU they are not: there the time of one call for three seeds over that of three calls is 1.00 to 1.05
    (measured on two cores, 64 to 128 channels, Adam and OrthoAdam, medians of 8 repetitions), and every core has a seed
    of its own. On an accelerator small programs wait for their launch, and the compiler runs once; how much that saves
    is not measured yet.

    Args:
      config: Of the variant.
      accelerator: Whether it runs on a GPU or a TPU.
    """
    plan = estimate(config)
    is_small = plan.tokens_per_step * plan.flops_per_token < _FULL_STEP_FLOPS
    return accelerator and is_small and can_train_seeds(config)


def grouped(tasks: Sequence[Task], where: Sequence[Place]) -> tuple[list[tuple[Task, ...]], Sequence[Place]]:
    """What is done together, in order, and where.

    Seeds of a variant are done together where `seeds_at_once` says so, unless that would leave places without work.
    Runs that are themselves spread over a mesh want all devices, and so one process.

    Args:
      tasks: All of a study.
      where: Of the workers.

    Returns:
      Groups of tasks, and the places.
    """
    meshes = [task.run.config.mesh for task in tasks]
    if any((mesh.data, mesh.fsdp, mesh.tensor) != (1, 1, 1) for mesh in meshes):
        return [(task,) for task in tasks], [Place(accelerator=where[0].accelerator)]
    groups: dict[object, list[Task]] = {}
    for task in tasks:
        variant = task.run.variant
        is_alone = variant.learning_rates or variant.checkpoint
        together = not is_alone and seeds_at_once(task.run.config, accelerator=where[0].accelerator)
        groups.setdefault(variant.name if together else (variant.name, task.run.seed), []).append(task)
    if len(groups) < min(len(where), len(tasks)):
        return [(task,) for task in tasks], where
    return [tuple(group) for group in groups.values()], where
