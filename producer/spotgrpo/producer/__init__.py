"""The generator worker: tasks in, scored groups out, newest policy served."""
