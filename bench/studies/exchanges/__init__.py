"""What exchanges of another kind would cost: one direction after the other, and through parameter servers."""
