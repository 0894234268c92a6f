"""The command line, ``python -m torch_flash_mps``: one module per command, and what they share."""
