"""IN-12: `flash_attn.install()` gives model code the name flash_attn, and takes it back."""

import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny
from transformers import modeling_flash_attention_utils

import torch_flash_mps
from torch_flash_mps import flash_attn as ours

MODULES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding")


@pytest.fixture()
def installed():
    ours.install()
    yield
    ours.uninstall()


def has_name() -> bool:
    """Whether anything in this process answers to flash_attn."""
    try:
        importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec("flash_attn") is not None
    return True


def test_IN_12_nothing_is_there_without_it():
    script = (
        "import importlib.util, importlib.metadata as metadata, sys, torch_flash_mps\n"
        "assert importlib.util.find_spec('flash_attn') is None\n"
        "assert 'flash_attn' not in sys.modules\n"
        "assert not [one for one in metadata.distributions() if one.name == 'flash_attn']\n"
        "from transformers.utils import is_flash_attn_2_available\n"
        "assert not is_flash_attn_2_available()\n"
        "assert torch_flash_mps.flash_attn.bert_padding.unpad_input   # ours needs no import\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_IN_12_names_metadata_and_version(installed):
    flash_attn, interface, bert_padding = map(importlib.import_module, MODULES)
    for name in ours.__all__:
        if name not in ("install", "uninstall"):
            assert getattr(flash_attn, name) is getattr(ours, name) is getattr(interface, name)
    for name in ("pad_input", "unpad_input", "index_first_axis"):
        assert getattr(bert_padding, name) is getattr(ours.bert_padding, name)
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == flash_attn.__version__
    assert not hasattr(flash_attn, "install")


def test_IN_12_the_interface_needs_no_import_of_its_own(installed):
    flash_attn = importlib.import_module("flash_attn")
    assert flash_attn.flash_attn_interface.flash_attn_func is ours.flash_attn_func


def test_IN_12_other_packages_are_found_as_before(installed):
    assert importlib.metadata.version("torch_flash_mps") == torch_flash_mps.__version__
    names = [one.name for one in importlib.metadata.distributions()]
    assert names.count("flash_attn") == 1 and "torch" in names
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers")


def test_IN_12_transformers_and_diffusers_import_and_ask(installed):
    from transformers.utils import is_flash_attn_2_available

    assert is_flash_attn_2_available()
    run = subprocess.run(
        [sys.executable, "-c",
         "import torch_flash_mps; torch_flash_mps.flash_attn.install(); import diffusers;"
         "from diffusers.models import attention_dispatch as a; assert a._CAN_USE_FLASH_ATTN;"
         "from diffusers.models.attention_dispatch import flash_attn_func as f;"
         "assert f is torch_flash_mps.flash_attn.flash_attn_func"],
        capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_uninstall_leaves_nothing():
    from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX
    from transformers.utils import import_utils

    row = FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    before = dict(row), import_utils.is_flash_attn_2_available
    assert not has_name()
    for _ in range(2):   # repeated calls are one
        ours.install()
    assert has_name()
    for _ in range(2):
        ours.uninstall()
    assert not has_name() and "flash_attn" not in sys.modules
    assert (dict(row), import_utils.is_flash_attn_2_available) == before
    assert not import_utils.is_flash_attn_2_available()


def test_another_flash_attn_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="expected no package flash_attn, found one in .*tmp"):
        ours.install()
    assert importlib.import_module("flash_attn").mine
    with pytest.raises(RuntimeError, match="expected no package flash_attn"):
        ours.install()
    sys.modules.pop("flash_attn")


def test_unknown_transformers_are_an_error(monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.delattr(import_utils, "_package_distribution_mapping")
    with pytest.raises(RuntimeError, match="expected transformers with the checks of its release"):
        ours.install()
    assert not has_name()


def test_IN_12_a_padded_batch_in_transformers_is_that_of_eager(device, installed, monkeypatch):
    """Left and right padding: unpad_input and flash_attn_varlen_func, logits and gradients."""
    eager = tiny("llama", num_key_value_heads=2)
    model = copy.deepcopy(eager).to(device)
    calls = []
    packed = ours.flash_attn_varlen_func

    @functools.wraps(packed)   # transformers reads the signature
    def noted(q, *operands, **options):
        calls.append(q.shape)
        return packed(q, *operands, **options)

    monkeypatch.setattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", noted)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    model.set_attn_implementation("flash_attention_2")
    ids = torch.randint(0, eager.config.vocab_size, (2, 21))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 17:] = 0, 0
    results = []
    for one, place in ((eager, "cpu"), (model, device)):
        logits = one(ids.to(place), attention_mask=mask.to(place)).logits.cpu()[mask.bool()]
        logits.logsumexp(-1).sum().backward()
        results.append((logits.detach(), {n: p.grad.cpu() for n, p in one.named_parameters()}))
    (expected, expected_grads), (got, grads) = results
    assert calls == [(17 + 17, 6, 8)] * 2
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=1e-4, rtol=1e-4,
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_IN_12_a_padded_batch_generates_as_with_eager(device, installed):
    """A decode step has its queries' places from arange(batch), int32."""
    eager = tiny("llama", num_key_value_heads=2)
    model = copy.deepcopy(eager).to(device)
    model.set_attn_implementation("flash_attention_2")
    ids = torch.randint(3, eager.config.vocab_size, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected, got = (one.generate(ids.to(place), attention_mask=mask.to(place), **options)
                     for one, place in ((eager, "cpu"), (model, device)))
    assert got.tolist() == expected.tolist()
