"""Upload of a trained model to the hub: what can fail is found out before training begins."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub

from longctx_patch.rules.together import refuse_together


def require_repository(name: str, *, private: bool, asks: bool) -> None:
    """Make the repository `name`, or find that it is there; every process calls this.

    Only the process that `asks` reaches for the hub. Raises ValueError on all of them without
    network, token or the right to write, and for a public repository where `private` is wanted.
    """
    refuse_together(_problems(name, private) if asks else ())


def upload(name: str, folder: Path) -> str:
    """Upload the files of `folder`; returns where they are. One process calls this.

    Raises ValueError where that fails, with the command that tries again.
    """
    try:
        huggingface_hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Trained with longctx-patch"
        )
    except Exception as error:  # of the network, in types of several libraries
        again = shlex.join(["hf", "upload", name, str(folder)])
        raise ValueError(
            f"push_to_hub: {folder} could not be uploaded to {name} ({_first_line(error)}). The "
            f"model is there in full. To try again: {again}"
        ) from error
    return f"https://huggingface.co/{name}"


def _problems(name: str, private: bool) -> Iterator[str]:
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        is_public = private and not api.repo_info(name).private
    except Exception as error:  # of the network, in types of several libraries
        yield (
            f"push_to_hub {name!r}: no model can be uploaded there ({_first_line(error)}). Log in "
            "with `hf auth login` or set HF_TOKEN to a token that may write there, and be online; "
            "or leave push_to_hub out and run `hf upload` later."
        )
        return
    if is_public:
        yield (
            f"hub_private, but {name!r} exists and is public. Give another name, or make it "
            "private in its settings on the hub."
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
