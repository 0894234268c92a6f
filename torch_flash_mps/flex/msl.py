"""Scalar expressions -> the Metal source that replaces metal/user_score.h."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_flash_mps.flex.operators import OPERATORS
from torch_flash_mps.flex.values import SCORE, Value, in_order

_ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat",
             torch.int64: "int64_t", torch.int32: "int", torch.bool: "uchar"}
_ROUNDED = {torch.float16: "half", torch.bfloat16: "bfloat"}
_INDICES = "int b, int h, int q_idx, int kv_idx"


def header(score: Value, slope: Value, mask: Value, captured: list[Tensor]) -> str:
    """The whole text. Its numbers are those of the functions, none follows from a tensor's size.

    score: score_mod's result; slope: its derivative by the score; mask: mask_mod's result.
    """
    has_score = not (score.op == "argument" and score.data == SCORE)
    lines = [
        "namespace flash_mps {",
        f"constant constexpr bool has_user_score = {_word(has_score)};",
        f"constant constexpr bool has_user_mask = {_word(not mask.is_constant(True))};",
        *_buffers(captured),
        *_function("float user_score", f"float {SCORE}, {_INDICES}", score, captured),
        *_function("float user_slope", f"float {SCORE}, {_INDICES}", slope, captured),
        *_function("bool user_visible", _INDICES, mask, captured),
        "}",
    ]
    return "\n".join(lines) + "\n"


def layout(captured: list[Tensor]) -> list[int]:
    """Size and stride of each dimension of each tensor, as the text reads them."""
    return [number for tensor in captured
            for pair in zip(tensor.shape, tensor.stride(), strict=True) for number in pair]


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _buffers(captured: list[Tensor]) -> list[str]:
    """What a kernel binds of the captured tensors, and hands to the functions."""
    fields = [f"const device {_ELEMENTS[tensor.dtype]}* t{i};" for i, tensor in enumerate(captured)]
    bound = [
        f"const device {_ELEMENTS[tensor.dtype]}* user_t{i} "
        f"[[buffer(kUserTensorBuffer + {i}), function_constant(has_user_code)]]"
        for i, tensor in enumerate(captured)
    ]
    names = [f"user_t{i}" for i in range(len(captured))]
    if layout(captured):
        fields.append("constant int64_t* layout;")
        bound.append("constant int64_t* user_layout "
                     "[[buffer(kUserLayoutBuffer), function_constant(has_user_code)]]")
        names.append("user_layout")
    return [
        f"struct UserCode {{ {' '.join(fields)} }};",
        "#define FLASH_MPS_USER_BUFFERS " + "".join(f", {one}" for one in bound),
        f"#define FLASH_MPS_USER_CODE UserCode{{{', '.join(names)}}}",
    ]


def _function(
    name: str, parameters: str, result: Value, captured: list[Tensor]
) -> list[str]:
    names: dict[Value, str] = {}
    lines: list[str] = []
    for value in in_order([result]):
        if value.op == "argument":
            names[value] = value.data
        elif value.op == "constant":
            names[value] = _literal(value)
        else:
            names[value] = f"v{len(lines)}"
            text = _load(value, names, captured) if value.op == "load" else _apply(value, names)
            lines.append(f"  const {_type(value)} {names[value]} = {text};")
    return [f"inline {name}(UserCode user, {parameters}) {{", *lines,
            f"  return {names[result]};", "}"]


def _type(value: Value) -> str:
    """What holds a value: integers have 32 bits where they surely fit."""
    if value.is_float:
        return "float"
    if value.dtype == torch.bool:
        return "bool"
    return "int" if _fits(value) else "int64_t"


def _fits(value: Value) -> bool:
    assert value.bounds is not None
    return -(2**31) <= value.bounds[0] and value.bounds[1] < 2**31


def _literal(value: Value) -> str:
    if value.dtype == torch.bool:
        return _word(value.data)
    if not value.is_float:
        suffix = "" if _fits(value) else "L"
        if value.data in (-(2**31), -(2**63)):   # whose positive is no number
            return f"({value.data + 1}{suffix} - 1{suffix})"
        return f"({value.data}{suffix})" if value.data < 0 else f"{value.data}{suffix}"
    if math.isnan(value.data):
        return "NAN"
    if math.isinf(value.data):
        return "INFINITY" if value.data > 0 else "(-INFINITY)"
    text = f"{torch.tensor(value.data, dtype=torch.float32).item():.9g}"
    text += "f" if "." in text or "e" in text else ".0f"
    return f"({text})" if text.startswith("-") else text


def _load(value: Value, names: dict[Value, str], captured: list[Tensor]) -> str:
    first = sum(tensor.dim() for tensor in captured[: value.data])
    terms = [f"user_offset({names[index]}, user.layout + {2 * (first + dim)})"
             for dim, index in enumerate(value.args)]
    element = f"user.t{value.data}[{' + '.join(terms) or '0'}]"
    if value.dtype == torch.bool:
        return f"{element} != 0"
    return f"float({element})" if value.dtype in _ROUNDED else element


def _apply(value: Value, names: dict[Value, str]) -> str:
    operands = value.args[1:] if value.op == "where" else value.args
    wanted = _common_type(value, operands)
    texts = [names[one] if _type(one) == wanted else f"{wanted}({names[one]})" for one in operands]
    if value.op == "where":
        texts.insert(0, names[value.args[0]])
    if value.op == "cast":
        (source,) = value.args
        text = names[source]
        if value.dtype == torch.bool:
            text += " != 0.0f" if source.is_float else " != 0"
        elif _type(source) != _type(value):
            text = f"{_type(value)}({text})"
    else:
        text = OPERATORS[value.op].msl.format(*texts)
        if value.dtype != torch.bool and wanted != _type(value):
            text = f"{_type(value)}({text})"
    rounded = _ROUNDED.get(value.dtype)
    return text if rounded is None else f"float({rounded}({text}))"


def _common_type(value: Value, operands: tuple[Value, ...]) -> str:
    """In which type an operator works."""
    if value.is_float or any(one.is_float for one in operands):
        return "float"
    types = {_type(one) for one in operands}
    if value.dtype != torch.bool:
        types.add(_type(value))
    return next(one for one in ("int64_t", "int", "bool") if one in types)
