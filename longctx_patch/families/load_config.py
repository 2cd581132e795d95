"""A model's config from a hub name, a local folder or a config.json; weights are not needed."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from longctx_patch.families.checks import UnsupportedModelError
from longctx_patch.families.config_values import problem_of
from longctx_patch.families.supported import FAMILIES
from longctx_patch.families.text_part import (
    HEAD_MAY_BE_UNSAID,
    TEXT_TYPES,
    text_part,
    tie_as_text,
)
from longctx_patch.rules import strict_json
from longctx_patch.rules.names import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_model_config(model: str) -> "PreTrainedConfig":
    """The config of `model` as it is published; of its text model, where it reads images too.

    Raises ValueError where there is none, and UnsupportedModelError for a model type that
    transformers does not know.
    """
    config: PreTrainedConfig = text_part(_published(model))
    if problem := problem_of(config):
        raise ValueError(f"model {model!r}: in its config, {problem}. Give a valid config.json.")
    return config


def whole_config(model: str) -> "PreTrainedConfig | None":
    """The config of a model that reads images too, of which the text model is trained; else None.

    Raises what `load_model_config` raises.
    """
    config = _published(model)
    return config if config.model_type in TEXT_TYPES else None


def _published(model: str) -> "PreTrainedConfig":
    from transformers import AutoConfig, PreTrainedConfig

    local = is_local(model)
    if local:
        _check_file(model)
    else:
        require_reachable(model, "config.json")
    name = str(Path(model).expanduser()) if local else model
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type in HEAD_MAY_BE_UNSAID:
            tie_as_text(config, PreTrainedConfig.get_config_dict(name)[0])
        return config
    except OSError as error:
        raise ValueError(_unreadable(model, local, error)) from error
    except ValueError as error:
        said = str(error).splitlines()[0]
        if "custom code" in said:
            raise UnsupportedModelError(
                f"model {model!r} needs Python code that comes with it, which is not run here: "
                "`longctx families` prints what is supported."
            ) from error
        near = re.findall(r"model type `([^`]+)`", said)
        raise UnsupportedModelError(
            f"model {model!r} has no model_type that transformers knows ({said}): `longctx "
            f"families` prints what is supported.{did_you_mean(near[0], FAMILIES) if near else ''}"
        ) from error
    except Exception as error:  # config classes raise anything for impossible values
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model {model!r}: its config can't be used ({said}). Give a valid config.json."
        ) from error


def _check_file(model: str) -> None:
    """Refuse a config file that transformers would read in another way, or not name."""
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    _refuse_gguf(path)
    try:
        found = strict_json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} can't be read: byte {error.start} is no UTF-8 text.") from error
    except ValueError as error:
        raise ValueError(
            f"{path}: its config can't be read, since it is no JSON ({error}). Give a valid "
            "config.json."
        ) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} holds a {kind}, not an object. Give a valid config.json.")
    if problem := problem_of(SimpleNamespace(**found), as_written=True):
        raise ValueError(f"{path}: {problem}. Give a valid config.json.")


def is_bare_config(model: str) -> bool:
    """Says whether `model` names a config file, to be filled with random weights."""
    return model.endswith(".json")


def is_local(model: str) -> bool:
    """Says whether `model` is a folder with a config.json, or a config file; False for a hub name.

    Raises ValueError for what is meant to be a path but holds no config.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            for file in path.glob("*.gguf"):
                _refuse_gguf(file)
            raise ValueError(
                f"model folder {model!r} has no config.json. Give a folder that save_pretrained "
                "wrote, a config.json, or a hub name."
            )
        return True
    if path.is_file():
        return True
    if _is_meant_as_path(model):
        raise ValueError(
            f"model {model!r}: no such file or folder. Give an existing one.{_near_files(path)}"
        )
    return False


def _is_meant_as_path(model: str) -> bool:
    """Says whether `model`, where nothing lies, is no hub name. `models/llama` is a path where
    there is a folder `models`."""
    return (
        model.endswith((".json", ".gguf", "/"))
        or model.startswith(("/", ".", "~"))
        or model.count("/") > 1
        or ("/" in model and Path(model).parent.is_dir())
    )


def _near_files(path: Path) -> str:
    """A sentence, after a space, with what lies there under a name like the path's; or ""."""
    if not path.parent.is_dir():
        return ""
    return did_you_mean(str(path), [str(each) for each in path.parent.iterdir()])


def require_reachable(name: str, file: str, what: str = "model") -> None:
    """Raise ValueError for a hub name whose `file` is neither in the cache nor can be asked for.

    transformers tries for half a minute before it says so.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    for pause_s in (1, 2, None):
        try:
            if not isinstance(try_to_load_from_cache(name, file), str):
                get_hf_file_metadata(hf_hub_url(name, file))
            return
        except HFValidationError as error:
            raise ValueError(
                f"{what} {name!r} is no file or folder here, and can't be a hub name, which is "
                f"OWNER/NAME of letters, digits, '-', '_' and '.'.{_near_files(Path(name))}"
            ) from error
        except (HfHubHTTPError, OfflineModeIsEnabled):
            return  # transformers says which
        except Exception as error:  # each version of the hub's client has its own
            if pause_s is None:
                raise ValueError(_unreachable(name, str(error), what)) from error
            time.sleep(pause_s)


def _refuse_gguf(path: Path) -> None:
    """Refuse a model in the format of llama.cpp, by its name or its first bytes."""
    if path.suffix.lower() != ".gguf":
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    return
        except OSError:
            return
    raise ValueError(
        f"{path} is a GGUF file, whose weights are mostly quantised for inference. Take the model "
        "that it was made from: its page on the hub names it as base model. Or make a folder of "
        "it, with `pip install gguf` and in Python:\n"
        "    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"    place = {{'pretrained_model_name_or_path': {str(path.parent)!r},\n"
        f"             'gguf_file': {path.name!r}}}\n"
        "    model = AutoModelForCausalLM.from_pretrained(**place)\n"
        "    model.hf_quantizer = None\n"
        "    del model.config.quantization_config\n"
        "    model.save_pretrained('FOLDER')\n"
        "    AutoTokenizer.from_pretrained(**place).save_pretrained('FOLDER')"
    )


def _unreadable(model: str, local: bool, error: OSError) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    if local:
        return f"model {model!r}: its config can't be read ({reason}). Give a valid config.json."
    return _unreachable(model, reason)


def _unreachable(name: str, reason: str, what: str = "model") -> str:
    return (
        f"{what} {name!r} is neither a file or folder in the current directory nor reachable under "
        f"this name ({reason}). Without a network, give a local folder, a config.json, or set "
        f"HF_HOME to a cache that holds it.{_near_files(Path(name))}"
    )
