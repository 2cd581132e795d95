"""The rule that ties degrees to a job: its processes make up whole sequence groups."""


def require_whole_groups(
    given: str, degree: int, num_processes: int, *, started: bool = True
) -> None:
    """Raise ValueError unless `num_processes` is a multiple of `degree`, the ranks per sequence.

    Args:
        given: what the degree comes from, as the user wrote it.
        started: the processes run already; False: the job is only planned.
    """
    if num_processes % degree == 0:
        return
    found = "1 process runs" if num_processes == 1 else f"{num_processes} processes run"
    if not started:
        found = f"{num_processes} process(es) are planned"
    text = (
        f"{given} = {degree} ranks per sequence, but {found}: the number of processes must be a "
        f"multiple of {degree}. "
    )
    if num_processes == 1 and started:
        raise ValueError(
            f"{text}Start the script with `accelerate launch --config_file FILE` and put in FILE: "
            f"distributed_type: MULTI_GPU (or FSDP), num_processes: {degree} or a multiple, "
            "use_cpu: false, also on a machine without a GPU (MULTI_CPU starts one process only, "
            f"unless MPI is used). Or use `torchrun --nproc_per_node {degree} script.py` or, in a "
            f"notebook, `accelerate.notebook_launcher(train, num_processes={degree})`, and "
            "initialise torch.distributed (Accelerator() does) before patching."
        )
    enough = -(-num_processes // degree) * degree
    divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
    raise ValueError(
        f"{text}Use {enough} of them (num_processes: {enough} in the YAML, --nproc_per_node of "
        f"torchrun, --gpus {enough} for `longctx patch`), or as many ranks per sequence as divide "
        f"{num_processes}: {', '.join(divisors)}."
    )
