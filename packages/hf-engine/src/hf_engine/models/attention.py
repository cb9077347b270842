"""The function that computes attention in a model of transformers: one that drops nothing, or a user's choice.

transformers gives each function the same arguments, and a function ignores those that it does not know: torch's drops a
cap on logits without a message, while vLLM applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_protocols.errors import BackendError
from hf_protocols.validation import show

if TYPE_CHECKING:
    import torch

    from hf_engine.backends.train_config import AttentionFunction

__all__ = ["choose_attention"]


def choose_attention(model: Any, wanted: AttentionFunction, device: torch.device) -> None:
    """Has a loaded model compute attention by a function; `"auto"` is transformers' choice, unless it drops something.

    Raises:
        BackendError: for a function that does not run, that transformers does not have for the model, or that leaves
            out the model's cap on logits.
    """
    is_capped = bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))
    if wanted == "auto":
        if is_capped:  # torch's function has no argument for it
            model.set_attn_implementation("eager")
        return
    label, name = f"attn_implementation={show(wanted)}", type(model).__name__
    if wanted == "sdpa" and is_capped:
        raise BackendError(
            f"{label}: a {name} has attn_logit_softcapping, which torch's function leaves out. Use 'eager', or "
            "'flex_attention' on a GPU"
        )
    if wanted == "flex_attention" and device.type == "cpu":
        raise BackendError(f"{label}: torch's function has no backward pass on a CPU. Use 'auto'")
    try:
        model.set_attn_implementation(wanted)
        is_set = model.config.get_text_config()._attn_implementation == wanted
    except (ValueError, ImportError):
        is_set = False
    if not is_set:
        raise BackendError(f"{label}: transformers does not have it for a {name}. Use 'auto'")
