"""What a script's own configuration of Debugger asks for."""

from __future__ import annotations

import re

import pytest

from weft.compat.debugger import (
    CollectionConfig,
    DataloaderProfilingConfig,
    DebuggerHookConfig,
    DetailedProfilingConfig,
    FrameworkProfile,
    ProfilerConfig,
    ProfilerRule,
    PythonProfiler,
    PythonProfilingConfig,
    Rule,
    cProfileTimer,
    rule_configs,
    understand,
)
from weft.errors import ConfigError, UsageError
from weft.rules import RULES, rules


def of(*asked: Rule, **more):
    return {rule.name: rule for rule in understand(rules=asked, **more).rules}


def test_the_report_asks_all_rules_with_its_parameters():
    report = ProfilerRule.sagemaker(
        rule_configs.ProfilerReport(
            CPUBottleneck_cpu_threshold=80, stepoutlier_STDDEV="5", opt_out_telemetry=True
        )
    )
    found = understand(rules=[report])
    assert found.rules == rules(["CPUBottleneck_cpu_threshold=80", "StepOutlier_stddev=5"])
    assert found.notes == ("opt_out_telemetry changes nothing: weft's page asks no network",)


def test_single_rules():
    found = of(ProfilerRule.sagemaker(rule_configs.BatchSize(cpu_threshold_p95=50, scan_interval_us=1)))
    assert [*found] == ["BatchSize"]
    assert found["BatchSize"].parameters["cpu_threshold_p95"] == 50.0


def test_a_rule_beside_the_report_keeps_its_own_parameters():
    single = ProfilerRule.sagemaker(rule_configs.BatchSize(window=10))
    for asked in ((single, ProfilerRule.sagemaker(rule_configs.ProfilerReport())),) * 2:
        for order in (asked, asked[::-1]):
            found = of(*order)
            assert (len(found), found["BatchSize"].parameters["window"]) == (len(RULES), 10)


def test_rules_about_tensors_become_those_about_logged_values():
    found = of(
        Rule.sagemaker(rule_configs.vanishing_gradient(), rule_parameters={"threshold": "0.0001"}),
        Rule.sagemaker(rule_configs.exploding_tensor(), rule_parameters={"only_nan": "True"}),
        Rule.sagemaker(
            rule_configs.loss_not_decreasing(),
            rule_parameters={"num_steps": "20", "diff_percent": "1", "mode": "TRAIN"},
        ),
    )
    assert [*found] == ["VanishingGradient", "LossNotFinite", "LossNotDecreasing"]
    assert found["VanishingGradient"].parameters["threshold"] == 0.0001
    assert found["LossNotDecreasing"].parameters["num_steps"] == 20


def test_what_weft_has_no_rule_for_is_told():
    found = understand(
        rules=[
            Rule.sagemaker(rule_configs.overfit()),
            Rule.sagemaker(rule_configs.dead_relu(), actions=rule_configs.SMS("1")),
        ]
    )
    assert found.rules == ()
    assert found.notes == (
        "weft has no rule Overfit: log both losses, and compare them in TensorBoard",
        "SMS of DeadRelu: use `weft run --fail-on DeadRelu`, or the hook on_finding",
        "weft has no rule DeadRelu, which reads tensors: log a number that says the same",
    )


def test_every_name_of_rule_configs_is_understood():
    named = [
        value for name, value in vars(rule_configs).items()
        if callable(value) and name[0] != "_" and getattr(value, "__name__", "") == "<lambda>"
    ]  # fmt: skip
    assert len(named) == 33
    for make in named:
        understand(rules=[Rule.sagemaker(make())])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            rule_configs.BatchSize(cpu_treshold_p95=1),
            'BatchSize has no parameter "cpu_treshold_p95": did you mean "cpu_threshold_p95"?',
        ),
        (
            rule_configs.ProfilerReport(CPUBotleneck_threshold=1),
            'there is no rule "CPUBotleneck": did you mean "CPUBottleneck"?',
        ),
        (rule_configs.RuleConfig("Overfitt"), 'there is no rule "Overfitt": did you mean "Overfit"?'),
        (rule_configs.StepOutlier(n_outliers="__import__('os')"), "StepOutlier_n_outliers is"),
    ],
)
def test_what_is_refused(config, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        understand(rules=[ProfilerRule.sagemaker(config)])


def test_a_rule_in_an_image_of_its_own():
    with pytest.raises(UsageError, match="`weft report --rules module:Class`"):
        ProfilerRule.custom(name="mine", image_uri="x", instance_type="y")
    with pytest.raises(UsageError, match="rule_to_invoke"):
        Rule.sagemaker(rule_configs.overfit(), rule_parameters={"rule_to_invoke": "Other"})


def test_what_to_record():
    profile = FrameworkProfile(
        local_path="/opt/out",
        detailed_profiling_config=DetailedProfilingConfig(start_step=10, num_steps=3),
        dataloader_profiling_config=DataloaderProfilingConfig(),
        python_profiling_config=PythonProfilingConfig(
            python_profiler=PythonProfiler.CPROFILE, cprofile_timer=cProfileTimer.CPU_TIME
        ),
        start_step=100,
    )
    found = understand(ProfilerConfig("s3://bucket", 1000, profile))
    assert found.steps == ((7, 7), (9, 11), (10, 12))
    assert found.settings == {
        "record": "/opt/out", "record_steps": "first 20, every 10, outliers, 7-7, 9-11, 10-12"
    }  # fmt: skip
    assert (found.interval_s, found.enabled, len(found.notes)) == (1.0, True, 2)
    assert understand(ProfilerConfig(framework_profile_params=profile), disable_profiler=True).settings == {}


def test_a_range_for_all_and_the_default():
    assert understand(
        ProfilerConfig(framework_profile_params=FrameworkProfile(start_step=5, num_steps=2))
    ).steps == ((5, 6),)
    assert understand(ProfilerConfig(framework_profile_params=FrameworkProfile())).steps == ((5, 5), (9, 11))
    by_time = understand(
        ProfilerConfig(framework_profile_params=FrameworkProfile(start_unix_time=100, duration=50))
    )
    assert (by_time.steps, by_time.seconds, len(by_time.notes)) == ((), ((100.0, 150.0),), 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DetailedProfilingConfig(start_step=1, duration=5), "leave one out"),
        (
            lambda: understand(
                ProfilerConfig(framework_profile_params=FrameworkProfile(num_steps=1, duration=5))
            ),
            "leave one out",
        ),
        (lambda: DetailedProfilingConfig(start_step=-1), "start_step is -1: write a number from 0 on"),
        (lambda: DetailedProfilingConfig(num_steps="5"), "num_steps is '5'"),
        (lambda: ProfilerConfig(system_monitor_interval_millis=300), "is 300: write one of 100, 200, 500"),
    ],
)
def test_ranges_that_are_refused(make, text: str):
    with pytest.raises(ConfigError, match=text):
        make()


def test_tensors_are_not_saved():
    found = understand(
        debugger_hook_config=DebuggerHookConfig("s3://x", collection_configs=[CollectionConfig("losses")])
    )
    assert found.notes == (
        'tensors are not saved (collections losses): log numbers, `weft.log({"loss": loss})`',
    )
    assert understand(debugger_hook_config=False).notes == ()
