"""The settings of ``tsm.init``: taken, or refused by name."""

from __future__ import annotations

import json

import pytest

from weft.compat.torch_sagemaker import settings
from weft.compat.variables import DEFAULTS, PARAMETERS
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"partitions": 2}, r"no setting 'partitions': delete it, or take one of hybrid_shard_degree, "),
        (
            {"hybrid_shard_degree": 3},
            r"hybrid_shard_degree is 3: give 0, or a number that divides the 4 ranks",
        ),
        ({"hybrid_shard_degree": -1}, r"hybrid_shard_degree is -1"),
        ({"hybrid_shard_degree": True}, r"hybrid_shard_degree is True: give a whole number"),
        ({"sm_activation_offloading": 1}, r"sm_activation_offloading is 1: give true or false"),
        ({"tensor_parallel_degree": 2}, r"tensor_parallel_degree is 2: .* set it to 1, or write the loop"),
        ({"context_parallel_degree": 2}, r"context_parallel_degree is 2: .* cuts sequences over ranks"),
        ({"expert_parallel_degree": 4}, r"expert_parallel_degree is 4: .* spreads experts over ranks"),
        ({"activation_loading_horizon": 0}, r"activation_loading_horizon is 0: give a number from 1 on"),
    ],
)
def test_a_setting_that_is_refused(config, told):
    with pytest.raises(ConfigError, match=told):
        settings.read(config, 4)


def test_settings_come_from_the_launch_where_the_script_gives_none(monkeypatch, tmp_path):
    monkeypatch.delenv(DEFAULTS, raising=False)
    given = json.dumps({"hybrid_shard_degree": 2, "random_seed": 3})
    (tmp_path / "settings.json").write_text(given)
    for text in (given, str(tmp_path / "settings.json")):
        monkeypatch.setenv(PARAMETERS, text)
        assert settings.read(None, 4) == settings.Settings(hybrid_shard_degree=2, random_seed=3)
    assert settings.read({}, 4) == settings.Settings()
    monkeypatch.setenv(PARAMETERS, "[1]")
    with pytest.raises(ConfigError, match=rf"{PARAMETERS} holds"):
        settings.read(None, 4)
    monkeypatch.setenv(PARAMETERS, '{"partitions": 4}')
    monkeypatch.setenv(DEFAULTS, "1")  # what weft run writes for the first version
    assert settings.read(None, 4) == settings.Settings()
