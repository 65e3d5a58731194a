"""Configurations: presets, files, overrides, and the sentence that a mistake gets."""

import re
from pathlib import Path
from typing import Any

import pytest

from mambacl.config import RunConfig, from_dict, parse_yaml, preset_names, read_preset, resolve
from mambacl.errors import UserError
from mambacl.nullspace import SETTINGS
from mambacl.training.recipe import RECIPES


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_says_what_to_expect(name: str) -> None:
    config = resolve(name, {})
    assert config.name == name and config.folder == Path("runs") / f"{name}-{config.method}-{config.seed}"
    import mambacl

    text = (Path(mambacl.__file__).parent / "presets" / f"{name}.yaml").read_text()
    head = text.split("\n\n")[0]
    assert head.startswith(f"# mambacl train {name}") and "minutes" in head and "Expect" in head


def test_the_defaults_are_the_papers() -> None:
    config = resolve(None, {})
    assert config == RunConfig() and config.nullspace == SETTINGS["paper"] and config.training == RECIPES["paper"]


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = resolve("demo", {"stream.order": [1, 0, *range(2, 10)], "training": {"lr": 1e-7}, "seed": 4})
    assert from_dict(parse_yaml(config.as_yaml(), "config.yaml")) == config
    path = tmp_path / "mine.yaml"
    path.write_text(config.as_yaml())
    assert resolve(path, {}) == config


def test_naming_a_setting_or_recipe_starts_anew_from_it() -> None:
    assert resolve("demo", {}).nullspace != SETTINGS["paper"]
    assert resolve("demo", {"setting": "public-code"}).nullspace == SETTINGS["public-code"]
    changed = resolve("demo", {"setting": "public-code", "nullspace": {"eta": 0.9}, "recipe": "public-code"})
    assert changed.nullspace == SETTINGS["public-code"].override(eta=0.9)
    assert changed.training == RECIPES["public-code"]


def test_a_rule_is_changed_in_part() -> None:
    config = resolve(None, {"nullspace": {"A": {"trains": False}}})
    assert config.nullspace.A.feature == "delta" and not config.nullspace.A.trains


@pytest.mark.parametrize("text", ["lr: 1e-3", "lr: 1.0E-3", "lr: .001", "lr: 0.001"])
def test_numbers_as_people_write_them(text: str) -> None:
    assert parse_yaml(text, "file") == {"lr": 0.001}
    assert parse_yaml("a: 1e\nb: 12\nc: 1.2.3", "file") == {"a": "1e", "b": 12, "c": "1.2.3"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"trainig": {}}, r"no option 'trainig'\. Did you mean 'training'"),
    ({"training": {"lrr": 1}}, r"no option 'training\.lrr'\. Did you mean 'training\.lr'"),
    ({"training": 3}, r"'training' is a group"),
    ({"training.lr": "fast"}, r"training\.lr takes a number, got 'fast'"),
    ({"training.optimizer": "lion"}, r"training\.optimizer takes one of adam, adamw, sgd, got 'lion'"),
    ({"stream.tasks": "many"}, r"stream\.tasks takes a whole number or a list of whole numbers, got 'many'"),
    ({"setting": "papr"}, r"no setting 'papr'\. Did you mean 'paper'"),
    ({"recipe": "public"}, r"no recipe 'public'"),
    ({"nullspace.eta": 1.5}, r"eta must lie between 0"),
    ({"nullspace.rank": "knee"}, r"no rank rule 'knee'"),
    ({"nullspace.rank": "energy:2"}, r"share between 0 and 1"),
    ({"training.passes": 0}, r"training\.passes must be at least 1"),
    ({"device": "tpu"}, r"device must be"),
    ({"seed": -1}, r"seed must be at least 0"),
    ({"pretrained": None}, r"pretrained"),
    ({"precision": "fp16"}, r"precision takes one of auto, float32, tf32, bf16"),
]


@pytest.mark.parametrize(("overrides", "sentence"), WRONG)
def test_each_mistake_gets_one_sentence(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        resolve("demo", overrides)
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'dmeo' is neither a preset nor a file\. Did you mean 'demo'"):
        read_preset("dmeo")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1, 2\nb: 3")
    with pytest.raises(UserError, match=r"broken\.yaml, line 2 is not valid YAML"):
        read_preset(broken)
    broken.write_text("- a list")
    with pytest.raises(UserError, match="must hold options"):
        read_preset(broken)
    for text in ("name: 2024-13-45", "a: &a [*a]"):
        broken.write_text(text)
        with pytest.raises(UserError, match="not valid YAML"):
            read_preset(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        read_preset(broken)


def test_yaml_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(UserError, match="not valid YAML"):
        parse_yaml(f"a: !!python/object/apply:pathlib.Path.touch [{mark}]", "file")
    assert not mark.exists()


def test_no_placeholder_is_left_in_the_documentation() -> None:
    root = Path(__file__).parents[1]
    for path in [root / "README.md", *(root / "docs").glob("*.md"), *(root / "src/mambacl/presets").glob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("DEMO_", "SPEED_TABLE", "TODO", " xx")), path
        for link in re.findall(r"\]\(((?:docs/)?[\w/.-]+)\)", text):
            assert (path.parent / link).exists(), f"{path}: {link}"
