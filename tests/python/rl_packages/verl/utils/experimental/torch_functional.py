"""What verl's models ask of a head, in plain torch."""

import torch


class FusedLinearForPPO(torch.nn.Module):
    def __init__(self, chunk_size=512, impl_backend="torch"):
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        logs = torch.log_softmax(hidden_states @ vocab_weights.t() / temperature, -1)
        log_prob = logs.gather(-1, input_ids.long()[..., None])[..., 0]
        return log_prob, -(logs.exp() * logs).sum(-1)
