"""Host memory that loading the weights takes, predicted."""

from longctx_patch.families.stored_tensors import BLOCK_BYTES, READERS
from longctx_patch.predict.run.candidate import Candidate, Job
from longctx_patch.predict.run.components import loaded_bytes, states

LAYER_OBJECTS_BYTES = 357_000
"""What one layer takes in each process beside its numbers: modules, parameters, and what FSDP2 and
torch's distributed tensors note of them. Measured of 80 layers of Llama."""


def loading_bytes(job: Job, candidate: Candidate) -> float:
    """Bytes of one machine's host while weights are loaded, of all its processes together, beside
    what the processes themselves take.

    Under FSDP2 each process reads its own rows from safetensors through its readers' buffers, and
    they stay on the host where states do. Otherwise each process holds the whole model, unless it
    has 4 bits: then weights go to the GPU one by one.
    """
    if job.fsdp:
        rows = states(job)[0] if candidate.offload_states else 0.0
        objects = LAYER_OBJECTS_BYTES * job.shape.num_layers
        of_one = rows + READERS * BLOCK_BYTES + objects
    else:
        of_one = 0.0 if job.dtype == "nf4" else loaded_bytes(job)
    return of_one * job.cluster.gpus_per_node


def how_loaded(job: Job) -> str:
    """Who reads what, in words."""
    if job.fsdp:
        return "each process reads its own rows of safetensors"
    if job.dtype == "nf4":
        return "each process quantises weights on its GPU, one by one"
    return "every process holds the whole model"
