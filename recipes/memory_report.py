"""Says, when a run is out of memory, what was predicted, what was used, and what to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from longctx_patch.hf.layers.fused_layers import LIGER_FAMILIES
from longctx_patch.hf.preflight import WillNotFit
from longctx_patch.memory import host
from longctx_patch.planner.advice import advice, cluster_here
from longctx_patch.planner.job import Cluster, Job, WeightsDtype
from longctx_patch.planner.machines import GIB
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.search import Result, result_of
from longctx_patch.plugin import states_on_host
from longctx_patch.recipes.settings import Settings

OPTIONS = (
    "To change: --checkpoint offload, --mlp-tiles, more processes for each row (--ulysses, "
    "--ring), or shorter rows; docs/how-to/fit-the-memory.md has the order."
)


class OutOfMemory(RuntimeError):
    """A step did not fit into the memory of a GPU."""


@contextmanager
def explained(
    settings: Settings, config: Any, accelerator: Any, *, unpredicted: str = ""
) -> Iterator[None]:
    """Turn out-of-memory errors into one that says what was used, predicted, and what to change.

    `unpredicted`: why nothing can be predicted for the run.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error)
        raise out_of_memory(said, settings, config, accelerator, unpredicted) from error
    except WillNotFit as error:
        said = f"{error}. --skip-rehearsal starts all the same"
        raise out_of_memory(said, settings, config, accelerator, unpredicted) from error


def out_of_memory(
    said: str, settings: Settings, config: Any, accelerator: Any, unpredicted: str = ""
) -> OutOfMemory:
    """An error with the first line of `said`, the memory used and predicted, and what to change."""
    device, num_gpus = accelerator.device, accelerator.num_processes
    total = torch.cuda.get_device_properties(device).total_memory
    now, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    taken = torch.cuda.memory_reserved(device)
    lines = [
        said.splitlines()[0],
        f"Used: tensors held {now / GIB:.1f} GiB, at most {most / GIB:.1f}, and the allocator "
        f"{taken / GIB:.1f}, of {total / GIB:.1f} on this GPU.",
    ]
    if unpredicted:
        return OutOfMemory("\n".join([*lines, f"Nothing was predicted: {unpredicted}. {OPTIONS}"]))
    try:
        cluster = cluster_here(settings.hardware, num_gpus, total, host.total_bytes())
        predicted = predict_run(
            settings,
            config,
            cluster,
            fsdp=accelerator.is_fsdp2,
            states_on_host=states_on_host(accelerator),
        )
    except ValueError as reason:  # a model that the planner does not know
        return OutOfMemory("\n".join([*lines, f"Nothing was predicted: {reason}"]))
    parts = ", ".join(
        f"{name} {value / GIB:.1f}" for name, value in predicted.memory.parts().items() if value
    )
    lines += [
        f"Predicted: {predicted.memory.total / GIB:.1f} GiB with --checkpoint "
        f"{settings.checkpoint} ({parts}).",
        f"To change: {_for_the_recipe(advice(predicted))}. `longctx plan` compares more.",
    ]
    return OutOfMemory("\n".join(lines))


def _for_the_recipe(text: str) -> str:
    """The advice in the recipe's flags. Where states are is set in the launcher's YAML instead."""
    text = text.replace("--rank", "--lora-rank")
    forwards = r", with (\d+) forwards a step,"
    text = re.sub(forwards, r" --gradient-accumulation-steps \1", text)
    return text.replace(" --states-on-host", " and fsdp_offload_params: true in accelerate.yaml")


def predict_run(
    settings: Settings,
    config: Any,
    cluster: Cluster,
    *,
    fsdp: bool = True,
    states_on_host: bool = False,
    rows_per_step: int | None = None,
) -> Result:
    """Predict memory and time of these settings. Raises ValueError for what is not covered.

    Without `rows_per_step` a step has the rows that the settings accumulate.
    """
    parallelism = settings.sequence_parallelism()
    forwards = settings.gradient_accumulation_steps
    if rows_per_step is None and forwards > 1:
        rows_per_step = forwards * (cluster.num_gpus // parallelism.sequence_degree)
    job = job_of(settings, config, cluster, fsdp=fsdp, rows_per_step=rows_per_step)
    if parallelism.torch_recurrence and job.shape.num_recurrent:
        raise ValueError(
            "torch_recurrence=True: what torch's functions keep of recurrent layers is not "
            "predicted, which is much more than their kernels keep."
        )
    predicted = replace(
        parallelism,
        # Chains of states depend on the layout. Attention alone is predicted in that of `auto`.
        layout=parallelism.layout if job.shape.num_recurrent else None,
        plan="auto",
        backward_plan="auto",
        ranks_per_node=None,
    )
    return result_of(job, predicted, offload_states=states_on_host)


def job_of(
    settings: Settings,
    config: Any,
    cluster: Cluster,
    *,
    fsdp: bool = True,
    rows_per_step: int | None = None,
) -> Job:
    """Returns what these settings train, whatever their degrees; rows of a forward count as one."""
    dtype: WeightsDtype = "float32" if settings.dtype == "float32" else "bfloat16"
    return Job(
        shape=shape_of(config, settings.model, lora_parameters=settings.lora_target_parameters),
        cluster=cluster,
        seq_len=settings.seq_len * settings.batch_size,
        lora=settings.uses_lora,
        lora_rank=settings.lora_rank,
        also_train=tuple(settings.also_train),
        dtype="nf4" if settings.load_in_4bit else dtype,
        fsdp=fsdp and not settings.load_in_4bit,
        fused_layers=settings.fused_layers != "none" and config.model_type in LIGER_FAMILIES,
        rows_per_step=rows_per_step,
    )
