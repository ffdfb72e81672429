"""What other exchanges would cost: both directions at once or in turn (docs/explanation/plans.md), through parameter
servers (docs/explanation/parameter_server.md)."""
