"""Moved to `orthojax.config`."""

from orthojax.config.fields import *  # noqa: F403
