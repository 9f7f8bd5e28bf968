"""The node's daemon: sealed slots become files, files become a checkpoint. No torch, no pickle, no collective."""
