from ..kernels import ChunkedLogProbFunction as _ChunkedLogProbFunction  # noqa: F401
from ..kernels import selective_log_softmax_and_entropy as _fused_logprob_entropy  # noqa: F401
