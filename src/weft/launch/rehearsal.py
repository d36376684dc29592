"""The question of a rehearsal: how many ranks, on which machines. `weft rehearse` hands it over in a variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from weft.errors import ConfigError

VARIABLE = "WEFT_REHEARSAL"


@dataclass(frozen=True)
class Asked:
    """The job that is rehearsed.

    Attributes:
        ranks: How many processes it would have.
        cluster: The machines, as `weft plan --cluster` takes them.
        json: The file that the answer is also written to, as JSON; none if empty.
    """

    ranks: int
    cluster: str
    json: str = ""

    def to_environ(self) -> dict[str, str]:
        """The variables of the process that runs the script."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Asked | None:
        """The question to this process; None if it does not rehearse.

        Raises:
            ConfigError: The variable holds something else.
        """
        text = environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{VARIABLE} is for weft rehearse alone: unset it") from error
