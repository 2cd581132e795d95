"""Training scripts started by `accelerate launch`, made to be read, copied and changed."""

from longctx_patch.recipes.quiet import quiet_imports

quiet_imports()
