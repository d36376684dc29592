"""The former name of `weft.plan.explain`."""

from weft.plan.explain import *  # noqa: F403
