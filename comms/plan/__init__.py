"""Plans all-reduces: which collectives average a bucket, on which ranks and elements, and what that costs."""
