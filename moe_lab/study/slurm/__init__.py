"""Studies on a Slurm cluster: which jobs there should be, submitting them, what became of them."""
