"""Training that exchanges parameters now and then instead of gradients at every step."""
