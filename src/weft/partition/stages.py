"""The former name of `weft.plan.stages`."""

from weft.plan.stages import *  # noqa: F403
