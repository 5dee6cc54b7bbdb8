"""What TRL's trainers ask of a head, in plain torch."""

import torch

TOKEN_CHUNK_SIZE = 4096
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def is_triton_available():
    return True


class ChunkedLogProbFunction:
    @staticmethod
    def apply(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=OUTPUTS,
    ):
        z = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
        if final_logit_softcapping is not None:
            z = final_logit_softcapping * torch.tanh(z / final_logit_softcapping)
        z = z / temperature
        logs = torch.log_softmax(z, -1)
        found = {
            "entropy": -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": torch.logsumexp(2 * logs, -1).detach(),
            "mean_logits": z.mean(-1).detach(),
            "is_top1": z.argmax(-1) == targets,
        }
        log_probs = logs.gather(-1, targets[:, None])[:, 0]
        return log_probs, *(found[name] if name in outputs else None for name in OUTPUTS)
