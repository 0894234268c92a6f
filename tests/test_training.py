"""The training examples: short runs of what `make train` does."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = {"steps": 6, "batch_size": 2, "length": 48, "width": 32, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="module")
def example(simulator):
    """examples/train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLES / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def flash_run(example):
    return example.train("flash", seed=0, **TINY)


def test_loss_falls(example, device, kernels):
    run = example.train("flash", steps=20, batch_size=4, seed=0, length=32, width=32, num_heads=2,
                        num_layers=1)
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert run.losses[-1] < run.losses[0] - 0.5
    assert run.held_out_loss < run.losses[0] - 0.5
    ran = kernels()
    assert ran.count("flash_fwd") == 20 + 1   # and once on the held-out text
    assert ran.count("flash_bwd_dq") == ran.count("flash_bwd_dkv") == 20


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_losses_equal_those_of_other_attention(attention, example, flash_run):
    other = example.train(attention, seed=0, **TINY)
    assert max(example.relative_differences([flash_run, other])) < 1e-5
    assert flash_run.held_out_loss == pytest.approx(other.held_out_loss, rel=1e-5)


def test_same_seed_gives_the_same_bits(example, flash_run):
    again = example.train("flash", seed=0, **TINY)
    assert again.losses == flash_run.losses
    assert again.held_out_loss == flash_run.held_out_loss
    assert example.train("flash", seed=1, **TINY).losses != flash_run.losses


def test_nothing_of_size_seqlen_squared_is_kept(example):
    """What a longer sequence adds to the memory kept for backward is linear in its length."""
    def saved(attention, length):
        sizes = {**TINY, "steps": 1, "batch_size": 1, "length": length}
        return example.train(attention, seed=0, **sizes).saved_bytes

    short, middle, long = (saved("flash", length) for length in (64, 128, 256))
    assert long - middle == 2 * (middle - short)
    short, middle, long = (saved("naive", length) for length in (64, 128, 256))
    assert long - middle > 2.2 * (middle - short)


@pytest.mark.parametrize("other", ["naive", None])
def test_picture(other, example, flash_run, tmp_path):
    runs = [flash_run] + ([example.train(other, seed=0, **TINY)] if other else [])
    for suffix, first in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / "new" / f"loss.{suffix}"
        example.draw(runs, picture)
        assert picture.read_bytes().startswith(first)
        assert picture.stat().st_size > 5_000


@pytest.mark.parametrize("naive_is_wrong", [False, True])
def test_compare_fails_where_losses_differ(naive_is_wrong, example, monkeypatch, tmp_path, capsys):
    """A textbook attention that forgets the mask is noticed."""
    arguments = ["--compare", "--steps", "3", "--batch-size", "1"]
    monkeypatch.setattr("sys.argv", ["train.py", *arguments, "--out", str(tmp_path / "loss.png")])
    if naive_is_wrong:
        monkeypatch.setitem(example.ATTENTION, "naive",
                            lambda q, k, v: torch.softmax(q @ k.mT / 8, -1) @ v)
    assert example.main() == int(naive_is_wrong)
    assert "largest relative difference" in capsys.readouterr().out
