"""What other exchanges would cost; feeds docs/explanation/plans.md and docs/results/parameter_server.md."""
