"""`Rule` and `ProfilerRule`: rules that are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from weft.compat.debugger.hook import CollectionConfig
from weft.compat.debugger.rule_configs import Action, RuleConfig
from weft.errors import UsageError


@dataclass(frozen=True)
class Rule:
    """A rule that is asked for, about tensors in the original.

    Attributes:
        rule: The original's name of it.
        parameters: By name.
        actions: What is to be done when it finds something.
    """

    rule: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    collections: tuple[CollectionConfig, ...] = ()

    @classmethod
    def sagemaker(
        cls,
        base_config: RuleConfig,
        name: str | None = None,
        rule_parameters: Mapping[str, object] | None = None,
        collections_to_save: Iterable[CollectionConfig] | None = None,
        actions: Action | Iterable[Action] | None = None,
        **places: Any,
    ) -> Rule:
        """One of the original's rules; names of outputs (``places``) mean nothing here."""
        given = dict(rule_parameters or {})
        if "rule_to_invoke" in given:
            raise UsageError("rule_parameters has rule_to_invoke: the base_config says which rule it is")
        return cls(
            base_config.rule,
            {**base_config.parameters, **given},
            (actions,) if isinstance(actions, Action) else tuple(actions or ()),
            tuple(collections_to_save or ()),
        )

    @classmethod
    def custom(cls, name: str, *_: Any, **__: Any) -> NoReturn:
        """Refused: a rule of one's own is no image here."""
        raise UsageError(
            f'the rule "{name}" runs in an image of its own: write it as a class of ten lines, and give it to '
            "`weft report --rules module:Class`"
        )


class ProfilerRule(Rule):
    """A rule of the profiler that is asked for."""
