"""A chat template that does not end, or makes something too large, costs the request that meets it and no other."""

from __future__ import annotations

import time

import pytest

from greenroom.core.errors import InvalidRequest
from greenroom.text.chat import ChatTemplate
from greenroom.text.template_limits import MOST_CHARACTERS, RENDER_S

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
DOUBLED = "{%% set ns = namespace(x='aaaaaaaaaa') %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro f(n) %}{% if n %}{% call g() %}{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
    ids=["loops", "loops-that-skip", "macros", "callers"],
)
def test_one_that_does_not_end_is_refused_by_its_time(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"did not end within 1 s") as refused:
        ChatTemplate(source, {}).render(MESSAGES)
    assert refused.value.param == "messages"
    assert time.thread_time() - began < 5 * RENDER_S


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ 9 ** 99999 }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(width) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a' | indent(10**9, true) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' | format(10**9, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ''.join(['a' * 10000000] * 1000) }}",
        "{{ (['a' * 10000000] * 1000) | join('-') }}",
        "{{ (['a' * 10000000] * 1000) | map('upper') | join }}",
        "{{ ''.join((['a' * 10000000] * 1000) | map('upper')) }}",
        "{{ '%(a)1000000000d' % {'a': 1} }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        DOUBLED % "ns.x + ns.x",
        DOUBLED % "ns.x ~ ns.x",
        DOUBLED % "ns.x.replace('a', 'aa')",
        DOUBLED % "ns.x | replace('a', 'aa')",
        DOUBLED % "[ns.x, ns.x] | join",
        "{% for i in range(9999) %}{{ 'a' * 1000000 }}{% endfor %}",
    ],
)
def test_what_would_be_too_large_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the model's chat template refuses this: it "):
        ChatTemplate(source, {}).render(MESSAGES, variables={"width": 10**10})


def test_the_time_of_one_rendering_is_not_the_next_ones() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'x' %}" + endless + "{% endif %}{{ m.content }}{% endfor %}", {}
    )
    with pytest.raises(InvalidRequest):
        template.render([{"role": "x", "content": "a"}])
    assert template.render(MESSAGES) == "helloyes"


def test_what_templates_do_is_as_it_was() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ ', last' if loop.last }}: "
        "{{ m.role ~ ' says ' ~ m.content ~ 1 ~ none }} {{ '%05.1f|%3d%%' % (3.14159, 7) }} {{ '{:*^9}'.format('x') }} "
        "{{ 'ab' * 2 + 'c' }} {{ 2 ** 10 + 3 * 4 }} {{ [1] + [2] }} {{ ['a', 1] | join('-') }} "
        "{{ [m] | join(attribute='role') }} {{ 'a-b'.replace('-', '+') }} {{ 'a-b-c' | replace('-', '+', 1) }} "
        "{{ 'x' | center(5) }}|{{ '%s' | format(m.role) }};"
        "{{ 'since 20260101: %d%%' % 5 }}{{ '1234567{:>3}'.format(1) }}{% endfor %}"
    )
    made = "None 003.1|  7% ****x**** ababc 1036 [1, 2] a-1"
    assert ChatTemplate(source, {}).render(MESSAGES) == (
        f"1/2: user says hello1{made} user a+b a+b-c   x  |user;since 20260101: 5%1234567  1"
        f"2/2, last: assistant says yes1{made} assistant a+b a+b-c   x  |assistant;since 20260101: 5%1234567  1"
    )


def test_long_chats_are_far_from_the_bounds() -> None:
    template = ChatTemplate("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ '\\n' }}{% endfor %}", {})
    began = time.thread_time()
    text = template.render([{"role": "user", "content": "word " * 100}] * 5_000)
    assert time.thread_time() - began < RENDER_S / 2
    assert len(text) < MOST_CHARACTERS / 4
