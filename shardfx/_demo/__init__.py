from .screen import show as show
from .train import Run as Run, default_mesh as default_mesh
