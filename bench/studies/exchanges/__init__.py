"""What other exchanges would cost; feeds docs/results/exchanges.md."""
