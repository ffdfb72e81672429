"""`gradwire compare`: ways of averaging gradients side by side, real models or replayed ones."""
