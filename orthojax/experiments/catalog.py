"""Every study by name."""

import dataclasses
import importlib

from orthojax.errors import UserError, nearest
from orthojax.experiments.active_dormant import STUDIES as ACTIVE_DORMANT
from orthojax.experiments.from_attention import STUDIES as FROM_ATTENTION
from orthojax.experiments.ours import STUDIES as OURS
from orthojax.experiments.study import Study

ALL: tuple[Study, ...] = (*OURS[:1], *FROM_ATTENTION, *ACTIVE_DORMANT, *OURS[1:])  # the main job comes first


def find(name: str) -> Study:
    """Returns the study with a name, or of one's own as `module:STUDY`; raises UserError for an unknown one."""
    if ":" in name:
        return _imported(name)
    known = {name: study for study in ALL for name in (study.name, *study.also)}
    if name not in known:
        allowed = f"one of the {len(ALL)} that orthojax reproduce --list shows"
        raise UserError(f"unknown experiment {name!r}", allowed=allowed, hint=nearest(name, known))
    return known[name]


def _imported(name: str) -> Study:
    module, _, variable = name.partition(":")
    allowed = "module:STUDY, an orthojax.experiments.study.Study of a module that can be imported from here"
    try:
        study = getattr(importlib.import_module(module), variable)
    except Exception as error:  # the module is the user's
        raise UserError(f"--experiment={name}: {type(error).__name__}: {error}", allowed=allowed) from error
    if not isinstance(study, Study):
        raise UserError(f"--experiment={name} is a {type(study).__name__}", allowed=allowed)
    if study.name in {taken for other in ALL for taken in (other.name, *other.also)}:
        raise UserError(f"--experiment={name} has the name of another, {study.name!r}", allowed="a name of its own")
    return dataclasses.replace(study, imported_as=name)
