"""What changes what is loaded, settings, tasks and jobs."""
