"""What engines read is held against the schemas that their own packages ship."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from weft.launch import Job

TASK = Path(__file__).parents[3] / "data" / "skypilot-task-schema.json"
GIVEN: dict[str, Any] = {
    "script": "train.py", "arguments": ["--lr", "0.1", "a b", "$(HOME)"], "hosts": 2, "ranks_per_host": 4,
    "variables": {"NOTE": "a 'b' $c", "HF_TOKEN": "0123456"}, "settings": {"partitions": 4}, "gpus_per_host": 4,
}  # fmt: skip
FULL = {"engine": "kubernetes", "image": "a/b:1", "max_restarts": 3, "time_limit": timedelta(hours=2)}


def manifest(**more: Any) -> dict[str, Any]:
    return json.loads(Job(**GIVEN, **more).plan({}).files[0].text)


@pytest.mark.parametrize(
    ("form", "model"), [("trainjob", "TrainerV1alpha1TrainJob"), ("jobset", "JobsetV1alpha2JobSet")]
)
def test_the_models_of_kubeflow_lose_nothing(form: str, model: str):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    made = manifest(**FULL, form=form)
    assert getattr(models, model).from_json(json.dumps(made)).to_dict() == made


def test_the_models_of_kubernetes_lose_nothing():
    client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed")
    (replicated,) = manifest(**FULL, form="jobset")["spec"]["replicatedJobs"]
    api = client.ApiClient(client.Configuration())
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": replicated["template"]["spec"],
    }
    for kind, made in (("V1Job", job), ("V1PodTemplateSpec", job["spec"]["template"])):

        class Answer:
            data = json.dumps(made).encode()

        assert api.sanitize_for_serialization(_read(api, Answer, made, kind)) == made


def _read(api: Any, answer: type, made: dict[str, Any], kind: str) -> Any:
    try:
        return api.deserialize(json.dumps(made), kind, "application/json")
    except (AttributeError, TypeError):  # packages before 33 take an answer
        answer.data = json.dumps(made)  # type: ignore[attr-defined]
        return api.deserialize(answer, kind)


def test_skypilot_takes_the_task():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads(TASK.read_text())
    made = manifest(engine="skypilot", gpu_kind="A100")
    assert {*made["secrets"]} == {"HF_TOKEN", "WEFT_TOKEN"}
    assert made["resources"] == {"accelerators": "A100:4"}
    jsonschema.validate(made, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**made, "nodes": 2}, schema)


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_kubernetes_is_to_leave_values_of_variables_as_they_are(form: str):
    """It reads `$(NAME)` as the variable's value, and `$$` as `$`."""
    made = Job(**{**GIVEN, "variables": {"NOTE": "$(HOME) for $5"}}, **FULL, form=form).plan({})
    spec = json.loads(made.files[0].text)["spec"]
    if form == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    found = spec["trainer"]["env"] if form == "trainjob" else spec["containers"][0]["env"]
    assert {"name": "NOTE", "value": "$$(HOME) for $$5"} in found
