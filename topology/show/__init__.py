"""A Machine for people and programs: text, matrix, picture, JSON, NCCL's XML."""
