"""Every study by name."""

from orthojax.errors import UserError, nearest
from orthojax.experiments.active_dormant import STUDIES as ACTIVE_DORMANT
from orthojax.experiments.from_attention import STUDIES as FROM_ATTENTION
from orthojax.experiments.ours import STUDIES as OURS
from orthojax.experiments.study import Study

ALL: tuple[Study, ...] = (*OURS[:1], *FROM_ATTENTION, *ACTIVE_DORMANT, *OURS[1:])  # the main job comes first


def find(name: str) -> Study:
    """Returns the study with a name; raises UserError for an unknown one."""
    known = {name: study for study in ALL for name in (study.name, *study.also)}
    if name not in known:
        allowed = f"one of the {len(ALL)} that orthojax reproduce --list shows"
        raise UserError(f"unknown experiment {name!r}", allowed=allowed, hint=nearest(name, known))
    return known[name]
