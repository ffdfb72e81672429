"""What other exchanges would cost; feeds docs/results/exchanges.md and docs/results/parameter_server.md."""
