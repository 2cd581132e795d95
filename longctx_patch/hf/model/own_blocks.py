"""The blocks of a model that FSDP shards by themselves; Accelerate finds them by their classes."""

from collections.abc import Callable

from transformers import PreTrainedModel


def name_own_blocks(model: PreTrainedModel) -> Callable[[], None]:
    """Leave in `_no_split_modules` what FSDP can shard by itself; return a function that undoes it.

    It refuses a class that it does not find, and text models name blocks of the encoders of the
    models that they are part of; and blocks that share weights, as Zamba 2's do, which stay with
    the rest of the model.
    """
    named = model._no_split_modules
    blocks: dict[str, list[int]] = {}
    for module in model.modules():
        if type(module).__name__ in (named or ()):
            blocks.setdefault(type(module).__name__, []).extend(map(id, module.parameters()))
    model._no_split_modules = {name for name, own in blocks.items() if len(own) == len({*own})}

    def restore() -> None:
        model._no_split_modules = named

    return restore
