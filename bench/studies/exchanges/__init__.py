"""What other exchanges would cost; feeds docs/explanation/plans.md and docs/explanation/parameter_server.md."""
