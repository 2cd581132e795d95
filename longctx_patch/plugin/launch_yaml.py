"""The YAML that `accelerate launch --config_file` reads, with Accelerate's own keys only."""

from typing import Any

from longctx_patch.rules.world import require_whole_groups

# A placeholder that the user replaces. The launcher rejects such a name at once and shows it; it
# would spend minutes looking up a name that might exist.
MAIN_PROCESS_IP = "<main_process_ip is the name or address of machine 0>"
CPU_NOTE = """\
# Several processes on the CPU: distributed_type MULTI_GPU starts as many as num_processes says
# (MULTI_CPU starts one, unless MPI is used), and a gpu_id of -1 for each hides every GPU.
"""


def accelerate_yaml(
    num_processes: int,
    sequence_degree: int,
    *,
    fsdp: bool,
    num_machines: int = 1,
    cpu: bool = False,
    mixed_precision: str = "bf16",
    states_on_host: bool = False,
) -> str:
    """YAML text for `num_processes` processes, `sequence_degree` of which share a sequence.

    With `fsdp` parameters are sharded over all ranks (FSDP2), otherwise each rank holds the model.
    A single process gains from FSDP2 too: float32 master weights, and adapters that are computed in
    the low precision without autocast's copies. With `states_on_host` as well, parameters,
    gradients and the optimizer are in host memory, and the optimizer steps there. With `cpu` the
    processes run on the CPU even where there is a GPU.

    Raises:
        ValueError: degrees that do not fit the processes, or FSDP where it cannot work.

    Example:
        >>> Path("accelerate.yaml").write_text(accelerate_yaml(8, 4, fsdp=True))
    """
    import yaml

    _check(num_processes, sequence_degree, num_machines, fsdp, cpu, mixed_precision, states_on_host)
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # CPU_NOTE says why not MULTI_CPU; make_accelerator takes the CPU where no GPU is visible.
        "distributed_type": "FSDP" if fsdp else "NO" if num_processes == 1 else "MULTI_GPU",
        "num_machines": num_machines,
        "num_processes": num_processes,
        "machine_rank": 0,
    }
    if num_machines > 1:
        settings |= {
            "main_process_ip": MAIN_PROCESS_IP,
            "main_process_port": 29500,
            "rdzv_backend": "static",
            "same_network": True,
        }
    settings |= {"mixed_precision": mixed_precision} | _device_settings(num_processes, cpu)
    if fsdp:
        settings["fsdp_config"] = _fsdp_settings(states_on_host)
    if num_processes > 1:
        data_parallel = num_processes // sequence_degree
        settings["parallelism_config"] = {
            "parallelism_config_cp_size": sequence_degree,
            "parallelism_config_dp_replicate_size": 1 if fsdp else data_parallel,
            "parallelism_config_dp_shard_size": data_parallel if fsdp else 1,
        }
    note = CPU_NOTE if cpu and num_processes > 1 else ""
    return note + yaml.safe_dump(settings, sort_keys=False)


def _check(
    num_processes: int,
    sequence_degree: int,
    num_machines: int,
    fsdp: bool,
    cpu: bool,
    mixed_precision: str,
    states_on_host: bool,
) -> None:
    if min(num_processes, sequence_degree, num_machines) < 1:
        raise ValueError(
            f"num_processes={num_processes}, sequence_degree={sequence_degree}, num_machines="
            f"{num_machines}: each is 1 or more."
        )
    require_whole_groups("sequence_degree", sequence_degree, num_processes, started=False)
    if num_processes % num_machines:
        enough = -(-num_processes // num_machines) * num_machines
        raise ValueError(
            f"num_machines={num_machines} with num_processes={num_processes}: it must divide the "
            f"number of processes. Use num_processes={enough}."
        )
    if states_on_host and (cpu or not fsdp):
        raise ValueError(
            f"states_on_host=True with fsdp={fsdp}, cpu={cpu}: only FSDP2 on GPUs keeps states "
            "on the host. Use fsdp=True and cpu=False, or states_on_host=False."
        )
    if fsdp and cpu:
        raise ValueError(
            f"fsdp=True with cpu={cpu}: Accelerate shards over GPUs only. Use fsdp=False."
        )
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ValueError(f"mixed_precision={mixed_precision!r}: choose no, bf16 or fp16.")


def _device_settings(num_processes: int, cpu: bool) -> dict[str, Any]:
    if not cpu:
        return {"use_cpu": False}
    if num_processes == 1:
        return {"use_cpu": True}
    # use_cpu: true ends the launch of several processes; "-1" as the first id hides all GPUs.
    return {"use_cpu": False, "gpu_ids": ",".join(["-1"] * num_processes)}


def _fsdp_settings(states_on_host: bool) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        # No class is named: Accelerate wraps the model's own _no_split_modules.
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": states_on_host,
        "fsdp_cpu_ram_efficient_loading": False,
        # The patch checkpoints activations itself (LongContextConfig.checkpoint).
        "fsdp_activation_checkpointing": False,
    }
