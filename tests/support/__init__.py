"""What tests of several folders share: ranks as threads, and plans on plain arrays."""
