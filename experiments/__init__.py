"""One flat script per figure or table of the paper. They import particlax, never the reverse."""
