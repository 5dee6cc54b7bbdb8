"""Measures gander beside torch, torch.compile and others, and demonstrates it. The commands are
`python -m gander_bench demo | bench | bench train`."""
