"""Small distributed-data-parallel demos that prove what they show, and what it takes to launch them."""

__version__ = "0.1.0"
