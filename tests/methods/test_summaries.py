"""The list of methods, read from the source, says what the classes say."""

import pytest

from mambacl.lazy import constant
from mambacl.methods import METHODS
from mambacl.methods.registry import summaries


def test_summaries_are_those_of_the_classes() -> None:
    assert summaries() == {name: METHODS.get(name).summary for name in METHODS.names()}


def test_methods_of_other_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        summary = "from elsewhere"

    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    METHODS.add("other", Other)
    assert summaries()["other"] == "from elsewhere"


def test_what_a_module_does_not_assign_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"mambacl\.errors assigns no summary"):
        constant("mambacl.errors", "summary")


def test_values_with_and_without_a_type_are_found() -> None:
    assert constant("mambacl.methods.ease", "name") == "ease"
    assert constant("mambacl.methods.analytic", "own_classifier") == METHODS.get("analytic").own_classifier
