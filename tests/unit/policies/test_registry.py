"""Policies by name; the wrong name is answered with the right ones."""

from __future__ import annotations

import inspect

import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies import (
    EXPERT_POLICIES,
    Catalogue,
    create_batch_policy,
    create_placement_policy,
    create_policy,
)
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.policies.registry import spelt

CATALOGUE = Catalogue.uniform("pool", layers=1, experts=4, top_k=2)


@pytest.mark.parametrize("name", sorted(EXPERT_POLICIES))
def test_every_known_name_makes_its_policy(name: str) -> None:
    policy = create_policy(name, catalogue=CATALOGUE)

    assert type(policy) is EXPERT_POLICIES[name]
    assert policy.catalogue is CATALOGUE


def test_the_other_two_kinds_have_their_names_too() -> None:
    assert isinstance(create_batch_policy("fcfs"), FcfsBatching)
    assert isinstance(create_placement_policy("fcfs"), FcfsPlacement)


def test_a_policy_is_spelt_with_its_options() -> None:
    assert spelt("batching", "fcfs") == ("fcfs", {})
    assert spelt("policy", " x : a=true, b=word,c=0.5 ") == ("x", {"a": True, "b": "word", "c": 0.5})
    with pytest.raises(InvalidConfig, match=r"batching: .fcfs:hold. .*NAME:OPTION=VALUE"):
        spelt("batching", "fcfs:hold")


def test_an_unknown_policy_is_answered_with_all_known() -> None:
    with pytest.raises(UnknownName) as caught:
        create_policy("lruu", catalogue=CATALOGUE)

    assert "'lruu'" in str(caught.value)
    assert ", ".join(sorted(EXPERT_POLICIES)) in str(caught.value)
    with pytest.raises(UnknownName, match="known: fcfs"):
        create_batch_policy("lifo")
    with pytest.raises(UnknownName, match="known: edf, emoe, emoe-literal, fcfs"):
        create_placement_policy("lifo")


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match="known: radius"):
        create_policy("neighbour-aware", catalogue=CATALOGUE, options={"width": 2})
    with pytest.raises(InvalidConfig, match="takes no options"):
        create_policy("lru", catalogue=CATALOGUE, options={"radius": 2})
    with pytest.raises(InvalidConfig, match="radius"):
        create_policy("neighbour-aware", catalogue=CATALOGUE, options={"radius": -2})


@pytest.mark.parametrize(
    ("name", "option", "value", "allowed"),
    [
        ("look-ahead", "layers", "two", "a whole number"),
        ("look-ahead", "layers", 1.5, "a whole number"),
        ("look-ahead", "layers", True, "a whole number"),
        ("look-ahead", "per_row", "3", "a whole number or null"),
        ("look-ahead", "evict", "no", "true or false"),
        ("next-layer", "retention", 3, "a word"),
        ("next-use", "fast", "0.5", "a number"),
        ("next-use", "fast", None, "a number"),
        ("belady", "ahead", [1], "a whole number"),
        ("belady", "future", 3, "a Future or null"),
    ],
)
def test_an_option_of_another_kind_is_refused_with_what_is_allowed(
    name: str, option: str, value: object, allowed: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        create_policy(name, catalogue=CATALOGUE, options={option: value})
    assert option in str(caught.value)
    assert allowed in str(caught.value)


def test_options_of_the_right_kind_are_taken() -> None:
    create_policy("look-ahead", catalogue=CATALOGUE, options={"layers": 1, "least": 1, "per_row": None, "evict": False})
    create_policy("next-layer", catalogue=CATALOGUE, options={"retention": "lfu"})
    create_policy("next-use", catalogue=CATALOGUE, options={"fast": 0.5, "horizon": 2})


@pytest.mark.parametrize("name", sorted(EXPERT_POLICIES))
def test_every_policys_options_say_of_what_kind_they_are(name: str) -> None:
    for parameter in inspect.signature(EXPERT_POLICIES[name]).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            with pytest.raises(InvalidConfig, match=parameter.name):
                create_policy(name, catalogue=CATALOGUE, options={parameter.name: object()})
