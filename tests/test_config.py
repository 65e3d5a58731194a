"""Configurations: presets, files, overrides, and the sentence that a mistake gets."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mambacl.config import RunConfig, from_dict, parse_yaml, preset_names, resolve
from mambacl.errors import UserError
from mambacl.nullspace import SETTINGS
from mambacl.training.recipe import RECIPES

GOLDENS = Path(__file__).parent / "goldens"


def flat(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{group}{key}.")
        else:
            yield group + key, value


@pytest.mark.parametrize("name", json.loads((GOLDENS / "presets.json").read_text()))
def test_a_preset_resolves_to_what_it_was_before_presets_extended_one_another(name: str) -> None:
    """The recording has all defaults, and what differs from them in each preset. Options that are newer than it must
    have their defaults."""
    recorded = json.loads((GOLDENS / "presets.json").read_text())
    expected = recorded["defaults"] | (recorded[name] if name != "defaults" else {})
    config = resolve(None if name == "defaults" else name, {})
    assert config.folder == Path("runs") / f"{config.name}-{config.method}-{config.seed}"
    found = dict(flat(config.as_dict()))
    filled = {key for key in expected if any(other.startswith(f"{key}.") for other in expected)}
    assert {key: found[key] for key in expected if key not in filled} == {
        key: value for key, value in expected.items() if key not in filled
    }
    defaults = dict(flat(RunConfig().as_dict()))
    assert all(found[key] == defaults[key] for key in found if key not in expected)


def test_no_preset_is_missing_from_the_recording() -> None:
    assert set(json.loads((GOLDENS / "presets.json").read_text())) == {"defaults", *preset_names()}


def test_a_run_folder_of_an_earlier_version_is_read_as_it_was() -> None:
    """All that it says stands; newer options have their defaults."""
    text = (GOLDENS / "config.yaml").read_text()
    values = parse_yaml(text, "config.yaml")
    config = from_dict(values)
    said, found, defaults = (dict(flat(tree)) for tree in (values, config.as_dict(), RunConfig().as_dict()))
    assert found == {key: said.get(key, defaults.get(key)) for key in found}
    assert (config.method, config.precision, config.nullspace.blocks) == ("mamba-cl", "float32", [1, 2])
    assert config.stream.order == [1, 0, *range(2, 10)] and config.options == {"alpha": 0.5}
    written = config.as_yaml().splitlines()
    assert [line for line in written if line in text.splitlines()] == text.splitlines()  # and maybe newer ones


def test_what_a_run_folder_does_not_say_has_its_default() -> None:
    values = parse_yaml((GOLDENS / "config.yaml").read_text(), "config.yaml")
    for group in (values, values["training"], values["nullspace"], values["stream"]):
        del group[list(group)[-1]]
    config = from_dict(values)
    assert config.out is None and config.training.workers == 0
    assert config.stream.transforms == RunConfig().stream.transforms
    assert config.training.lr == 1e-7 and config.nullspace.blocks == [1, 2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_extends_a_preset_and_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "first.yaml", "extends: demo\nseed: 3\ntraining: {lr: 1e-5}\nname: other\n")
    config = resolve(write(tmp_path / "second.yaml", "extends: first.yaml\ntraining.head_lr: 1e-4\n"), {"seed": 5})
    demo = resolve("demo", {})
    assert (config.name, config.seed, config.training.lr, config.training.head_lr) == ("second", 5, 1e-5, 1e-4)
    assert config.nullspace == demo.nullspace and config.stream == demo.stream
    assert resolve({"extends": "demo", "seed": 3}, {}) == resolve("demo", {"seed": 3})


def test_a_file_that_names_a_setting_or_backbone_drops_what_it_extends_says_of_another(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "extends: demo\nsetting: exact\nnullspace: {eta: 0.9}\nbackbone: vim_nano\n")
    config = resolve(path, {})
    assert config.nullspace == SETTINGS["exact"].override(eta=0.9)
    assert config.pretrained is False
    by_hand = resolve("demo", {"setting": "exact", "nullspace.eta": 0.9, "backbone": "vim_nano", "name": "mine"})
    assert config == by_hand


def test_what_a_file_says_of_its_own_backbone_stands() -> None:
    values = {"backbone": "vim_tiny", "stream": {"transforms": {"image_size": 20}}, "nullspace": {"blocks": 2}}
    config = resolve(values, {})
    assert config.pretrained is True and config.stream.transforms.image_size == 20 and config.nullspace.blocks == 2


def test_wrong_extensions(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml")
    with pytest.raises(UserError, match="extends itself through"):
        resolve(write(tmp_path / "b.yaml", "extends: a.yaml"), {})
    with pytest.raises(UserError, match=r"'dmeo' is neither a preset nor a file\. Did you mean 'demo'"):
        resolve(write(tmp_path / "c.yaml", "extends: dmeo"), {})
    with pytest.raises(UserError, match=r"extends takes the name of a preset or the path of a file, got \[1\]"):
        resolve({"extends": [1]}, {})
    with pytest.raises(UserError, match="no option 'extends'"):
        resolve("demo", {"extends": "images"})


LAYERS = """
extends: first.yaml
training: {lr: 3e-3}
for_method:
  sequential: {training.lr: 4e-3, seed: 8}
  frozen: {training: {passes: 2}, classifier: lda}
