"""An outside judge, the PyPI package ckpt-chaos, on ``examples/train_ddp.py``; see ``__main__``."""
