"""Linear attention by its definition, with T x T weights. The chunked form must agree with it."""

from torch import Tensor
from torch.nn.functional import elu

from model.ops.gates import forgotten


def naive_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None = None) -> Tensor:
    """Katharopoulos et al. 2020 (arXiv 2006.16236), eqs. 7 and 8, literally.

        y_i = sum_{j <= i} phi(q_i)^T phi(k_j) v_j / sum_{j <= i} phi(q_i)^T phi(k_j),    phi(x) = elu(x) + 1

    Shapes and result are those of `linear_attention`. With gates, a pair's weight is multiplied by what is kept.
    """
    weights = ((elu(q) + 1) @ (elu(k) + 1).mT).tril()  # (B, H, T, T)
    if log_f is not None:
        weights = weights * forgotten(log_f).squeeze(-1).exp()
    return weights @ v / weights.sum(-1, keepdim=True)
