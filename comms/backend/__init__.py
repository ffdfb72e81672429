"""The torch.distributed backend "gradwire"."""
