"""Rules as users want them: parameters, rules of their own, and which findings end a program.

    {"PipelineBubble": {"warn": 0.1}}                a mapping
    ["PipelineBubble_warn=0.1"]                      texts: the rule, `_`, the parameter, `=`, the value
    --fail-on critical --fail-on StragglerRank       findings with an exit code of their own

Names are read without regard to capitals; a rule's older names (`Rule.aliases`) are known as well. A name that is not
known is refused with the nearest one that is.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from weft.errors import ConfigError, UsageError
from weft.rules.rule import Finding, Rule, Status
from weft.rules.table import RULES
from weft.untrusted import shown, shown_text, translated

_added: list[Rule] = []


def add(rule: Rule) -> None:
    """A rule of one's own, asked from now on as well; it takes the place of another one with its name."""
    if not isinstance(rule, Rule):
        raise ConfigError(
            f"{shown(rule)} is no rule: write a class that inherits from weft.rules.Rule, and give an instance"
        )
    _added[:] = [each for each in _added if each.name != rule.name] + [rule]


def rules(
    parameters: Mapping[str, Mapping[str, object]] | Iterable[str] = (), more: Iterable[Rule] = ()
) -> tuple[Rule, ...]:
    """All rules: those of weft, those added and ``more``, with these parameters.

    Raises:
        ConfigError: A name is not known, or a value is of another type than the parameter.
    """
    own = {rule.name: rule for rule in (*_added, *more)}
    known = {rule.name: rule for rule in RULES} | own
    for name, values in _by_rule(parameters, known).items():
        known[name] = changed(known[name], values)
    return tuple(known.values())


def changed(rule: Rule, values: Mapping[str, object]) -> Rule:
    """The rule with other values of some parameters; texts become what the parameter is."""
    names = {name.lower(): name for name in rule.parameters}
    found: dict[str, object] = {}
    for key, value in values.items():
        name = names.get(key.lower())
        if name is None:
            hint = nearest(key, rule.parameters) or f"it has {', '.join(rule.parameters) or 'none'}"
            raise ConfigError(f'{rule.name} has no parameter "{shown_text(key)}": {hint}')
        found[name] = _typed(f"{rule.name}_{name}", value, rule.parameters[name])
    return replace(rule, **found)


def load_rule(path: str) -> Rule:
    """The rule that an import path names: `module:Class`, or `module:instance`.

    Importing runs the module's code, so a path comes from the user's command line only.

    Raises:
        ConfigError: There is no such module or name, or it is no rule.
    """
    module, _, name = path.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(
            f'"{shown_text(path)}" names no rule: write module:Class, for example my_rules:ManySteps'
        )
    with translated(f'the rule "{shown_text(path)}" cannot be imported', ConfigError):
        found = getattr(importlib.import_module(module), name)
        rule = found() if isinstance(found, type) else found
    if not isinstance(rule, Rule):
        raise ConfigError(f'"{shown_text(path)}" is no rule: let it inherit from weft.rules.Rule')
    return rule


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names; empty if none is near."""
    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f'did you mean "{names[close[0]]}"?' if close else ""


def _by_rule(
    parameters: Mapping[str, Mapping[str, object]] | Iterable[str], known: Mapping[str, Rule]
) -> dict[str, dict[str, object]]:
    """The values for each rule, by the names that rules have."""
    names = {alias.lower(): rule.name for rule in known.values() for alias in (*rule.aliases, rule.name)}
    found: dict[str, dict[str, object]] = {}
    pairs = parameters.items() if isinstance(parameters, Mapping) else map(_split, parameters)
    for key, values in pairs:
        name = names.get(str(key).lower())
        if name is None:
            hint = nearest(str(key), [*known]) or f"the rules are {', '.join(known)}"
            raise ConfigError(f'there is no rule "{shown_text(str(key))}": {hint}')
        if not isinstance(values, Mapping):
            raise ConfigError(
                f'the parameters of {name} are {shown(values)}: write {{"{name}": {{"parameter": value}}}}'
            )
        found.setdefault(name, {}).update(values)
    return found


def _split(text: str) -> tuple[str, dict[str, object]]:
    """`Rule_parameter=value` in its three."""
    rule, parameter, value = *text.partition("=")[0].partition("_")[::2], text.partition("=")[2].strip()
    if not rule or not parameter or not value:
        raise ConfigError(
            f'"{shown_text(text)}" is no parameter of a rule: write for example PipelineBubble_warn=0.1'
        )
    return rule.strip(), {parameter.strip(): value}


def _typed(what: str, value: object, default: object) -> object:
    """A value of the default's type: from itself, or from its text."""
    refused = ConfigError(f"{what} is {shown(value)}: write {_EXPECTED.get(type(default), 'a text')}")
    if isinstance(default, bool):
        words = {"true": True, "false": False}
        if (given := words.get(str(value).lower())) is None:
            raise refused
        return given
    if not isinstance(default, (int, float)):
        if not isinstance(value, str):
            raise refused
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refused
    try:
        number = float(value)
        whole = int(value) if isinstance(default, int) and not isinstance(value, float) else 0
    except (ValueError, OverflowError):
        raise refused from None
    if not math.isfinite(number) or number < 0 or (isinstance(default, int) and number != int(number)):
        raise refused
    return (whole or int(number)) if isinstance(default, int) else number


_EXPECTED = {bool: "true or false", int: "a whole number from 0 on", float: "a number from 0 on"}


LEVELS = {
    "any": (Status.WARNING, Status.CRITICAL),
    "warning": (Status.WARNING, Status.CRITICAL),
    "critical": (Status.CRITICAL,),
}
"""Names that stand for all rules, and from which status on."""


def wanted(names: Iterable[str], rules: Iterable[Rule]) -> list[str]:
    """The names as rules and levels have them; capitals and names of older tools do not matter.

    Raises:
        UsageError: There is no such rule; the message names the nearest one.
    """
    known = {name.lower(): rule.name for rule in rules for name in (rule.name, *rule.aliases)}
    known |= {level: level for level in LEVELS}
    found = []
    for name in names:
        if name.lower() not in known:
            hint = nearest(name, known.values()) or "write warning, critical, or the name of a rule"
            raise UsageError(f'--fail-on "{shown_text(name)}": there is no such rule; {hint}')
        found.append(known[name.lower()])
    return found


def failing(findings: Iterable[Finding], names: Sequence[str]) -> list[Finding]:
    """The findings that `names`, as `wanted` gives them, ask for: of a rule that is named those from a warning on."""
    return [
        each
        for each in findings
        if any(
            each.status in LEVELS.get(name, LEVELS["any"]) and name in (each.rule, *LEVELS) for name in names
        )
    ]
