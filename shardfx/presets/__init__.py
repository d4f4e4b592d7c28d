from .eformer import Layout as Layout, eformer as eformer, infer_mode as infer_mode
from .t5x import t5x as t5x
