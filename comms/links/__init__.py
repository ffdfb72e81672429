"""What the links between ranks give, and each way of finding out."""
