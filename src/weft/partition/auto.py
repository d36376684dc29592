"""The former name of `weft.plan.option` and `weft.plan.search`."""

from weft.plan.option import *  # noqa: F403
from weft.plan.search import *  # noqa: F403
