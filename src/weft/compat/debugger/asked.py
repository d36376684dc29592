"""Requests in a configuration of the original: rules with their parameters, and what to record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.compat.debugger.configs import (
    DebuggerHookConfig,
    FrameworkProfile,
    MetricsConfig,
    ProfilerConfig,
    Rule,
)
from weft.errors import ConfigError
from weft.rules import RULES, rules
from weft.rules import Rule as WeftRule
from weft.rules.configure import changed, nearest
from weft.untrusted import shown_text

INTERVAL_MS = 500
REPORT = "ProfilerReport"
DETAIL = "first 20, every 10, outliers"
"""Steps whose spans are kept in any case, as the setting `record_steps` says it."""
IGNORED = {
    "scan_interval_us": "weft judges whole runs",
    "opt_out_telemetry": "weft's page asks no network",
    "rule_to_invoke": "",
    "mode": "weft leaves steps out that evaluate",
    "only_nan": "infinite values count as well",
    "collection_names": "weft reads what the script logs",
    "tensor_regex": "weft reads what the script logs",
    "use_losses_collection": "weft reads what the script logs",
    "base_trial": "weft reads one run",
}
"""Parameters of the original that change nothing here, and why."""
INSTEAD = {
    "Overfit": "log both losses, and compare them in TensorBoard",
    "Overtraining": "log the validation loss, and stop by it (docs/recipes.md#early-stopping)",
    "StalledTrainingRule": "weft ends a job whose ranks stand still: the settings heartbeat_timeout, wait_timeout",
    "PoorWeightInitialization": "VanishingGradient, ExplodingGradient and LossNotDecreasing come nearest",
    "WeightUpdateRatio": "log the ratio, if the loop knows it",
    "UnchangedTensor": "VanishingGradient comes nearest",
}
"""What to use for rules of the original that weft does not have; for all others there is nothing."""
WITHOUT = (
    "AllZero", "TensorVariance", "SaturatedActivation", "DeadRelu", "ClassImbalance", "Confusion", "CheckInputImages",
    "NLPSequenceRatio", "SimilarAcrossRuns", "TreeDepth", "FeatureImportanceOverweight", "CreateXgboostReport",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """The requests of a configuration.

    Attributes:
        rules: Of weft, with their parameters; with the original's report all that weft has.
        interval_s: Between two measures of a host.
        steps: Ranges of steps to record in detail, each with its first and its last step.
        seconds: Ranges of time for that, each with its begin and its end, in seconds since 1970.
        folder: Where the recording goes, if that is a local path.
        enabled: Anything is to be recorded at all.
        notes: What was asked for and is done otherwise here, a sentence each.
    """

    rules: tuple[WeftRule, ...] = ()
    interval_s: float = INTERVAL_MS / 1000
    steps: tuple[tuple[int, int], ...] = ()
    seconds: tuple[tuple[float, float], ...] = ()
    folder: str = ""
    enabled: bool = True
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, object]:
        """For `weft.init`; empty where the configuration says nothing of it.

        Ranges of steps come beside those that weft keeps for its own rules: with the original's one step none could
        judge anything.
        """
        if not self.enabled:
            return {}
        found: dict[str, object] = {"record": self.folder} if self.folder else {}
        if self.steps:
            found["record_steps"] = ", ".join([DETAIL, *(f"{first}-{last}" for first, last in self.steps)])
        return found


def understand(
    profiler_config: ProfilerConfig | None = None,
    rules: Iterable[Rule] = (),
    debugger_hook_config: DebuggerHookConfig | bool | None = None,
    disable_profiler: bool = False,
) -> Asked:
    """The requests in the arguments of an estimator.

    Raises:
        ConfigError: A rule or a parameter is not known to the original either, or a value is wrong.
    """
    notes: list[str] = []
    asked = _rules(tuple(rules), notes)
    config = profiler_config or ProfilerConfig()
    profile = config.framework_profile_params
    steps, seconds = _ranges(profile)
    if isinstance(debugger_hook_config, DebuggerHookConfig) and debugger_hook_config.collection_configs:
        names = ", ".join(each.name for each in debugger_hook_config.collection_configs)
        notes.append(
            f"tensors are not saved (collections {shown_text(names)}): log numbers, "
            '`weft.log({"loss": loss})`'
        )
    if config.s3_output_path:
        notes.append("nothing is sent to a bucket: the recording stays in its folder")
    if config.system_monitor_interval_millis not in (None, INTERVAL_MS):
        notes.append("hosts are measured twice a second, whatever system_monitor_interval_millis says")
    if seconds:
        notes.append(
            "detail is chosen by steps, not by time: write record_steps into the watched file when it is time"
        )
    return Asked(
        asked,
        (config.system_monitor_interval_millis or INTERVAL_MS) / 1000,
        steps,
        seconds,
        profile.local_path if profile else "",
        not (disable_profiler or config.disable_profiler),
        tuple(dict.fromkeys(notes)),
    )


def _ranges(
    profile: FrameworkProfile | None,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[float, float], ...]]:
    found = profile.ranges if profile is not None else ()
    return (
        tuple(sorted({_steps(each) for each in found if each.by_step})),
        tuple(sorted({_seconds(each) for each in found if each.by_time})),
    )


def _steps(each: MetricsConfig) -> tuple[int, int]:
    first = each.start_step or 0
    return first, first + max(1, 1 if each.num_steps is None else each.num_steps) - 1


def _seconds(each: MetricsConfig) -> tuple[float, float]:
    begin = float(each.start_unix_time or 0)
    return begin, float("inf") if each.duration is None else begin + each.duration


def _rules(asked: tuple[Rule, ...], notes: list[str]) -> tuple[WeftRule, ...]:
    """Those of weft that are asked for: all with the report, else the named ones."""
    known = {name.lower(): rule for rule in RULES for name in (rule.name, *rule.aliases)}
    found: dict[str, WeftRule] = {}
    for each in asked:
        if each.actions:
            names = ", ".join(action.name for action in each.actions)
            notes.append(
                f"{names} of {each.rule}: use `weft run --fail-on {each.rule}`, or the hook on_finding"
            )
        if each.rule.lower() == REPORT.lower():
            found = {rule.name: rule for rule in _report(each.parameters, notes)} | found
            continue
        rule = known.get(each.rule.lower())
        if rule is not None:
            found[rule.name] = changed(rule, _known(rule, each.parameters, notes))
        elif each.rule in INSTEAD:
            notes.append(f"weft has no rule {each.rule}: {INSTEAD[each.rule]}")
        elif each.rule in WITHOUT:
            notes.append(
                f"weft has no rule {each.rule}, which reads tensors: log a number that says the same"
            )
        else:
            hint = nearest(each.rule, [REPORT, *(rule.name for rule in RULES), *INSTEAD, *WITHOUT])
            raise ConfigError(f'there is no rule "{shown_text(each.rule)}"' + (f": {hint}" if hint else ""))
    return tuple(found.values())


def _report(parameters: Mapping[str, object], notes: list[str]) -> tuple[WeftRule, ...]:
    """All rules, with parameters of the form `Rule_parameter`."""
    by_rule: dict[str, dict[str, object]] = {}
    names = {rule.name.lower(): rule for rule in RULES}
    for key, value in parameters.items():
        rule, _, parameter = key.partition("_")
        if key in IGNORED:
            _note_ignored(key, notes)
        elif rule.lower() in names and parameter:
            by_rule.setdefault(rule, {}).update(_known(names[rule.lower()], {parameter: value}, notes))
        else:
            by_rule.setdefault(rule, {})[parameter] = value
    return rules(by_rule)


def _known(rule: WeftRule, parameters: Mapping[str, object], notes: list[str]) -> dict[str, object]:
    """The parameters without those that change nothing here."""
    found = {}
    for key, value in parameters.items():
        if key.lower() in IGNORED and key.lower() not in rule.parameters:
            _note_ignored(key.lower(), notes)
        else:
            found[key] = value
    return found


def _note_ignored(key: str, notes: list[str]) -> None:
    if IGNORED[key]:
        notes.append(f"{key} changes nothing: {IGNORED[key]}")
