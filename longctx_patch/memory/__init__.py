"""What is kept and what is recomputed."""

from longctx_patch.memory.policies import context_fn_of

__all__ = ["context_fn_of"]
