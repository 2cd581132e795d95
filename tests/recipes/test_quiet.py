"""What other packages say that users can't change is hidden; everything else is shown."""

import importlib
import logging
import warnings

import longctx_patch.recipes
from longctx_patch.recipes.quiet import LOGGERS, quiet_libraries


def test_only_what_is_named_is_hidden() -> None:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            quiet_libraries()
            warnings.warn("Argument aux_data cannot be converted to a JitArgument", stacklevel=1)
            warnings.warn("Slicing a flattened dim from root mesh will end", stacklevel=1)
            warnings.warn("`gradient_checkpointing` is deprecated and will be", stacklevel=1)
            warnings.warn("the learning rate is odd", stacklevel=1)
            quiet_libraries(shown=True)
            warnings.warn("Slicing a flattened dim is shown again", stacklevel=1)
            quiet_libraries()
        said = [str(each.message) for each in shown]
        assert said == ["the learning rate is odd", "Slicing a flattened dim is shown again"]
        assert not any(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in LOGGERS)
        assert all(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in LOGGERS)
        quiet_libraries(shown=True)
        assert all(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in LOGGERS)
        importlib.reload(longctx_patch.recipes)  # before a recipe imports anything else
        assert not any(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in LOGGERS)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
