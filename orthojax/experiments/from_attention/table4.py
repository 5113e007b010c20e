"""Table 4: training steps a second and memory of softmax with Adam and of softmax-1 with OrthoAdam. No training."""

from typing import Any

from orthojax.experiments.from_attention.models import MODELS, SCALES, grid, variant_name
from orthojax.experiments.from_attention.paper_tables import TABLE_4
from orthojax.experiments.reporting.page import Claim, Report, Table, verdict
from orthojax.experiments.study.study import Experiment, Study
from orthojax.formatting import number
from orthojax.model import parameter_count

_METHODS = ("vanilla", "cured")
# Small and tolerable is what the paper's own worst rows are: 7.5 steps a second against 6.0, and 65.0 GB against 61.9.
_TIME, _MEMORY = 1.25, 1.05
_PAPER_TOKENS = 512 * 256  # of a step, for all models together


def _reference(name: str) -> str:
    """The variant that another one's time is relative to."""
    return variant_name(name.removesuffix("_cured").removesuffix("_vanilla"), "vanilla")


def _costs(study: Study, model: str) -> list[dict[str, Any]]:
    """Of softmax with Adam and of softmax-1 with OrthoAdam; empty where the two did not run."""
    costs = [study.results["costs"][variant_name(model, method)] for method in _METHODS]
    return [] if any("failed" in cost for cost in costs) else costs


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:,.1f}"


def _ratio(costs: list[dict[str, Any]], key: str) -> float | None:
    vanilla, cured = (cost[key] for cost in costs)
    return None if None in (vanilla, cured) else cured / vanilla


def _ratio_text(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.3f}"


def _paper(label: str, key: str) -> float | None:
    if (label, "cured") not in TABLE_4:
        return None
    return TABLE_4[label, "cured"][key] / TABLE_4[label, "vanilla"][key]


def _tables(study: Study) -> list[Table]:
    speed, memory = [], []
    for model, label in MODELS.items():
        costs = _costs(study, model)
        in_paper = [
            "" if ratio is None else f"{ratio:.3f}"
            for ratio in (_paper(label, key) for key in ("steps_per_second", "memory_gb"))
        ]
        if not costs:
            speed.append([label, *["failed"] * 4, in_paper[0]])
            memory.append([label, *["failed"] * 6, in_paper[1]])
            continue
        per_second = [number(1 / cost["step_seconds"]) for cost in costs]
        median, lower, upper = costs[1]["step_ratio"]
        # Quartiles of times change places as those of speeds.
        speeds = f"{1 / median:.2f} ({1 / upper:.2f} to {1 / lower:.2f})"
        speed.append([label, *per_second, speeds, f"{median:.2f}", in_paper[0]])
        cells = []
        for key in ("program_bytes", "optimizer_state_bytes"):
            cells += [*(_size(cost[key]) for cost in costs), _ratio_text(_ratio(costs, key))]
        memory.append([label, *cells, in_paper[1]])
    methods = ("softmax + Adam", "softmax-1 + OrthoAdam")
    return [
        Table(
            "Training steps a second, median",
            ["", *methods, "ratio: median (quartiles)", "of the times", "paper: ratio"],
            speed,
        ),
        Table(
            "Memory in MB: all that the compiled training step needs, and the optimizer's state within it",
            [
                "",
                *(f"step, {method}" for method in methods),
                "ratio",
                *(f"state, {method}" for method in methods),
                "ratio of states",
                "paper: ratio of GPU memory",
            ],
            memory,
        ),
    ]


def _claims(study: Study) -> list[Claim]:
    measured = {label: costs for model, label in MODELS.items() if (costs := _costs(study, model))}
    times = {label: costs[1]["step_ratio"][0] for label, costs in measured.items()}
    memory = {label: _ratio(costs, "program_bytes") for label, costs in measured.items()}
    states = {label: _ratio(costs, "optimizer_state_bytes") for label, costs in measured.items()}
    config = study.variants[0].config
    tokens = config.train.batch_size * config.data.sequence_length
    share = (
        f" A step here has {tokens:,} tokens, the paper's {_PAPER_TOKENS:,}. What an optimizer does is the same for "
        f"any number of tokens, so its share of the step is so much larger here."
        if tokens < _PAPER_TOKENS
        else ""
    )

    def told(ratios: dict[str, Any]) -> str:
        return ", ".join(f"{label} {_ratio_text(ratio)}" for label, ratio in ratios.items())

    known = [ratio for ratio in memory.values() if ratio is not None]
    return [
        Claim(
            verdict(max(times.values()) <= _TIME),
            f"softmax-1 with OrthoAdam takes little more time. Time of a training step against softmax with Adam, "
            f"median: {told(times)}. The paper: 1.17, 1.25, 1.10, 0.91 for GPT2 60M to 1.4B.{share} (criterion: at "
            f"most {_TIME} for every model, the paper's largest).",
        ),
        Claim(
            verdict(all(ratio <= _MEMORY for ratio in known), visible=bool(known)),
            f"It takes little more memory. All that the compiled step needs: {told(memory)}; the optimizer's state "
            f"alone: {told(states)}, since a Hadamard rotation keeps no matrix, where the paper keeps a dense one for "
            f"every parameter. The paper: 1.02, 1.03, 1.02, 1.05 (criterion: at most {_MEMORY} for every model, the "
            f"paper's largest; visible where the compiler tells).",
        ),
    ]


def _failures(study: Study) -> list[str]:
    costs = study.results["costs"]
    return [f"{name}: {cost['failed']}" for name, cost in costs.items() if "failed" in cost]


def report(study: Study) -> Report:
    """Speed and memory of every model, and their ratios beside the paper's."""
    config, provenance = study.variants[0].config, study.results["provenance"]
    sizes = ", ".join(
        f"{label} {parameter_count(v.config.model):,}"
        for label, v in zip(MODELS.values(), study.variants[::2], strict=True)
    )
    return Report(
        title="Table 4: time and memory of a training step",
        summary=[
            f"One training step of {config.train.batch_size} x {config.data.sequence_length} random tokens, with "
            f"softmax and Adam and with softmax-1 and OrthoAdam ({config.optim.rotation.kind} rotation). Parameters: "
            f"{sizes}. The two steps of a model are timed in turn, so that what else the machine does falls on both, "
            f"and a ratio is of two times that follow each other. Nothing is trained; seeds do not matter.",
            *_failures(study),
        ],
        claims=_claims(study) if any(_costs(study, model) for model in MODELS) else [],
        tables=_tables(study),
        pictures=[],
        notes=[
            f"python launch/reproduce.py --experiment={study.experiment.name} --scale={study.scale}",
            f"{provenance['date']}, {provenance['device']}, "
            + ", ".join(f"{name} {version}" for name, version in provenance["versions"].items()),
            "costs.json keeps the measurement: remove it to measure again",
            "memory is what the compiler counts on one device: arguments, results and temporaries, memory that is "
            "given over counted once",
        ],
        links=[("results.json", "results.json"), ("costs.json", "costs.json"), ("report.md", "report.md")],
    )


EXPERIMENT = Experiment(
    name="table4",
    title="time and memory of a training step; trains nothing",
    scales={scale: lambda scale=scale: grid(scale, methods=_METHODS) for scale in SCALES},
    report=report,
    cost_reference=_reference,
    trains=False,
)
