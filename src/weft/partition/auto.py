"""The former name of `weft.plan.auto`."""

from weft.plan.auto import *  # noqa: F403
