"""Write the text model of a checkpoint that reads images too, as a checkpoint of its own.

    python -m longctx_patch.recipes.text_model Qwen/Qwen3-VL-8B-Instruct qwen3-vl-8b-text

The recipes train such a checkpoint's text model as it is. What is needed apart from it, such as the
base of an adapter, is this folder: any library that loads text models loads it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from longctx_patch.families.load_config import load_model_config
from longctx_patch.families.text_part import auto_class_name
from longctx_patch.plugin import text_model
from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.models import check_not_fp8
from longctx_patch.recipes.run_record import require_new


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the text model of the first argument into the folder that is the second."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 2:
        raise ValueError(
            f"{len(given)} arguments: it takes a folder or hub name, and a new folder, as in "
            "`python -m longctx_patch.recipes.text_model Qwen/Qwen3-VL-8B-Instruct text`."
        )
    source, folder = given[0], Path(given[1]).expanduser()
    require_new(folder, "folder")
    check_not_fp8(source, load_model_config(source))
    model = text_model(source)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    print(f"written to {folder}; {auto_class_name(model.config)}.from_pretrained loads it")


if __name__ == "__main__":
    with one_message("text_model"):
        main()
