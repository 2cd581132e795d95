"""Predict what a degree for each batch would gain over one degree for all rows, on 4 GPUs.

    PYTHONPATH=. python benchmarks/degrees_by_batch.py 4xH200 llama-8b full

161 documents of log-normal lengths (median 8,192, 95th percentile 65,536, none above 131,072, one
of 131,072). One degree: packed into rows of 131,072 over all GPUs. By batch: documents up to a
limit in rows for one GPU each, up to twice as much in rows for two, longer ones over four. GPUs
wait for the slowest of those that compute at the same time, as FSDP2 makes them.
"""

import math
import random
import sys
from collections.abc import Sequence

from model_shapes import model_config

from longctx_patch import LongContextConfig
from longctx_patch.planner.job import Job, parse_cluster
from longctx_patch.planner.model_shape import shape_of
from longctx_patch.planner.search import result_of
from longctx_patch.sequence.documents import Documents

LONGEST, MEDIAN, P95, NUM_GPUS = 131072, 8192, 65536, 4


def draw_documents(seed: int) -> list[int]:
    generator, sigma = random.Random(seed), math.log(P95 / MEDIAN) / 1.645
    drawn = (round(math.exp(generator.gauss(math.log(MEDIAN), sigma))) for _ in range(10_000))
    return [*[n for n in drawn if 64 <= n <= LONGEST][:160], LONGEST]


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of at most `room` tokens, best fit first."""
    rows = list[list[int]]()
    for n in sorted(lengths, reverse=True):
        having_room = [row for row in rows if sum(row) + n <= room]
        if having_room:
            max(having_room, key=sum).append(n)
        else:
            rows.append([n])
    return rows


def row_seconds(job: Job, lengths: Sequence[int], degree: int) -> float:
    """Forward and backward of a row over `degree` GPUs."""
    num_tokens = sum(lengths)
    row = Documents.of_row(tuple(lengths), num_tokens)
    fields = vars(job) | {"seq_len": num_tokens, "row": row, "rows_per_step": NUM_GPUS // degree}
    config = LongContextConfig(ulysses_degree=degree, checkpoint="auto")
    time = result_of(Job(**fields), config).time
    return time.total - time.optimizer - time.idle


def by_batch(job: Job, documents: Sequence[int], on_one: int) -> tuple[float, float]:
    """(seconds, those if every GPU was always busy)."""
    whole = ideal = 0.0
    for degree, shortest, longest in (
        (1, 0, on_one),
        (2, on_one, 2 * on_one),
        (4, 2 * on_one, LONGEST),
    ):
        mine = [n for n in documents if shortest < n <= longest]
        took = sorted(
            (row_seconds(job, row, degree) for row in packed(mine, longest)), reverse=True
        )
        at_once = NUM_GPUS // degree
        whole += sum(took[::at_once])
        ideal += sum(took) / at_once
    return whole, ideal


def main() -> None:
    gpus, model, how = sys.argv[1:]
    shape = shape_of(model_config(model, None, LONGEST), model)
    for seed in (0, 1):
        documents = draw_documents(seed)
        job = Job(shape=shape, cluster=parse_cluster(gpus), seq_len=LONGEST, lora=how == "lora")
        one = sum(row_seconds(job, row, NUM_GPUS) for row in packed(documents, LONGEST))
        print(f"{sum(documents):,} tokens: one degree {one:.1f} s")
        for on_one in (32768, 65536):
            took, ideal = by_batch(job, documents, on_one)
            gains = f"{one / took:.3f} times, {one / ideal:.3f} if no GPU waits"
            print(f"  up to {on_one:,} on one GPU: {took:.1f} s, {gains}")


if __name__ == "__main__":
    main()
