"""The parts of ``spotgrpo demo``: its folder and model, its processes, the screen, the plot, the verdict."""
