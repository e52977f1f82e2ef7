"""Run studies on a Slurm cluster: group steps into jobs, submit them, and follow their state."""