"""


def test_options_for_one_method_follow_their_layer(tmp_path: Path) -> None:
    """first.yaml, its options for the method, second.yaml, its options for the method, the user's options."""
    first = "method: frozen\ntraining: {lr: 1e-3, head_lr: 1e-3}\nfor_method: {sequential: {training: {head_lr: 2e-3}}}"
    write(tmp_path / "first.yaml", first)
    second = write(tmp_path / "second.yaml", LAYERS)

    def chosen(**overrides: Any) -> tuple[Any, ...]:
        config = resolve(second, overrides)
        training = config.training
        return config.method, training.lr, training.head_lr, training.passes, config.classifier, config.seed

    passes = RECIPES["paper"].passes
    assert chosen() == ("frozen", 3e-3, 1e-3, 2, "lda", 0)
    assert chosen(method="sequential") == ("sequential", 4e-3, 2e-3, passes, "auto", 8)
    assert chosen(method="mamba-cl") == ("mamba-cl", 3e-3, 1e-3, passes, "auto", 0)
    assert chosen(method="sequential", training={"lr": 5e-3}, seed=1) == ("sequential", 5e-3, 2e-3, passes, "auto", 1)
    assert "for_method" not in resolve(second, {}).as_dict()


def test_the_layer_behind_options_for_a_method_wins_over_them(tmp_path: Path) -> None:
    write(tmp_path / "first.yaml", "for_method: {analytic: {seed: 3, training: {lr: 1e-5}}}")
    config = resolve(write(tmp_path / "second.yaml", "extends: first.yaml\nseed: 4"), {})
    assert config.method == RunConfig.method == "analytic" and (config.seed, config.training.lr) == (4, 1e-5)


def test_options_for_a_method_can_name_a_setting() -> None:
    """As in any layer, that drops earlier changes to another setting."""
    source = {"nullspace": {"eta": 0.5}, "for_method": {"mamba-cl": {"setting": "exact", "nullspace": {"blocks": 2}}}}
    assert resolve(source, {"method": "mamba-cl"}).nullspace == SETTINGS["exact"].override(blocks=2)
    assert resolve(source, {"method": "sequential"}).nullspace == SETTINGS["paper"].override(eta=0.5)
    assert source["for_method"]  # the caller's


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1], "for_method takes the options of each method"),
        (None, "for_method takes the options of each method"),
        ({"frozen": 3}, "for_method takes the options of each method"),
        ({"frozne": {}}, r"no method 'frozne'\. Did you mean 'frozen'\?"),
        ({"frozen": {"trainig": {}}}, r"no option 'trainig'\. Did you mean 'training'"),
    ],
)
def test_wrong_options_for_a_method(value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        resolve({"method": "frozen", "for_method": value}, {})
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="method takes text"):
        resolve({"method": ["frozen"], "for_method": {"frozen": {}}}, {})


def test_neither_presets_nor_checks_load_pytorch_or_numpy() -> None:
    code = """
import sys
from mambacl.config import preset_names, resolve
for name in preset_names():
    resolve(name, {"training.lr": "1e-3", "stream.root": "."})
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    ({"lr": 1}, r"no option 'lr'\. Did you mean 'training\.lr'"),
    ({"nullspace.W_dt.train": False}, r"no option 'nullspace\.W_dt\.train'\. Did you mean 'nullspace\.W_dt\.trains'"),
    ({"nullspace.W_dt.feature": "x"}, r"nullspace\.W_dt has no feature 'x'; known: dt"),
    ({"stream.transforms": {"resize": 8}}, r"stream\.transforms\.resize must be at least image_size"),
    ({"training.decay_after": [2.5]}, r"training\.decay_after takes a list of whole numbers, got \[2\.5\]"),
    ({"training": {"passes": 7, "passes_per_epoch": 2}}, r"training\.passes \(7\) must be a multiple"),
    ({"seed": True}, r"seed takes a whole number, got true"),
    ({"name": None}, r"name takes text, got null"),
    ({"options": 3}, r"options takes a mapping, got 3"),
]


@pytest.mark.parametrize(("overrides", "sentence"), WRONG)
def test_each_mistake_gets_one_sentence(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        resolve("demo", overrides)
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for content, sentence in (
        (b"a: [1, 2\nb: 3", r"broken\.yaml, line 2 is not valid YAML"),
        (b"- a list", "must contain options"),
        (b"name: 2024-13-45", "not valid YAML"),
        (b"a: &a [*a]", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            resolve(broken, {})


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
            assert not link.startswith("../"), f"{path}: {link} is not on the site"


def test_another_classifier_drops_the_options_of_the_presets() -> None:
    assert resolve("demo", {}).classifier_options == {"width": 2000}
    assert resolve("demo", {"classifier": "lda"}).classifier_options == {}
    given = {"classifier": "lda", "classifier_options.shrinkage": 0.5}
    assert resolve("demo", given).classifier_options == {"shrinkage": 0.5}
    assert resolve("demo", {"classifier_options.seed": 3}).classifier_options == {"width": 2000, "seed": 3}
