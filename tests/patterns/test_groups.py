"""Heads computed in a loop stay sites of their own, with their group named, or with the reason why they are none."""

import pytest
import torch
from head_loops import APART, HEADS, JOINED, TOKENS, WIDTH, Apart, Loop

from attnrewrite.api import explain
from attnrewrite.errors import Refusal
from attnrewrite.site import Operand, Scan

X = torch.randn(2, TOKENS, WIDTH)


def scanned(heads: object, join: object) -> Scan:
    torch.manual_seed(0)
    return explain(Loop(heads, join).eval(), (X,))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", JOINED)
def test_heads_of_a_loop_are_single_sites_of_one_group(name: str) -> None:
    found = scanned(*JOINED[name])
    (group,) = found.groups
    assert isinstance(group.output, Operand)
    assert (len(found), {site.heads for site in found}) == (HEADS, {1})
    assert sorted(group.members) == [site.id for site in found]
    assert [found.group_of(site.id) for site in found] == [group.members[0]] * HEADS


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_what_is_no_head_of_one_attention_stays_apart_and_says_why(case: Apart) -> None:
    found = scanned(case.heads, case.join)
    (group,) = found.groups
    assert isinstance(group.output, Refusal)
    assert group.output.code == case.code
    assert all(found.group_of(site.id) is None for site in found)


def test_heads_that_are_joined_in_another_order_are_named_in_it() -> None:
    (group,) = scanned(*JOINED["chunks, last head first"]).groups
    assert group.members == ("site2", "site1", "site0")
