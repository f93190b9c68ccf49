"""The shared harness of the course: formats, quantisation, references, compilation, launches, checks and measurements."""

__version__ = "0.1.0"
