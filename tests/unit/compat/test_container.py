"""Variables of SageMaker's containers that have an answer on this machine, and the folders for results."""

from __future__ import annotations

import json

from weft.compat.modelparallel.container import container_environ, folders


def test_what_is_set_stays_and_no_data_is_invented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    added = container_environ({"SM_NUM_GPUS": "8", "SM_MODEL_DIR": "/opt/ml/model"}, 2, ["--epochs", "3"])
    assert "SM_NUM_GPUS" not in added and "SM_MODEL_DIR" not in added
    assert json.loads(added["SM_HOSTS"]) == [added["SM_CURRENT_HOST"]]
    assert json.loads(added["SM_USER_ARGS"]) == ["--epochs", "3"]
    assert added["SM_OUTPUT_DATA_DIR"] == str(tmp_path / "output")
    assert not [name for name in added if name.startswith(("SM_CHANNEL", "SM_HP"))]
    assert container_environ({}, 4, [])["SM_NUM_GPUS"] == "4"


def test_folders_are_there_for_the_job_and_go_if_they_stay_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    added = container_environ({}, 1, [])
    with folders(added):
        (tmp_path / "model" / "model.pth").touch()
        assert (tmp_path / "output").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with folders(added):
        assert (tmp_path / "model" / "model.pth").exists()
    assert (tmp_path / "model" / "model.pth").exists()


def test_a_folder_that_another_job_uses_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    added = container_environ({}, 1, [])
    with folders(added):
        with folders(added):
            pass
        assert (tmp_path / "output").is_dir()
    assert not (tmp_path / "output").exists()


def test_a_file_of_that_name_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").write_text("mine")
    with folders(container_environ({}, 1, [])):
        pass
    assert (tmp_path / "model").read_text() == "mine"
