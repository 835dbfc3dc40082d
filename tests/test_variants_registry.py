"""Names and options: what is accepted, and what the error says when it is not."""

import pytest

from attnrewrite.errors import InputError
from attnrewrite.variants.registry import get_variant, option_values, variants

ACCEPTED = [
    ("l1", {}, {"centred": True, "order": "auto"}),
    ("l1", {"centred": "false", "order": "kv"}, {"centred": False, "order": "kv"}),
    ("l1", {"centred": False, "exact_prefix": "off"}, {"centred": False, "exact_prefix": False}),
    ("relu-linear", {"local": "true"}, {"local": True}),
]
REFUSED = [
    ("l2", {}, "did you mean 'l1'"),
    ("l1", {"centered": "true"}, "did you mean 'centred'"),
    ("l1", {"order": "vk"}, "l1: order='vk' is not auto or qk or kv"),
    ("l1", {"centred": "maybe"}, "l1: centred='maybe' is not true or false"),
]


@pytest.mark.parametrize(("name", "options", "expected"), ACCEPTED)
def test_options_are_parsed_by_the_type_of_their_field(name: str, options: dict, expected: dict) -> None:
    values = option_values(get_variant(name, options))
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_errors_name_the_option_and_the_way_out(name: str, options: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        get_variant(name, options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", sorted(variants()))
def test_every_variant_describes_itself_and_its_options_survive_a_round_trip(name: str) -> None:
    variant = get_variant(name)
    assert variant.name == name
    assert variant.summary
    assert variant.source
    assert get_variant(name, option_values(variant)) == variant
