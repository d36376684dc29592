"""The JSON of CreateTrainingJob, as people write it."""

from __future__ import annotations

import re

import pytest

from weft.compat.debugger import read_job
from weft.compat.debugger.job import MOST_CHARACTERS, read_json
from weft.errors import ConfigError, FormatError
from weft.rules import rules

JOB = r"""
{
    "TrainingJobName": "mine", // a name
    "ProfilerConfig": {
        "S3OutputPath": "s3://bucket/path",
        "ProfilingIntervalInMilliseconds": 500,
        "ProfilingParameters": {
            "DetailedProfilingConfig": "{ \"StartStep\": 5, \"NumSteps\": 3, # in a text\n }",
            "DataloaderProfilingConfig": "{\"StartStep\": \"7\", \"MetricsRegex\": \".*\"}",
            "PythonProfilingConfig": "{\"ProfilerName\": \"cprofile\", \"StartStep\": 9, \"NumSteps\": 2}",
            "LocalPath": "/opt/ml/output/profiler/", /* local */
            "RotateMaxFileSizeInBytes": "10000000",
        },
    },
    "ProfilerRuleConfigurations": [
        {
            "RuleConfigurationName": "ProfilerReport-1",
            "RuleEvaluatorImage": "0.dkr.ecr.region/image:latest",
            "RuleParameters": {"rule_to_invoke": "ProfilerReport", "CPUBottleneck_cpu_threshold": "90"},
        },
    ],
    "DebugRuleConfigurations": [
        {"RuleConfigurationName": "VanishingGradient", "RuleParameters": {"threshold": "1e-5"}},
    ],
    "DebugHookConfig": {"CollectionConfigurations": [{"CollectionName": "losses"},],},
}
"""


def test_a_job():
    found = read_job(JOB)
    asked = rules(["CPUBottleneck_cpu_threshold=90", "VanishingGradient_threshold=1e-5"])
    assert {rule.name: rule for rule in found.rules} == {rule.name: rule for rule in asked}
    assert found.steps == ((5, 7), (7, 7), (9, 10))
    assert found.folder == "/opt/ml/output/profiler/"
    assert [note.partition(" (")[0].partition(":")[0] for note in found.notes] == [
        "tensors are not saved", "nothing is sent to a bucket",
    ]  # fmt: skip


def test_a_job_without_debugger_asks_nothing():
    found = read_job('{"TrainingJobName": "x", "DisableProfiler": true}')
    assert (found.rules, found.settings, found.enabled, found.notes) == ((), {}, False, ())


def test_both_names_of_the_duration():
    text = '{"ProfilerConfig": {"ProfilingParameters": {"StartTimeInSecSinceEpoch": 10, "%s": "5"}}}'
    for name in ("Duration", "DurationInSeconds"):
        assert read_job(text % name).seconds == ((10.0, 15.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "the job is [1]: write an object"),
        ('{"ProfilerConfig": 3}', "ProfilerConfig is 3: write an object"),
        ('{"ProfilerRuleConfigurations": {}, "ProfilerRuleConfigurations": {"a": 1}}', "write a list"),
        (
            '{"ProfilerRuleConfigurations": [{}]}',
            "ProfilerRuleConfigurations[0].RuleParameters.rule_to_invoke is None",
        ),
        ('{"DisableProfiler": "yes"}', "DisableProfiler is 'yes': write true or false"),
        (
            '{"ProfilerConfig": {"ProfilingParameters": {"DetailedProfilingConfig": "{\\"StartStp\\": 1}"}}}',
            'DetailedProfilingConfig has the key "StartStp": did you mean "StartStep"?',
        ),
        (
            '{"ProfilerConfig": {"ProfilingParameters": {"DetailedProfilingConfig": "{\\"StartStep\\": 1.5}"}}}',
            "DetailedProfilingConfig.StartStep is 1.5: write a whole number",
        ),
        (
            '{"ProfilerConfig": {"ProfilingParameters": {"DetailedProfilingConfig": "__import__(\'os\')"}}}',
            "the text is not JSON",
        ),
    ],
)
def test_what_is_refused(text: str, message: str):
    with pytest.raises((ConfigError, FormatError), match=re.escape(message)):
        read_job(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "// no comment, ]", }', {"a": "// no comment, ]"}),
        ('["\\"# in a text\\"", 1 , ] # out of it', ['"# in a text"', 1]),
        ("[1, /* , ] */ 2, // ]\n]", [1, 2]),
    ],
)
def test_comments_and_commas(text: str, value: object):
    assert read_json(text) == value


@pytest.mark.parametrize(
    "text", ['{"a": "', '"\\', "/* never ends", "[1,,]", "{'a': 1}", "", '"\\"' * 200_000]
)
def test_what_is_no_json(text: str):
    with pytest.raises(FormatError):
        read_json(text)


def test_a_text_that_is_too_long():
    with pytest.raises(FormatError, match="is it the right file"):
        read_json(" " * (MOST_CHARACTERS + 1))
