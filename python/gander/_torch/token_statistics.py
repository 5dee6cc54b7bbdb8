"""Names of the results and options of token_statistics, for heads and for slices of tokens."""

from .._table import TORCH

RESULTS = TORCH["token_statistics"].results  # log_prob and entropy, which have gradients, come first
STATISTICS = RESULTS[:-1]  # without the state
HEADS = 4  # results of floating-point numbers
MAPS = ("scale", "softcap", "temperature")  # options that map logits


def maps_of(options):
    """The values of MAPS, of options that are not their defaults. In a graph defaults are constants of code:
    see loss_values."""
    return options.get("scale", 1.0), options.get("softcap", 0.0), options.get("temperature", 1.0)
