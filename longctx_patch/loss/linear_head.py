"""A linear head over a chunk of tokens at a time: what is wanted of their logits, and gradients.

The logits of a chunk are made, and at once turned into numbers of each token and gradients of the
inputs, which are small (`head_gradients.py`): this is the chunked loss of Liger Kernel (arXiv
2410.10989, section 3.2); cut cross-entropy (arXiv 2411.09009) takes the idea down into one kernel.
There are three matrix products in all, as many as with full logits; none is computed twice. Between
them runs one Triton kernel on NVIDIA GPUs (`fused_softmax.py`), and torch's operations elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx_patch.kernels.installed import runs_triton
from longctx_patch.loss.head_gradients import HeadGradients, Wanted
from longctx_patch.loss.label_scores import Scores
from longctx_patch.loss.law import IGNORE_INDEX
from longctx_patch.loss.wide_products import wide_product

CHUNK_BYTES = 2 * 2**30
"""Bytes of a chunk's float32 logits: at 128,256 words those of 4,185 tokens, which keep a GPU
busy."""

_CAPPED_ROWS = 64
"""Tokens whose capped logits are copied at once for their mean."""


@dataclass(frozen=True)
class LinearHead:
    """The treatment of logits, and the division of the work: N tokens, C of them in a chunk."""

    softcap: float | None
    scale: float
    chunk_bytes: int
    with_statistics: bool = False
    """Computes entropy and top-1 hits beside the losses."""
    with_mean_logits: bool = False
    """Computes means of logits over words, which cost a pass over the logits."""

    def check(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
        """Raise ValueError for inputs that don't fit, see `linear_cross_entropy`."""
        num_words = len(weight)
        biased = None if bias is None else tuple(bias.shape)
        fits = hidden.shape[:-1] == labels.shape and hidden.shape[-1:] == weight.shape[1:]
        if not fits or biased not in (None, (num_words,)):
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
                f"{tuple(labels.shape)}, bias {biased}: they must be [..., D], [V, D], [...] and "
                "[V]."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(
                f"softcap={self.softcap}: it is a positive number, or None for no softcap."
            )
        if self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}: it is a number of bytes, 1 or more.")
        if labels.device.type == "cpu":
            wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= num_words))]
            if len(wrong):
                raise ValueError(
                    f"label {int(wrong[0])}: labels are from 0 to {num_words - 1}, or "
                    f"{IGNORE_INDEX} for tokens without loss. Check the tokenizer against the "
                    "model's vocabulary."
                )

    def walk(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        labels_N: Tensor,
        wanted: Wanted,
        segments: Sequence[int],
    ) -> tuple[Scores, HeadGradients]:
        """Scores, and gradients of sums of their losses, yet to be multiplied by `scale`.

        `segments`: tokens of each segment, see `HeadGradients`; N in all.
        """
        dtype = _product_dtype(hidden_ND)
        wide = torch.promote_types(dtype, torch.float32)
        grads = HeadGradients.zeros(hidden_ND, weight_VD, bias, wanted, segments, wide)
        found = []
        with torch.autocast(hidden_ND.device.type, enabled=False):
            factors_VD = weight_VD.to(dtype)
            for rows in self._chunks(len(hidden_ND), len(weight_VD)):
                hidden_CD = hidden_ND[rows].to(dtype)
                found.append(self._chunk(rows, hidden_CD, factors_VD, bias, labels_N[rows], grads))
        return Scores.join(found), grads

    def _chunk(
        self,
        rows: slice,
        hidden_CD: Tensor,
        factors_VD: Tensor,
        bias: Tensor | None,
        labels_C: Tensor,
        grads: HeadGradients,
    ) -> Scores:
        """The scores of a chunk; adds to the gradients that are wanted."""
        scores, grad_CV = self._scores(hidden_CD, factors_VD, bias, labels_C, grads.any_wanted)
        if grad_CV is not None:
            grads.add(rows, grad_CV, hidden_CD, factors_VD, labels_C)
        return scores

    def _chunks(self, num_tokens: int, num_words: int) -> Iterator[slice]:
        """As few chunks as `chunk_bytes` allows, and one at least; their sizes differ by one token
        at most."""
        largest = max(1, self.chunk_bytes // (4 * num_words))
        num_chunks = max(1, -(-num_tokens // largest))
        for chunk in range(num_chunks):
            yield slice(chunk * num_tokens // num_chunks, (chunk + 1) * num_tokens // num_chunks)

    def _scores(
        self,
        hidden_CD: Tensor,
        factors_VD: Tensor,
        bias: Tensor | None,
        labels_C: Tensor,
        with_gradient: bool,
    ) -> tuple[Scores, Tensor | None]:
        """Scores of a chunk's rows, and gradients of scaled logits in the dtype of the products."""
        logits_CV = wide_product(hidden_CD, factors_VD.t())
        if bias is not None:
            logits_CV += bias
        means_C = self._mean_logits(logits_CV, labels_C)
        dtype = factors_VD.dtype
        if fits_fused(logits_CV.device.type, dtype) and runs_triton():
            from longctx_patch.loss.fused_softmax import softmax_scores

            scores, grad_CV = softmax_scores(
                logits_CV,
                labels_C,
                softcap=self.softcap,
                scale=self.scale,
                grad_dtype=dtype if with_gradient else None,
                with_statistics=self.with_statistics,
            )
            return scores._replace(mean_logits=means_C), grad_CV
        self._scale_and_cap_(logits_CV)
        logs_CV = logits_CV.log_softmax(-1)
        if self.softcap is None:
            del logits_CV  # makes room
        words_C1 = labels_C.where(labels_C != IGNORE_INDEX, 0)[:, None]
        logs_C1 = logs_CV.gather(1, words_C1)
        scores = self._scores_of_logs(logs_CV, logs_C1[:, 0], labels_C)
        scores = scores._replace(mean_logits=means_C)
        if not with_gradient:
            return scores, None
        grad_CV = self._gradient_of_logits(logs_CV, words_C1, logs_C1, dtype)
        if self.softcap is not None:
            # d/dx c * tanh(x / c) = 1 - tanh(x / c)^2
            grad_CV.addcmul_(grad_CV, logits_CV.div_(self.softcap).square_(), value=-1)
        return scores, grad_CV.to(dtype)

    def _scores_of_logs(self, logs_CV: Tensor, logs_C: Tensor, labels_C: Tensor) -> Scores:
        """`logs_C`: those of the labels."""
        is_valid_C = labels_C != IGNORE_INDEX
        losses_C = -logs_C.where(is_valid_C, 0)
        if not self.with_statistics:
            return Scores.of_losses(losses_C)
        entropy_C = torch.special.entr(logs_CV.exp()).sum(-1).where(is_valid_C, 0)
        return Scores(losses_C, entropy_C, logs_CV.argmax(-1) == labels_C, losses_C[:0])

    def _mean_logits(self, logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        """Means over words after scale and softcap, `[0]` if they aren't wanted."""
        if not self.with_mean_logits:
            return logits_CV.new_zeros(0)
        if self.softcap is None:
            means_C = self.scale * logits_CV.mean(-1)
        else:
            parts = (part.clone() for part in logits_CV.split(_CAPPED_ROWS))
            means_C = torch.cat([self._scale_and_cap_(part).mean(-1) for part in parts])
        return means_C.where(labels_C != IGNORE_INDEX, 0)

    def _scale_and_cap_(self, logits_CV: Tensor) -> Tensor:
        """Scale logits and apply the softcap, in place."""
        if self.scale != 1:
            logits_CV *= self.scale
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    def _gradient_of_logits(
        self, logs_CV: Tensor, words_C1: Tensor, logs_C1: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """softmax - one_hot: the gradient of logits after the softcap; may overwrite `logs_CV`.

        Its dtype is that of the products, but float32 or wider if a softcap's slope is yet to be
        multiplied in.
        """
        if self.softcap is not None or dtype == logs_CV.dtype:
            grad_CV = logs_CV.exp_()
        else:
            grad_CV = torch.exp(logs_CV, out=torch.empty_like(logs_CV, dtype=dtype))
        return grad_CV.scatter_(1, words_C1, logs_C1.expm1().to(grad_CV.dtype))


def fits_fused(device_type: str, dtype: torch.dtype) -> bool:
    """Says whether the fused kernel takes logits of such products, which are float32 then."""
    return device_type == "cuda" and dtype != torch.float64


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype
