"""The tables of docs/results, made from docs/results/data: Markdown for people, CSV for everything else."""
