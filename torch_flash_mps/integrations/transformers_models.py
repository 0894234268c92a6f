"""Which models of Hugging Face transformers an attention function can serve.

Some models call none: their layers multiply matrices themselves. transformers takes a registered
name for them all the same, gives them masks of our kind, which they do not understand, and computes
something else. In a few others, causal layers count on a mask to say that they are causal; ours is
left out where the layer can say it.
"""

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

# Methods of PreTrainedModel that are given the name of an attention function: when a model is made,
# and when it is changed.
_CHOOSE = ("get_correct_attn_implementation", "set_attn_implementation")
# How the source of a model makes causal masks, and how its layers say that they are causal.
_CAUSAL_MASK = "causal_mask("
_CAUSAL_LAYER = re.compile(r"\bis_causal *=(?! *(False|is_causal)\b)")


def refuse_unreachable(name: str) -> None:
    """Makes transformers raise where `name` is asked for a model that it would not serve."""
    from transformers import PreTrainedModel

    for choose in _CHOOSE:
        method = getattr(PreTrainedModel, choose)
        if not hasattr(method, "_refuses"):
            setattr(PreTrainedModel, choose, _checked(method, name))


def _checked(method: Callable, name: str) -> Callable:
    @wraps(method)
    def checked(model: Any, requested: Any, *args: Any, **kwargs: Any) -> Any:
        of_model = requested.get("") if isinstance(requested, dict) else requested
        model_class: Any = type(model)
        reason = _why_not(model_class) if of_model == name else None
        if reason is not None:
            raise ValueError(
                f"{name}: {model_class.__name__} {reason}. "
                'Use attn_implementation="eager" for it'
            )
        return method(model, requested, *args, **kwargs)

    checked._refuses = name   # type: ignore[attr-defined]
    return checked


@cache
def _why_not(model_class: Any) -> str | None:
    module = sys.modules.get(model_class.__module__)
    # The first is what transformers looks for, the second a sign of older code on the Hub.
    calls = model_class._can_set_attn_implementation() or hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    if not calls:
        return "computes attention in its own layers and calls no attention function"
    try:
        source = inspect.getsource(module) if module is not None else ""
    except OSError:
        return None
    # PyTorch's attention needs causal layers to say so just as ours does.
    is_silent = _CAUSAL_MASK in source and not _CAUSAL_LAYER.search(source)
    if is_silent and not model_class._supports_sdpa:
        return "has causal layers that do not say so (is_causal), without which they get no mask"
    return None
