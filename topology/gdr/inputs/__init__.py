"""Where the checker's facts come from: live, captured, or a text that somebody pasted."""
