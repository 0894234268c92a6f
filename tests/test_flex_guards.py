"""When a function of flex_attention is traced again: whatever it reaches may have changed."""

import enum
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from torch_flash_mps.flex.cache import program_of

CPU = torch.device("cpu")
SETTINGS = types.ModuleType("torch_settings")   # of the user's, in spite of its name
SETTINGS.gain = 2.0


class Config:
    gain = 2.0

    def __init__(self):
        self.gain = 2.0

    @property
    def twice(self):
        return 2 * self.gain


class Layer(torch.nn.Module):
    """Methods that call others, properties, submodules, lists of parameters."""

    def __init__(self):
        super().__init__()
        self.gain = 2.0
        self.gains = torch.nn.ParameterList([torch.ones(3)])
        self.inner = torch.nn.Module()
        self.inner.bias = torch.nn.Parameter(torch.ones(3))

    def scaled(self, score):
        return score * self.gain

    def score_mod(self, score, b, h, q, k):
        return self.scaled(score)

    def by_list(self, score, b, h, q, k):
        return score * self.gains[0][h]

    def by_computed_name(self, score, b, h, q, k):
        return score + getattr(self.inner, f"b{'ias'}")[h]

    def forward(self, score, b, h, q, k):
        return self.scaled(score)


class Derived(Layer):
    def score_mod(self, score, b, h, q, k):
        return super().score_mod(score, b, h, q, k) + 1


class Kind(enum.Enum):
    ADD, MULTIPLY = range(2)


def with_config(config, score, b, h, q, k):
    return score * config.gain


def with_attribute(score, b, h, q, k):
    return score * with_attribute.gain


def other_gain(owner, gain=3.0):
    owner.gain = gain


def item(values):
    return lambda score, b, h, q, k: score * float(values[0])


def by_kind(box):
    return lambda score, b, h, q, k: score + 2 if box.kind is Kind.ADD else score * 2


def set_first(values, number):
    values[0] = number


def set_third(values, one):
    values[2] = one


def made(owner, function, change=other_gain):
    """The owner of what changes, a function that reaches it, and the change."""
    return owner, function, change


CHANGES = {
    "attribute-that-a-method-reads-in-another": lambda: made(x := Layer(), x.score_mod),
    "in-a-method-of-a-base": lambda: made(x := Derived(), x.score_mod),
    "of-a-module-that-is-called": lambda: made(x := Layer(), x),
    "of-an-argument": lambda: made(
        x := Config(), lambda *pair: with_config(x, *pair)),
    "of-an-argument-of-partial": lambda: made(x := Config(), partial(with_config, x)),
    "of-a-class": lambda: made(Config, lambda s, b, h, q, k: s * Config.gain),
    "behind-a-property": lambda: made(x := Config(), lambda s, b, h, q, k: s * x.twice),
    "by-getattr": lambda: made(x := Config(), lambda s, b, h, q, k: s * getattr(x, "gain")),  # noqa: B009
    "of-a-function": lambda: made(with_attribute, with_attribute),
    "of-a-python-module": lambda: made(SETTINGS, lambda s, b, h, q, k: s * SETTINGS.gain),
    "item-of-an-array": lambda: made(
        x := np.array([2.0]), item(x), lambda x: set_first(x, 3.0)),
    "item-of-a-deque": lambda: made(x := deque([2.0]), item(x), lambda x: set_first(x, 3.0)),
    "which-of-two-objects": lambda: made(
        x := [one := Config(), two := Config(), one], lambda s, b, h, q, k: s * x[2].gain,
        lambda x: (other_gain(two), set_third(x, two))),
    "enum": lambda: made(x := types.SimpleNamespace(kind=Kind.ADD), by_kind(x),
                         lambda x: setattr(x, "kind", Kind.MULTIPLY)),
    "parameter-of-a-list": lambda: made(
        x := Layer(), x.by_list, lambda x: x.gains.__setitem__(0, torch.zeros(3))),
    "dtype-of-a-parameter-of-a-list": lambda: made(x := Layer(), x.by_list, torch.nn.Module.half),
    "dtype-of-what-has-a-computed-name": lambda: made(
        x := Layer(), x.by_computed_name, torch.nn.Module.half),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_traced_again_where_something_changed(monkeypatch, name):
    with_attribute.gain = 2.0
    monkeypatch.setattr(Config, "gain", 2.0)
    monkeypatch.setattr(SETTINGS, "gain", 2.0)
    owner, function, change = CHANGES[name]()

    def program():
        found = program_of(function, None, CPU)
        return found.code, [id(one) for one in found.captured]

    before = program()
    assert program() == before
    change(owner)
    assert program() != before


def test_threads_trace_one_after_the_other():
    def code(number):
        return program_of(lambda s, b, h, q, k: s * number, None, CPU).code

    numbers = [float(number) for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(code, numbers))
    assert found == [code(number) for number in numbers] and len(set(found)) == len(numbers)


def test_what_cannot_be_looked_at_is_no_error():
    """A variable without a value yet, a list that holds itself, a property that raises."""
    class Broken:
        gain = property(lambda self: 1 / 0)

    def run(is_known):
        def score_mod(score, b, h, q, k):
            return later(score) * endless[0] if is_known else score + 0 * len(endless)

        program_of(score_mod, None, CPU)
        if is_known:
            return

        def later(score):
            return score * 2

    endless, broken = [1.0], Broken()
    endless.append(endless)
    run(False)
    with pytest.raises(NameError, match="later"):
        run(True)
    program_of(lambda s, b, h, q, k: with_config(Config(), s, b, h, q, k) if broken else s, None,
               CPU)
